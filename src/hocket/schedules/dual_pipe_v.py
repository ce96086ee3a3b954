"""DualPipeV: overlapped pairs of a forward and a backward on a V of two stages per rank.

The V is DualPipe's cut in half (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1): both directions of
DualPipe become the two ways of one V, and each rank keeps a single copy of its parameters.
"""

from __future__ import annotations

from typing import Literal

from hocket.errors import ScheduleError
from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import by_rows, column, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class DualPipeVConfig(ScheduleConfig):
    """Two stages per rank placed as a V; in steady state each forward overlaps with a backward.

    Made for stages whose communication (expert parallelism above all) hides behind another microbatch's computation.
    Needs at least two microbatches per rank.
    """

    schedule: Literal["dual_pipe_v"] = "dual_pipe_v"
    """Name of the schedule."""


def dual_pipe_v_order(config: DualPipeVConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The phases of rank r of p; "0" is its stage on the way down the V, "1" the one on the way up.

    Backwards are whole until the cool-down is half over (but for the first few of "1", whose weight halves fill the
    warm-up); from there on the weight halves are put off to fill the gaps.
    """
    _check(ranks, microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    after, upto, pairs = ranks - rank - 1, rank + 1, microbatches - 2 * ranks + rank + 1
    f0, f1 = column(Op.F, down, range(microbatches)), column(Op.F, up, range(microbatches))
    b0, b1 = column(Op.B, down, range(microbatches)), column(Op.B, up, range(microbatches))

    order = f0[: 2 * after]
    order += by_rows((0, f0[2 * after : 2 * after + upto]), (0, f1[:upto]))
    order += by_rows((0, _half(Op.I, b1[:after])), (0, _half(Op.W, b1[:after])), (0, f1[upto:ranks]))
    order += by_rows(
        (0, _overlapped(f0[2 * after + upto :], b1[after : after + pairs])),
        (0, _overlapped(f1[ranks : ranks + pairs], b0[:pairs])),
    )
    if after == 0:
        # The last rank turns both ways of the V around: its first forward has to leave before there is a backward.
        paired = 2 * ranks
        order[paired : paired + 1] = order[paired].parts
    order += by_rows((0, b1[after + pairs : 2 * after + pairs]), (0, _overlapped(f1[ranks + pairs :], b0[pairs:])))

    last = by_rows((0, b1[2 * after + pairs :]), (0, b0[after + pairs : ranks + pairs]))
    put_off = last[upto:] + b0[ranks + pairs :]
    weights = _half(Op.W, put_off)
    order += last[:upto] + _half(Op.I, put_off[:upto])
    order += by_rows((0, weights[:after]), (0, _half(Op.I, put_off[upto:])))
    return order + weights[after:]


def _half(op: Op, backwards: list[Action]) -> list[Action]:
    return [Action(op, stage, microbatch) for _, stage, microbatch, _ in backwards]


def _overlapped(forwards: list[Action], backwards: list[Action]) -> list[Action]:
    return [Action.pair(forward, backward) for forward, backward in zip(forwards, backwards, strict=False)]


def _check(ranks: int, microbatches: int) -> None:
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"schedule 'dual_pipe_v' needs at least 2 microbatches per rank, here {2 * ranks} for {ranks} ranks, got "
            f"{microbatches}; raise microbatches, or choose 'zero_bubble_v', which has the same placement and takes "
            "any number"
        )


@register_schedule(DualPipeVConfig, rank_order=dual_pipe_v_order)
def build_dual_pipe_v(config: DualPipeVConfig, ranks: int, microbatches: int) -> Program:
    """V placement; the phases of DualPipeV."""
    placement = Placement.v(ranks)
    return program_of(placement, microbatches, lambda rank: dual_pipe_v_order(config, rank, ranks, microbatches))
