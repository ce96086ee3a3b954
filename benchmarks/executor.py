"""Time per compute action with nearly empty modules: hocket, a bare loop of the same order, and torch, in one run.

    python benchmarks/executor.py [--quick]

The modules multiply by one parameter, so what is measured is the executor, autograd's floor and the backend. Ratios are
medians over several launches: which of two groups of connections is the faster one is up to each launch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from bare import Autograd, BareLoop
from harness import alternate, machine, median, run_distributed, table, torch_schedule
from torch import nn

from hocket.runtime import build_schedule
from hocket.runtime.record import Record, clock_of

SHAPE, COUNT = (4, 16), 32
CONFIGS = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def measure(rank: int, config: dict[str, Any], count: int, rounds: int, cpu: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    info, modules = build_schedule(None, count, config, lambda info: Scale(), mse)
    program = info.schedule.program
    mine = dict(zip(program.placement.stages_of(rank), modules, strict=True))
    x, y = torch.randn(count * SHAPE[0], SHAPE[1]), torch.randn(count * SHAPE[0], SHAPE[1])
    bare = BareLoop(program, rank, Autograd(mine, program.num_stages - 1, mse, count), SHAPE)
    candidates = {
        "bare": lambda: bare.step(x.chunk(count), y.chunk(count)),
        "hocket": lambda: info.schedule.step(x, targets=y),
    }
    theirs = torch_schedule(config, count, {i: Scale() for i in mine}, program.num_stages, mse)
    first, last = info.has_first_stage, info.has_last_stage
    candidates["torch"] = lambda: theirs.step(*([x] if first else []), target=y if last else None)
    actions = sum(len(a.computes) for a in program.ranks[rank])
    return {
        name: median(s) / actions * 1e6
        for name, s in alternate(candidates, rounds, clock=time.process_time if cpu else time.perf_counter).items()
    }


def recording() -> float:
    """Seconds that the record of one action takes, which every step keeps for `trace`."""
    record, count = Record(clock_of(torch.device("cpu"))), 100_000
    begun = time.perf_counter()
    now, ended = record.now, record.ends.append
    for _ in range(count):
        ended(now())
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer ranks")
    parser.add_argument("--cpu", action="store_true", help="CPU time of rank 0 instead of wall time: for busy machines")
    args = parser.parse_args()
    quick = args.quick
    print(machine())
    print(f"the record of an action: {recording() * 1e6:.2f} us, {recording() / 0.01:.5%} of one of 10 ms")
    rows = []
    for ranks in (1, 2) if quick else (1, 2, 4):
        for config in CONFIGS:
            runs = [
                run_distributed(measure, ranks, config, COUNT, 5 if quick else 9, args.cpu, timeout=300)[0]
                for _ in range(3 if quick else 9)
            ]
            rows.append([ranks, " ".join(map(str, config.values()))])
            rows[-1] += [f"{median([run[name] for run in runs]):.0f}" for name in ("bare", "hocket", "torch")]
            rows[-1] += [f"{median([run['hocket'] / run[name] for run in runs]):.2f}" for name in ("bare", "torch")]
            print(rows[-1], flush=True)
    print(table(["ranks", "schedule", "bare us", "hocket us", "torch us", "/bare", "/torch"], rows))


if __name__ == "__main__":
    main()
