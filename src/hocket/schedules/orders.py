"""What the builders share: columns of actions, and reading columns row by row into one rank's order.

Most pipeline schedules are a few columns side by side, the forwards, the backwards and perhaps the weight halves, each
begun a number of rows after the first. Read row by row they give the rank's order: warm-up where only forwards exist,
steady state where all columns do, cool-down where the forwards have run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, repeat

from hocket.program import Action, Op, Placement, Program, make_actions


def column(op: Op, stage: int, microbatches: Iterable[int]) -> list[Action]:
    """One op of one stage for each of the microbatches."""
    return list(make_actions(repeat(op), repeat(stage), microbatches))


def columns(op: Op, stages: Iterable[int], rounds: Sequence[range]) -> list[Action]:
    """Round after round, in each round stage after stage, on each stage all microbatches of the round."""
    stages = tuple(stages)
    actions: list[Action] = []
    for microbatches in rounds:
        for stage in stages:
            actions += column(op, stage, microbatches)
    return actions


def fixed_rounds(microbatches: int, size: int) -> list[range]:
    """Rounds of `size` microbatches; the last one may go beyond `microbatches` (see `drop_padding`)."""
    return [range(first, first + size) for first in range(0, microbatches, size)]


def even_rounds(microbatches: int, at_least: int) -> list[range]:
    """As many rounds as have `at_least` microbatches each (at least one round), sizes differing by one at most."""
    count = max(1, microbatches // at_least)
    bounds = [index * microbatches // count for index in range(count + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def by_rows(*begun: tuple[int, Sequence[Action]]) -> list[Action]:
    """Read columns row by row; each comes with the row on which it begins. Rows without an action take no room."""
    edges = sorted({row for first, actions in begun for row in (first, first + len(actions))})
    order: list[Action] = []
    for low, high in pairwise(edges):
        live = [actions[low - first : high - first] for first, actions in begun if first <= low < first + len(actions)]
        block: list[Action] = [None] * (len(live) * (high - low))  # type: ignore[list-item]
        for index, actions in enumerate(live):
            block[index :: len(live)] = actions
        order += block
    return order


def drop_padding(order: list[Action], microbatches: int) -> list[Action]:
    """Leave out the actions of microbatches that do not exist.

    Microbatches do not depend on each other, so an order that was legal for more of them stays legal.
    """
    return [action for action in order if action[2] < microbatches]


def program_of(placement: Placement, microbatches: int, order: Callable[[int], Sequence[Action]]) -> Program:
    """The program in which rank r runs `order(r)`."""
    return Program(placement, tuple(tuple(order(rank)) for rank in range(placement.num_ranks)), microbatches)
