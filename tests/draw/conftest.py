"""Timelines to draw."""

from collections.abc import Callable
from typing import Any

import pytest

from hocket import CostModel, Timeline, build, parse_schedule, simulate


def make_timeline(schedule: Any, ranks: int, microbatches: int, **costs: Any) -> Timeline:
    program = build(parse_schedule(schedule), ranks=ranks, microbatches=microbatches)
    return simulate(program, CostModel(**costs))


@pytest.fixture(scope="session")
def timeline() -> Callable[..., Timeline]:
    """`timeline(schedule, ranks, microbatches, **costs)`."""
    return make_timeline
