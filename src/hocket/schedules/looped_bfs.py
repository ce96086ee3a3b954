"""Looped breadth-first: GPipe with several stages per rank (Lamy-Poirier, arXiv 2211.05953)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import columns, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class LoopedBFSConfig(ScheduleConfig):
    """Stage by stage: all microbatches through a stage before the rank's next one.

    The bubble shrinks with the stages per rank, and a stage's parameters are used in one stretch, which suits sharded
    data parallelism; every rank holds all microbatches of all its stages at once.
    """

    schedule: Literal["looped_bfs"] = "looped_bfs"
    """Name of the schedule."""

    num_stages_per_rank: int = Field(default=1, ge=1)
    """Stages that each rank hosts; stage s lives on rank s mod ranks."""


def looped_bfs_order(config: LoopedBFSConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """F of all microbatches on the rank's first stage, on its second, and so on; then B from its last stage back.

    Backwards run in order of the microbatches too. The paper leaves that open, the bubble is the same, and gradients
    are then added up in the order in which one process would add them.
    """
    stages = range(rank, ranks * config.num_stages_per_rank, ranks)
    everything = [range(microbatches)]
    return columns(Op.F, stages, everything) + columns(Op.B, reversed(stages), everything)


@register_schedule(LoopedBFSConfig, rank_order=looped_bfs_order)
def build_looped_bfs(config: LoopedBFSConfig, ranks: int, microbatches: int) -> Program:
    """Loop placement, breadth first."""
    placement = Placement.loop(ranks, config.num_stages_per_rank)
    return program_of(placement, microbatches, lambda rank: looped_bfs_order(config, rank, ranks, microbatches))
