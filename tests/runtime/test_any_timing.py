"""Whatever the timing, the dtype default and the number of steps: parameters equal to one process, nothing piles up."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from distributed import run_distributed
from hocket import Placement, Program, build, lower, parse_schedule
from hocket.program import Op, message
from hocket.runtime import PipelineStageInfo, build_schedule
from hocket.runtime.build import _edges
from runtime.parity import Trained, batches, make_stage, mse, train_pipeline, train_reference

LONGEST = 0.03
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]
IDS = [" ".join(map(str, s.values())) for s in SCHEDULES]


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, naps: random.Random) -> torch.Tensor:
        ctx.naps = naps
        time.sleep(naps.uniform(0, LONGEST))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.naps.uniform(0, LONGEST))
        return grads[0], None


class Drowsy(nn.Module):
    """A stage that sleeps for a random time in every forward and backward."""

    def __init__(self, info: PipelineStageInfo, naps: random.Random):
        super().__init__()
        self.inner, self.naps = make_stage(info), naps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(self.inner(x), self.naps)


def _drowsy(rank: int, config: dict[str, Any], count: int, seeds: list[int]) -> list[tuple[int, Trained]]:
    found = []
    for seed in seeds:
        naps = random.Random(100 * seed + rank)
        trained = train_pipeline(
            None, config, count, batches(1, 8), provider=lambda info, naps=naps: Drowsy(info, naps)
        )
        found.append((seed, trained))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("which", range(len(SCHEDULES)), ids=IDS)
def test_p04_random_sleeps(which: int, ranks: int) -> None:
    """All in all 21 seeds on 2 ranks and 21 on 4."""
    config, count = SCHEDULES[which], 8
    rows = run_distributed(_drowsy, ranks, config, count, [3 * which + i for i in range(3)])
    stages = build(parse_schedule(config), ranks=ranks, microbatches=count).num_stages
    _, expected = train_reference(stages, count, batches(1, 8))
    bound = 5e-6 if config["schedule"] == "looped_bfs" else 0.0
    for index in range(3):
        mine = {k.replace("inner.", ""): v for row in rows for k, v in row[index][1][1].items()}
        torch.testing.assert_close(mine, expected, rtol=0, atol=bound)


def _in_dtype(rank: int, dtype: torch.dtype) -> Trained:
    torch.set_default_dtype(dtype)
    return train_pipeline(None, "1f1b", 4, [(x.to(dtype), y.to(dtype)) for x, y in batches(1, 8)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_p11_default_dtype(dtype: torch.dtype) -> None:
    rows = run_distributed(_in_dtype, 2, dtype)
    assert all(p.dtype == dtype and p.isfinite().all() for row in rows for p in row[1].values())


def _objects_after_steps(rank: int) -> tuple[int, int]:
    info, modules = build_schedule(None, 4, "1f1b", make_stage, mse)
    x, y = batches(1, 8)[0]

    def run(steps: int) -> int:
        for _ in range(steps):
            for module in modules:
                module.zero_grad(set_to_none=True)
            info.schedule.step(x, targets=y)
        gc.collect()
        return len(gc.get_objects())

    return run(3), run(47)


def test_p49_p80_nothing_piles_up_over_50_steps() -> None:
    for early, late in run_distributed(_objects_after_steps, 2):
        assert late - early < 50


def _channels(program: Program) -> set[tuple[int, int]]:
    home = program.placement.stage_to_rank
    names = {message(a) for _, _, a in program.actions() if a.op in (Op.SEND_F, Op.SEND_B)}
    return {(home[s], home[s + 1 if kind == Op.F else s - 1]) for kind, s, _ in names}


@pytest.mark.parametrize("config", SCHEDULES, ids=IDS)
def test_p09_p10_warm_up_covers_every_channel(config: dict[str, Any]) -> None:
    """As many communicators as docs and p2p.py say: 2 x ranks for a loop that closes, 2 x (ranks - 1) for a V."""
    program = lower(build(parse_schedule(config), ranks=4, microbatches=8))
    assert set(_edges(program)) == _channels(program)
    closes = program.placement == Placement.loop(4, 2)
    assert len(_edges(program)) == (8 if closes else 6)
