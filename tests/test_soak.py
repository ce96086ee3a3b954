"""2,000 steps with changing shapes: memory, objects, handles, threads stay flat, and weights are those of one process.

HOCKET_LONG=1 pytest -s tests/test_soak.py
"""

from __future__ import annotations

import gc
import os
import threading
from typing import NamedTuple

import pytest
import torch

from distributed import run_distributed
from hocket import split_microbatch_ranges
from hocket.runtime import PipelineStageInfo, build_schedule
from long import long
from runtime.parity import WIDTH, make_stage, mse

STEPS = 2000
MICROBATCHES = 2
SIZES = (4, 6, 3, 8)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """What a process holds."""

    step: int
    objects: int
    tensors: int
    kilobytes: int
    handles: int
    threads: int


def use(step: int) -> Use:
    """What this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * _PAGE // 1024
    objects = gc.get_objects()
    tensors = sum(type(o) is torch.Tensor for o in objects)
    return Use(step, len(objects), tensors, resident, len(os.listdir("/proc/self/fd")), threading.active_count())


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = SIZES[step % len(SIZES)]
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def _optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _soak(rank: int) -> tuple[list[Use], list[torch.Tensor]]:
    info, modules = build_schedule(None, MICROBATCHES, "1f1b", make_stage, mse, timeout=30)
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = _optimizer(parameters)
    seen = []
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        info.schedule.step(x, targets=y)
        optimizer.step()
        if (step + 1) % (STEPS // 10) == 0:
            seen.append(use(step + 1))
    return seen, [p.detach().clone() for p in parameters]


def _alone(num_stages: int) -> list[torch.Tensor]:
    stages = [make_stage(PipelineStageInfo(s, num_stages)) for s in range(num_stages)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = _optimizer(parameters)
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        for items in split_microbatch_ranges(len(x), MICROBATCHES):
            output = x[items.start : items.stop]
            for stage in stages:
                output = stage(output)
            (mse(output, y[items.start : items.stop]) * (len(items) / len(x))).backward()
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.slow
@long
@pytest.mark.parametrize("ranks", [2, 4])
def test_flat_and_without_drift(ranks: int) -> None:
    rows = run_distributed(_soak, ranks, timeout=110)
    for rank, (seen, _) in enumerate(rows):
        print(f"rank {rank}:", *seen, sep="\n  ")
        early, late = seen[4], seen[-1]
        assert late.objects - early.objects < 100
        assert late.tensors == early.tensors
        assert late.kilobytes - early.kilobytes < 4096
        assert late.handles == early.handles
        assert late.threads == early.threads
    parameters = [p for _, mine in rows for p in mine]
    torch.testing.assert_close(parameters, _alone(ranks), rtol=0, atol=0)


def _builds(rank: int) -> list[Use]:
    seen = []
    for count in range(30):
        schedule = build_schedule(None, MICROBATCHES, "1f1b", make_stage, mse, timeout=30)[0].schedule
        x, y = _batch(count)
        schedule.step(x, targets=y)
        del schedule
        if count % 10 == 9:
            seen.append(use(count))
    return seen


def test_schedules_that_are_dropped_leave_nothing() -> None:
    for seen in run_distributed(_builds, 2, timeout=60):
        assert seen[-1].handles <= seen[1].handles, seen
        assert seen[-1].threads <= seen[1].threads, seen
        assert seen[-1].tensors == seen[1].tensors, seen
