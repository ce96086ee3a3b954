"""What the benchmarks share: ranks by fork, alternating measurements, torch's schedules, tables."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.distributed as dist
from torch import nn

from distributed import run_distributed

__all__ = ["alternate", "machine", "run_distributed", "table", "torch_schedule"]


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds by `clock` of each candidate, measured in turn round after round, so that a noisy moment hits all alike;
    each round in an order of its own, the same on all ranks, so that nobody always comes after the same one.

    `time.process_time` as clock: CPU time of this rank, all its threads.

    On several ranks every run is between two barriers: the time is that of the slowest rank.
    """
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order, random = list(candidates), Random(0)
    for index in range(warm_up + rounds):
        random.shuffle(order)
        for name in order:
            run = candidates[name]
            if ranks:
                dist.barrier()
            begun = clock()
            run()
            if ranks:
                dist.barrier()
            if index >= warm_up:
                seconds[name].append(clock() - begun)
    return seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def machine() -> str:
    """One line on where this ran."""
    threads, version = torch.get_num_threads(), platform.python_version()
    return f"{platform.machine()}, {threads} thread(s) a rank, torch {torch.__version__}, Python {version}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown, columns aligned."""
    cells = [[str(c) for c in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


TORCH_NAMES = {
    "gpipe": "ScheduleGPipe",
    "looped_bfs": "ScheduleLoopedBFS",
    "1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}


def torch_schedule(config: Mapping[str, Any], count: int, modules: Mapping[int, nn.Module], stages: int, loss_fn: Any):
    """torch's schedule for the same config over the same kind of stages; steps are called as hocket's are."""
    import warnings

    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    warnings.filterwarnings("ignore")
    device = torch.device("cpu")
    parts = [PipelineStage(module, index, stages, device) for index, module in modules.items()]
    name = "zero_bubble" if config.get("zero_bubble") else config["schedule"]
    if name == "1f1b" and len(parts) == 1:
        return pipelining.Schedule1F1B(parts[0], count, loss_fn=loss_fn)
    kind = getattr(pipelining, TORCH_NAMES[name])
    return kind(parts[0] if name == "gpipe" else parts, count, loss_fn=loss_fn)
