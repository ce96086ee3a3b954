"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from typing import Literal

from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import column, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class GPipeConfig(ScheduleConfig):
    """All forwards, then all backwards. Simple; every rank holds all microbatches at once."""

    schedule: Literal["gpipe"] = "gpipe"
    """Name of the schedule."""


def gpipe_order(config: GPipeConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """F of every microbatch, then B of every microbatch, both in order of the microbatches."""
    return column(Op.F, rank, range(microbatches)) + column(Op.B, rank, range(microbatches))


@register_schedule(GPipeConfig, rank_order=gpipe_order)
def build_gpipe(config: GPipeConfig, ranks: int, microbatches: int) -> Program:
    """One stage per rank; bubble of (ranks - 1) forwards and as many backwards."""
    placement = Placement.loop(ranks)
    return program_of(placement, microbatches, lambda rank: gpipe_order(config, rank, ranks, microbatches))
