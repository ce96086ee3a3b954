"""A step on stages that sleep (F = I = W = 10 ms), so that cores do not matter: hocket, a bare loop of the same order,
torch, and the simulator fed with the measured hop and the median times of the run's own F, I and W.

The bare loop runs the same modules, with plain autograd or hocket's split of it.

    python benchmarks/sleep_step.py [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from bare import Autograd, BareLoop
from harness import alternate, machine, median, run_distributed, table, torch_schedule
from torch import nn

from hocket import CostModel, parse_schedule, simulate
from hocket.runtime import build_schedule
from hocket.runtime.backward import BackwardSplitter, register_deferred

SHAPE = (4, 64)
NAP = 0.010
CONFIGS: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "zero_bubble": True},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]


class Nap(nn.Module):
    """One weight; its forward, its input's gradient and its weight's gradient take a nap each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SleepThrough.apply(x) * _SleepWeight.apply(self.weight)


class _SleepThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return grads[0]


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return grads[0]


class DeferredNap(Nap):
    """The same as a type whose weight's gradient can wait."""


def _nap_forward(module: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    time.sleep(NAP)
    return x * w


def _nap_input(module: Any, gy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    time.sleep(NAP)
    return gy * w


def _nap_weight(module: Any, gy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    time.sleep(NAP)
    return ((gy * x).sum(0),)


class NapStage(nn.Module):
    """The first stage too computes a gradient for its input."""

    def __init__(self, nap: nn.Module):
        super().__init__()
        self.nap = nap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nap(x if x.requires_grad else x.detach().requires_grad_())


class SplitAutograd(Autograd):
    """The bare loop's stages where backward has two halves."""

    def __init__(self, modules: dict[int, nn.Module], last: int, loss_fn: Any, count: int):
        super().__init__(modules, last, loss_fn, count)
        self.splitters = {stage: BackwardSplitter(module, split=True) for stage, module in modules.items()}
        self.numbers = itertools.count()
        self.waiting: dict[int, deque[int]] = {stage: deque() for stage in modules}

    def forward(self, stage: int, x: torch.Tensor, target: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        key = next(self.numbers)
        with self.splitters[stage].forward_scope(key):
            out, saved = super().forward(stage, x, target)
        return out, (key, *saved)

    def backward(self, stage: int, saved: Any, grad: torch.Tensor | None, whole: bool) -> torch.Tensor | None:
        key, x, out = saved
        run = self.splitters[stage].backward_full if whole else self.splitters[stage].backward_input
        found = run(key, [out], [grad], [x] if stage > 0 else [])
        if not whole:
            self.waiting[stage].append(key)
        return found[0] if found else None

    def weights(self, stage: int) -> None:
        self.splitters[stage].backward_weight(self.waiting[stage].popleft())


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def hop_seconds(rank: int) -> float:
    """Half a round trip between ranks 0 and 1."""
    x = torch.zeros(SHAPE)
    if rank > 1:
        return 0.0
    begun = time.perf_counter()
    for _ in range(100):
        for first in (0, 1):
            (dist.send if rank == first else dist.recv)(x, 1 - rank)
    return (time.perf_counter() - begun) / 200


def measure(rank: int, config: dict[str, Any], count: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    deferred = config.get("zero_bubble") or config["schedule"] in ("zero_bubble_v", "dual_pipe_v")
    kind = DeferredNap if deferred else Nap
    info, modules = build_schedule(None, count, config, lambda info: NapStage(kind()), mse)
    program = info.schedule.program
    mine = dict(zip(program.placement.stages_of(rank), modules, strict=True))
    x, y = torch.randn(count * SHAPE[0], SHAPE[1]), torch.randn(count * SHAPE[0], SHAPE[1])
    compute = (SplitAutograd if deferred else Autograd)(
        {i: NapStage(kind()) for i in mine}, program.num_stages - 1, mse, count
    )
    bare = BareLoop(program, rank, compute, SHAPE)
    pieces, targets = x.chunk(count), y.chunk(count)
    theirs = torch_schedule(config, count, {i: NapStage(Nap()) for i in mine}, program.num_stages, mse)
    first, last = info.has_first_stage, info.has_last_stage
    candidates = {
        "bare": lambda: bare.step(pieces, targets),
        "hocket": lambda: info.schedule.step(x, targets=y),
        "torch": lambda: theirs.step(*([x] if first else []), target=y if last else None),
    }
    found = {name: median(seconds) for name, seconds in alternate(candidates, rounds, 1).items()}
    hop, ratios = hop_seconds(rank), []
    for _ in range(rounds):
        info.schedule.step(x, targets=y)
        trace = info.schedule.trace(all_ranks=True)
        ratios.append(trace.makespan / trace.ideal_makespan(hop))
    found["over simulated"] = median(ratios)
    costs = CostModel(forward=NAP, backward_input=NAP, backward_weight=NAP, backward=2 * NAP)
    found["nominal"] = simulate(program, costs).makespan
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 ranks only, fewer rounds")
    quick = parser.parse_args().quick
    register_deferred(
        DeferredNap, forward=_nap_forward, grad_input=_nap_input, grad_parameters=_nap_weight, parameters=("weight",)
    )
    print(machine())
    rows = []
    for ranks, count in [(4, 16)] if quick else [(4, 16), (8, 32)]:
        for config in CONFIGS:
            parse_schedule(config)
            f = run_distributed(measure, ranks, config, count, 3 if quick else 7, timeout=300)[0]
            ours = f["hocket"]
            name = " ".join(map(str, config.values()))
            ratios = [ours / f["bare"], ours / f["torch"], f["over simulated"], ours / f["nominal"]]
            torch_over = f"{f['torch'] / f['nominal']:.3f}"
            rows.append([f"{ranks}x{count}", name, f"{ours * 1e3:.0f}", torch_over, *(f"{r:.3f}" for r in ratios)])
            print(rows[-1], flush=True)
    head = ["size", "schedule", "hocket ms", "torch/nominal", "/bare", "/torch", "/simulated", "/nominal"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
