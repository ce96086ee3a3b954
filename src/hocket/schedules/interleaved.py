"""1F1B, plain and interleaved, with a full backward or with one in two halves.

One forward, one backward: PipeDream-Flush, interleaved over several stages per rank as in Megatron-LM (Narayanan et
al., arXiv 2104.04473). With `zero_bubble` the weight halves fill the bubble (Qi et al., arXiv 2401.10241; ZB-H1 for
one stage per rank).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import by_rows, columns, drop_padding, even_rounds, fixed_rounds, program_of
from hocket.schedules.registry import ScheduleConfig, register_schedule


class Interleaved1F1BConfig(ScheduleConfig):
    """One forward, one backward: the usual schedule. Memory is bounded by the ranks, not by the microbatches."""

    schedule: Literal["1f1b"] = "1f1b"
    """Name of the schedule."""

    num_stages_per_rank: int = Field(default=1, ge=1)
    """Stages that each rank hosts; stage s lives on rank s mod ranks. More of them: less bubble, more messages."""

    zero_bubble: bool = False
    """Split each backward into its input half (I) and its weight half (W), and fill the bubble with the latter."""

    warmup: Literal["standard", "short", "deep"] = "standard"
    """Forwards ahead of the first backward. Rank r of p runs `short` p-r-1 of them, or `deep` 2(p-r-1), on top of the
    p for each further stage of its own. `deep` hides the latency of a hop, but holds up to p-1 activations more.
    `standard` is what the papers do: deep for several stages per rank with a full backward, else short."""


def interleaved_order(config: Interleaved1F1BConfig, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Forwards from row 0, backwards after the warm-up; weight halves follow their input halves with a lag.

    The lag grows with the rank as the warm-up shrinks, so that all ranks hold equally much, and the weight halves left
    for the end fill the cool-down. Several stages per rank take turns, a round of microbatches each.
    """
    per_rank, depth = config.num_stages_per_rank, _depth(config)
    rounds = [range(microbatches)] if per_rank == 1 else _rounds(ranks, microbatches, depth)
    warmup = depth * (ranks - rank - 1) + max(map(len, rounds)) * (per_rank - 1)
    stages = range(rank, ranks * per_rank, ranks)
    forwards = (0, columns(Op.F, stages, rounds))
    if config.zero_bubble:
        inputs = (warmup, columns(Op.I, reversed(stages), rounds))
        weights = (warmup + depth * rank, columns(Op.W, reversed(stages), rounds))
        order = by_rows(forwards, inputs, weights)
    else:
        order = by_rows(forwards, (warmup, columns(Op.B, reversed(stages), rounds)))
    return order if rounds[-1].stop == microbatches else drop_padding(order, microbatches)


def _rounds(ranks: int, microbatches: int, depth: int) -> list[range]:
    """Rounds of `ranks` microbatches, in which the ring of ranks is full; what is over goes where it costs least.

    A few left over join the rounds there are: a little more memory, and no bubble. Many left over make a last round
    that is short, which leaves the memory as it is. With a last round of q, rank 0 runs a forward that needs, by way of
    the last rank, a backward of its own from depth * (ranks - 1) - 2q - 1 rows later: unless that is negative, the last
    round must be laid out as if it were full.
    """
    over = microbatches % ranks
    if microbatches < ranks or 2 * over < ranks:
        return even_rounds(microbatches, ranks)
    rounds = fixed_rounds(microbatches, ranks)
    if 2 * over >= depth * (ranks - 1):
        rounds[-1] = range(microbatches - over, microbatches)
    return rounds


def _depth(config: Interleaved1F1BConfig) -> int:
    """Forwards of warm-up that a rank has more than the next rank."""
    if config.warmup == "standard":
        return 2 if config.num_stages_per_rank > 1 and not config.zero_bubble else 1
    return 2 if config.warmup == "deep" else 1


@register_schedule(Interleaved1F1BConfig, rank_order=interleaved_order)
def build_interleaved(config: Interleaved1F1BConfig, ranks: int, microbatches: int) -> Program:
    """Loop placement; one forward and one backward in turn."""
    placement = Placement.loop(ranks, config.num_stages_per_rank)
    return program_of(placement, microbatches, lambda rank: interleaved_order(config, rank, ranks, microbatches))
