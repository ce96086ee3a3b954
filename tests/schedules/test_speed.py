"""Builders are linear, and fast enough that large plans are made while one waits."""

from __future__ import annotations

import time

import pytest

from hocket.schedules import build, parse_schedule

LARGE = [
    '{"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": true}',
    "zero_bubble_v",
    "dual_pipe_v",
    '{"schedule": "greedy", "num_stages_per_rank": 2}',
    "v_half",
    "v_min",
]


@pytest.mark.parametrize("schedule", LARGE)
def test_64_ranks_and_1024_microbatches(schedule):
    config = parse_schedule(schedule)
    times = []
    for _ in range(3):
        start = time.process_time()
        program = build(config, ranks=64, microbatches=1024)
        times.append(time.process_time() - start)
    assert program.num_stages == 128
    # About 0.2 s on an idle core; the margin is for a busy one.
    assert min(times) < 1.5
