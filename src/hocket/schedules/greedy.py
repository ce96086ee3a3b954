"""Greedy: every rank does the best unit of work that is ready, tick after tick."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal

from pydantic import Field

from hocket.errors import ScheduleError
from hocket.program import Action, Op, Placement, Program
from hocket.schedules.registry import ScheduleConfig, register_schedule


class GreedyConfig(ScheduleConfig):
    """A list schedule: in each tick every rank does one ready forward or backward, chosen by a fixed preference."""

    schedule: Literal["greedy"] = "greedy"
    """Name of the schedule."""

    policy: Literal["gpipe", "interleaved_1f1b"] = "interleaved_1f1b"
    """What a rank prefers when both are ready: `gpipe` forwards, `interleaved_1f1b` backwards."""

    num_stages_per_rank: int = Field(default=1, ge=1)
    """Stages that each rank hosts, at most as many as there are ranks; stage s lives on rank s mod ranks."""


@register_schedule(GreedyConfig)
def build_greedy(config: GreedyConfig, ranks: int, microbatches: int) -> Program:
    """Loop placement; F and B cost one tick each, and all ranks decide on what was done when the tick began.

    Forwards are ranked by (microbatch, stage), backwards by (microbatch, highest stage): on a loop a rank's local
    index rises with its stages, so a preference by local index first is the same.
    """
    _check(config, ranks, microbatches)
    stages = ranks * config.num_stages_per_rank
    # A microbatch passes 2 * stages steps, step s < stages being F of stage s and the others B from the last stage
    # back. Each step makes exactly the next one ready, and (microbatch, step) is the rank's order of preference.
    steps = 2 * stages
    home = [min(step, steps - 1 - step) % ranks for step in range(steps)]
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    forwards: list[list[int]] = [[] for _ in range(ranks)]
    backwards: list[list[int]] = [[] for _ in range(ranks)]
    forwards[0] = [microbatch * steps for microbatch in range(microbatches)]
    first, second = (forwards, backwards) if config.policy == "gpipe" else (backwards, forwards)
    awake = {0}
    while awake:
        done = [heappop(first[rank] or second[rank]) for rank in awake]
        for key in done:
            microbatch, step = divmod(key, steps)
            rank = home[step]
            if step < stages:
                actions[rank].append(Action(Op.F, step, microbatch))
            else:
                actions[rank].append(Action(Op.B, steps - 1 - step, microbatch))
            if not first[rank] and not second[rank]:
                awake.discard(rank)
        for key in done:
            step = key % steps + 1
            if step < steps:
                rank = home[step]
                heappush((forwards if step < stages else backwards)[rank], key + 1)
                awake.add(rank)
    return Program(Placement.loop(ranks, config.num_stages_per_rank), tuple(map(tuple, actions)), microbatches)


def _check(config: GreedyConfig, ranks: int, microbatches: int) -> None:
    if config.num_stages_per_rank > ranks:
        raise ScheduleError(
            f"schedule 'greedy' hosts at most as many stages per rank as there are ranks, got num_stages_per_rank="
            f"{config.num_stages_per_rank} for {ranks} ranks; lower num_stages_per_rank"
        )
    if config.policy == "interleaved_1f1b" and microbatches < ranks:
        raise ScheduleError(
            f"schedule 'greedy' with policy 'interleaved_1f1b' needs at least as many microbatches as ranks, got "
            f"{microbatches} for {ranks} ranks; raise microbatches, or choose policy 'gpipe'"
        )
