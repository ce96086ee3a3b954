"""Chaos: a random schedule, rank and action; raise, kill or stall it. All ranks must end, in time, with one cause.

The default suite runs a handful; `HOCKET_LONG=1 pytest -s tests/test_chaos.py` runs 100 (HOCKET_CHAOS_SEED: from which
seed on, HOCKET_CHAOS_RUNS: how many).
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from long import long
from runtime.failing import MICROBATCHES, Fault, Told, fates, last_line

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "num_stages_per_rank": 2},
    {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    {"schedule": "zero_bubble_v"},
    {"schedule": "dual_pipe_v"},
]
TIMEOUT = 2.0
FIRST = int(os.environ.get("HOCKET_CHAOS_SEED", "0"))
RUNS = int(os.environ.get("HOCKET_CHAOS_RUNS", "100"))


def draw(seed: int) -> tuple[int, dict[str, Any], Fault]:
    """The number of ranks, the schedule and the fault of one run."""
    dice = random.Random(seed)
    ranks = dice.choice([2, 2, 3, 4])
    # DualPipeV needs 2 microbatches for each rank.
    config = dice.choice(SCHEDULES[:-1] if 2 * ranks > MICROBATCHES else SCHEDULES)
    what = dice.choice(["raise", "raise", "raise", "kill", "kill", "exit", "stop", "loop", "sleep"])
    where = dice.choice(["stage"] * 6 + ["hook", "between", "provider"])
    fault = Fault(
        what=what,
        where=where,
        rank=dice.randrange(ranks),
        step=dice.randrange(3),
        microbatch=dice.randrange(MICROBATCHES),
        op=dice.choice("FB"),
        seconds=0.5 if what == "sleep" else 30.0,
    )
    return ranks, config, fault


def run(seed: int) -> float:
    """One run; gives its seconds."""
    ranks, config, fault = draw(seed)
    print(f"seed {seed}: {ranks} ranks, {config}, {fault}")
    begun = time.monotonic()
    told = fates(ranks, fault, config=config, timeout=TIMEOUT, limit=40)
    _check(told, fault)
    return time.monotonic() - begun


def _check(told: list[Told | int | None], fault: Fault) -> None:
    if fault.what == "sleep":
        assert told == [None] * len(told), "a short delay is no failure"
        return
    for rank, words in enumerate(told):
        if rank == fault.rank and fault.what in ("kill", "exit", "stop", "loop"):
            assert words in (-9, 3, 1) or isinstance(words, Told), words
            continue
        assert isinstance(words, Told), f"rank {rank}: {words}"
        assert words.seconds < 15, words
        line = last_line(words)
        if fault.what == "raise" and fault.where != "between":
            assert "ValueError: boom" in line, line
        if rank != fault.rank:
            assert f"rank {fault.rank}" in line, line


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [1, 4, 6, 8])
def test_a_few(seed: int) -> None:
    run(seed)


@pytest.mark.chaos
@pytest.mark.slow
@long
@pytest.mark.timeout(1500)
def test_a_hundred() -> None:
    seconds = [run(seed) for seed in range(FIRST, FIRST + RUNS)]
    print(f"longest run {max(seconds):.1f} s, all {sum(seconds):.0f} s")
