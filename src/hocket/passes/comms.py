"""The communication pass: adds the SEND and RECV of every value that crosses ranks.

Why it never holds the pipeline up, whatever the costs (at zero transfer time, under rendezvous): a SEND stands right
behind its producer; the RECVs of a channel stand in the order of its SENDs, each before its own consumer and before
the consumers of all later messages of that channel. So when a value is made, every message before it in the channel
has been sent, and when its consumer's turn comes, it and all before it have been posted: the consumer starts exactly
when the compute order alone would let it. No edge is added that program order and data do not imply already, so a
legal compute order stays free of deadlock.

A RECV stands earlier than that rule demands, so that the transfer hides behind a computation: one action earlier at
least, and not later than the action during which a replay with unit costs sees the message leave. Buffers so posted
hold messages that are under way, or about to be needed: they are bounded by what the schedule has in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.errors import ProgramError
from hocket.program import Action, Op, Program, consumer_stage, needs, produces, recv_of, send_of
from hocket.replay import Durations, replay
from hocket.verify import verify


@dataclass
class _Channel:
    """The messages from one rank to another, in the order in which they are made; three columns."""

    receives: list[Action] = field(default_factory=list)
    made_at: list[float] = field(default_factory=list)
    needed_at: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Route:
    """How the values that one op of one stage makes leave the rank."""

    send: Op
    recv: Op
    recv_stage: int
    target: int
    slot: int


def add_communication(program: Program) -> Program:
    """The same program with its sends and receives. Linear in the number of actions.

    Raises ProgramError if `program` has sends or receives already, or cannot run.
    """
    if program.is_lowered:
        raise ProgramError("the program has sends and receives already; pass program.compute_only()")
    if program.num_ranks == 1:
        return program
    # With pairs run jointly the replay keeps one time for each action of the list.
    result = replay(program, Durations.unit(program.num_stages, overlap=1.0))
    if not result.done:
        verify(program)
    needed_at = _needed_at(program)
    ranks = program.num_ranks
    behind: list[list[tuple[Action, ...]]] = []
    before: list[list[list[Action] | None]] = [[None] * (len(row) + 1) for row in program.ranks]
    channels: dict[tuple[int, int], _Channel] = {}
    for rank in range(ranks):
        behind.append(_send(program, rank, result.end[rank], needed_at, channels))
    for (_, target), channel in channels.items():
        _post(channel, result.end[target], before[target])
    rows = tuple(_weave(row, before[rank], behind[rank]) for rank, row in enumerate(program.ranks))
    return Program(program.placement, rows, program.num_microbatches)


def _needed_at(program: Program) -> list[int]:
    """For the value (kind, stage, microbatch), by slot, the index of its consumer in the list of the next rank."""
    stages, count = program.num_stages, program.num_microbatches
    slots = [
        [
            next(((kind * stages + at) * count for kind, at in needs(Op(op), stage, stages) if at != stage), None)
            for stage in range(stages)
        ]
        for op in range(4)
    ]
    index_of = [0] * (2 * stages * count)
    for row in program.ranks:
        for index, action in enumerate(row):
            for op, stage, microbatch, _ in action.parts or (action,):
                slot = slots[op][stage]
                if slot is not None:
                    index_of[slot + microbatch] = index
    return index_of


def _routes(program: Program, rank: int) -> list[list[_Route | None]]:
    """By op and stage: how what it makes leaves `rank`; None if it stays, or is needed by nobody."""
    home, stages = program.placement.stage_to_rank, program.num_stages
    backward = program.has_backward

    def route(op: Op, stage: int) -> _Route | None:
        kind = produces(op)
        if kind is None or (kind == Op.B and not backward):
            return None
        target = consumer_stage(kind, stage)
        if not 0 <= target < stages or home[target] == rank:
            return None
        slot = (kind * stages + stage) * program.num_microbatches
        return _Route(send_of(kind, stage, 0).op, recv_of(kind, stage, 0).op, target, home[target], slot)

    return [[route(Op(op), stage) for stage in range(stages)] for op in range(4)]


def _send(
    program: Program,
    rank: int,
    ends: Sequence[float],
    needed_at: Sequence[int],
    channels: dict[tuple[int, int], _Channel],
) -> list[tuple[Action, ...]]:
    """The SENDs behind each action of `rank`; enters their messages into `channels`."""
    routes = _routes(program, rank)
    behind: list[tuple[Action, ...]] = []
    for action, end in zip(program.ranks[rank], ends, strict=True):
        sends: tuple[Action, ...] = ()
        for op, stage, microbatch, _ in action.parts or (action,):
            route = routes[op][stage]
            if route is None:
                continue
            channel = channels.get((rank, route.target))
            if channel is None:
                channel = channels[rank, route.target] = _Channel()
            channel.receives.append(Action(route.recv, route.recv_stage, microbatch))
            channel.made_at.append(end)
            channel.needed_at.append(needed_at[route.slot + microbatch])
            sends += (Action(route.send, stage, microbatch),)
        behind.append(sends)
    return behind


def _post(channel: _Channel, ends: Sequence[float], before: list[list[Action] | None]) -> None:
    """Choose for each message the action of the receiving rank before which its RECV stands.

    `ends` are the ends of that rank's actions. Both limits grow along the channel, so its order is kept.
    """
    latest = channel.needed_at[-1]
    limits = []
    for needed in reversed(channel.needed_at):
        latest = min(latest, needed)
        limits.append(latest)
    running = 0
    for receive, made, limit in zip(channel.receives, channel.made_at, reversed(limits), strict=True):
        while ends[running] <= made and running < limit:
            running += 1
        at = min(running, max(limit - 1, 0))
        posts = before[at]
        if posts is None:
            before[at] = [receive]
        else:
            posts.append(receive)


def _weave(
    row: Sequence[Action], before: Sequence[Sequence[Action] | None], behind: Sequence[Sequence[Action]]
) -> tuple[Action, ...]:
    """The rank's list: in front of each action its RECVs, behind it its SENDs."""
    woven: list[Action] = []
    for action, posts, sends in zip(row, before, behind, strict=False):
        if posts:
            woven += posts
        woven.append(action)
        woven += sends
    return tuple(woven)
