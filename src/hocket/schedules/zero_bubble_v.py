"""ZBV: zero bubble on a V of two stages per rank, in the memory of 1F1B (Qi et al., arXiv 2401.10241, section 6)."""

from __future__ import annotations

from typing import Literal

from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import by_rows, column, drop_padding, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class ZeroBubbleVConfig(ScheduleConfig):
    """Two stages per rank placed as a V, backward in two halves: next to no bubble if F, I and W take equally long.

    The first and the last stage share rank 0, so the loss is computed where the inputs are.
    """

    schedule: Literal["zero_bubble_v"] = "zero_bubble_v"
    """Name of the schedule."""


def zero_bubble_v_order(config: ZeroBubbleVConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The phases of rank r of p; "0" is its stage on the way down the V, "1" the one on the way up.

    They need 2p-1 microbatches to unfold. Fewer are laid out as if they were as many, and the surplus is left out.
    """
    down, up = rank, 2 * ranks - 1 - rank
    count = max(microbatches, 2 * ranks - 1)
    f0, i0, w0 = (column(op, down, range(count)) for op in (Op.F, Op.I, Op.W))
    f1, i1, w1 = (column(op, up, range(count)) for op in (Op.F, Op.I, Op.W))
    lead, rest = 2 * (ranks - rank) - 1, ranks - rank
    steady = count - ranks
    order = f0[:lead]
    order += by_rows((0, f1[:rank]), (0, f0[lead : lead + rank]))
    order += by_rows((0, f1[rank:ranks]), (0, i1[:rest]), (0, w1[:rest]))
    order += by_rows(
        (0, f0[lead + rank :]),
        (0, i0[:steady]),
        (0, w0[:steady]),
        (0, f1[ranks:]),
        (0, i1[rest : rest + steady]),
        (0, w1[rest : rest + steady]),
    )
    order += by_rows((0, i0[steady : steady + rank]), (0, i1[rest + steady :]))
    order += by_rows((0, i0[steady + rank :]), (0, w0[steady : steady + rest]))
    order += by_rows((0, w1[rest + steady :]), (0, w0[steady + rest :]))
    return order if count == microbatches else drop_padding(order, microbatches)


@register_schedule(ZeroBubbleVConfig, rank_order=zero_bubble_v_order)
def build_zero_bubble_v(config: ZeroBubbleVConfig, ranks: int, microbatches: int) -> Program:
    """V placement; the phases of ZBV."""
    placement = Placement.v(ranks)
    return program_of(placement, microbatches, lambda rank: zero_bubble_v_order(config, rank, ranks, microbatches))
