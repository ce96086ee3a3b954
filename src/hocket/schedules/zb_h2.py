"""ZB-H2: zero bubble in twice the memory of 1F1B (Qi et al., arXiv 2401.10241, section 2.3)."""

from __future__ import annotations

from typing import Literal

from hocket.program import Action, Placement, Program
from hocket.schedules.interleaved import Interleaved1F1BConfig, interleaved_order
from hocket.schedules.orders import program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule

_SAME_ORDER = Interleaved1F1BConfig(zero_bubble=True, warmup="deep")


class ZBH2Config(ScheduleConfig):
    """One stage per rank, backward in two halves, and a warm-up so deep that no rank waits once it has begun.

    The same as 1f1b with zero_bubble and a deep warm-up: up to 2p-1 activations in flight on each of p ranks.
    """

    schedule: Literal["zb_h2"] = "zb_h2"
    """Name of the schedule."""


def zb_h2_order(config: ZBH2Config, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B's columns, the backwards begun 2(p-r-1) rows and the weight halves another 2r rows later."""
    return interleaved_order(_SAME_ORDER, rank, ranks, microbatches)


@register_schedule(ZBH2Config, rank_order=zb_h2_order)
def build_zb_h2(config: ZBH2Config, ranks: int, microbatches: int) -> Program:
    """One stage per rank, loop placement."""
    return program_of(Placement.loop(ranks), microbatches, lambda rank: zb_h2_order(config, rank, ranks, microbatches))
