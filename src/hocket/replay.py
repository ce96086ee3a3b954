"""Runs a program on paper: when each action starts and ends, or where it gets stuck.

One linear replay serves the communication pass, the checker and the simulator. The order of every rank's actions and
of every channel's messages is fixed, so times follow from maxima and sums in any order that respects the
dependencies; no event queue is needed.

Semantics (design.md, "Communication"): a SEND or RECV is issued in program order and does not hold the rank up; a
compute action waits for the values that feed it. A directed channel a→b carries its messages one after the other.
Rendezvous: a message starts when both ends have issued it; buffered: when its send has. A compute-only program hands
its values over by itself, after the hop's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hocket.program import Action, Op, Program, consumer_stage, message, needs, produces, unfold

Mode = Literal["buffered", "rendezvous"]


@dataclass(frozen=True)
class Durations:
    """Seconds that the replay charges.

    `compute[op][stage]` for F, B, I, W; `hop[kind][stage]` for the value of that kind that `stage` gives to another
    rank. `overlap` is the time of a pair over the sum of its parts, both of which then start when both inputs are
    there; None runs the parts one after the other, each waiting for its own input only.
    """

    compute: Sequence[Sequence[float]]
    hop: Sequence[Sequence[float]]
    overlap: float | None = None

    @classmethod
    def unit(cls, num_stages: int, overlap: float | None = None) -> Durations:
        """F = I = W = 1, B = 2, and messages that take no time."""
        return cls([[cost] * num_stages for cost in (1.0, 2.0, 1.0, 1.0)], [[0.0] * num_stages] * 2, overlap)


@dataclass
class Channel:
    """The messages of one direction between two ranks, in the order in which each end issued them."""

    sent: list[tuple[tuple[Op, int, int], float]] = field(default_factory=list)
    posted: list[tuple[tuple[Op, int, int], float]] = field(default_factory=list)
    through: int = 0
    free_at: float = 0.0

    @property
    def mismatch(self) -> int | None:
        """The first position where the ends name different messages, or None."""
        if self.through < min(len(self.sent), len(self.posted)):
            return self.through
        return None


@dataclass
class Replay:
    """The outcome. `orders[r]` is what rank r runs in turn (pairs unfolded unless they run jointly); `start[r][i]` and
    `end[r][i]` are the times of its i-th action (for a SEND or RECV, when it was issued). Both are short where the
    rank got stuck.
    """

    orders: list[Sequence[Action]]
    start: list[list[float]]
    end: list[list[float]]
    channels: dict[tuple[int, int], Channel]
    values: list[float | None]
    num_stages: int
    num_microbatches: int

    @property
    def done(self) -> bool:
        """True if every action ran and every message went through."""
        ran = all(len(ends) == len(order) for ends, order in zip(self.end, self.orders, strict=True))
        return ran and all(len(c.sent) == len(c.posted) == c.through for c in self.channels.values())

    def made(self, kind: Op, stage: int, microbatch: int) -> float | None:
        """When the value was made, or None."""
        return self.values[(kind * self.num_stages + stage) * self.num_microbatches + microbatch]

    def arrived(self, kind: Op, stage: int, microbatch: int) -> float | None:
        """When the value was there for the next stage, or None."""
        return self.values[((2 + kind) * self.num_stages + stage) * self.num_microbatches + microbatch]


def replay(program: Program, durations: Durations, mode: Mode = "rendezvous") -> Replay:
    """Run `program` on paper; linear in the number of actions. One that cannot end comes back not `done`.

    Every stage and microbatch named in the program must be in range; `verify` checks that.
    """
    return _Run(program, durations, mode).run()


class _Run:
    """The state of one replay.

    A value is an index into `values`, which holds when it was made at its own stage (first half, for the stage's own
    later ops) and when it was there for the next stage (second half).
    """

    def __init__(self, program: Program, durations: Durations, mode: Mode):
        ranks, stages, count = program.num_ranks, program.num_stages, program.num_microbatches
        self.program, self.durations, self.buffered = program, durations, mode == "buffered"
        joint = durations.overlap is not None
        self.orders = [actions if joint else unfold(actions) for actions in program.ranks]
        self.values: list[float | None] = [None] * (4 * stages * count)
        self.half = 2 * stages * count
        slot = lambda kind, stage: (kind * stages + stage) * count  # noqa: E731
        self.needs = [
            [
                tuple(slot(kind, at) + (0 if at == stage else self.half) for kind, at in needs(Op(op), stage, stages))
                for stage in range(stages)
            ]
            for op in range(4)
        ]
        self.makes = [slot(kind, 0) if (kind := produces(Op(op))) is not None else None for op in range(4)]
        self.handover = [[self._handover(kind, stage) for stage in range(stages)] for kind in (Op.F, Op.B)]
        self.index, self.clock = [0] * ranks, [0.0] * ranks
        self.waiting: dict[int, int] = {}
        self.start: list[list[float]] = [[] for _ in range(ranks)]
        self.end: list[list[float]] = [[] for _ in range(ranks)]
        self.channels: dict[tuple[int, int], Channel] = {}
        self.ready = list(range(ranks))[::-1]

    def _handover(self, kind: Op, stage: int) -> float | None:
        """Seconds until the next stage has the value by itself; None if nobody needs it or a message carries it."""
        ranks, target = self.program.placement.stage_to_rank, consumer_stage(kind, stage)
        if not 0 <= target < len(ranks):
            return None
        if ranks[stage] == ranks[target]:
            return 0.0
        return None if self.program.is_lowered else self.durations.hop[kind][stage]

    def run(self) -> Replay:
        while self.ready:
            self._advance(self.ready.pop())
        program = self.program
        return Replay(
            list(self.orders),
            self.start,
            self.end,
            self.channels,
            self.values,
            program.num_stages,
            program.num_microbatches,
        )

    def _advance(self, rank: int) -> None:
        """Run the actions of `rank` until one must wait for a value that is not there yet."""
        order, values, needed, makes = self.orders[rank], self.values, self.needs, self.makes
        add_start, add_end, compute = self.start[rank].append, self.end[rank].append, self.durations.compute
        count, handover = self.program.num_microbatches, self.handover
        clock = self.clock[rank]
        for index in range(self.index[rank], len(order)):
            action = order[index]
            op, stage, microbatch, parts = action
            if op <= 3:
                begin = clock
                for base in needed[op][stage]:
                    at = values[base + microbatch]
                    if at is None:
                        self._wait(rank, index, clock, base + microbatch)
                        return
                    if at > begin:
                        begin = at
                clock = begin + compute[op][stage]
                base = makes[op]
                if base is not None:
                    value = base + stage * count + microbatch
                    values[value] = clock
                    hop = handover[base > 0][stage]
                    if hop is not None:
                        self._arrive(value + self.half, clock + hop)
                add_start(begin)
                add_end(clock)
            elif parts:
                span = self._joint_pair(rank, index, clock, parts)
                if span is None:
                    return
                clock = span[1]
                add_start(span[0])
                add_end(clock)
            else:
                if op == Op.SEND_F or op == Op.SEND_B:
                    # A SEND does not wait; one whose value is not made yet is a fault, and holding it here shows it.
                    value = ((op == Op.SEND_B) * len(handover[0]) + stage) * count + microbatch
                    if values[value] is None:
                        self._wait(rank, index, clock, value)
                        return
                self._issue(rank, action, clock)
                add_start(clock)
                add_end(clock)
        self.index[rank], self.clock[rank] = len(order), clock

    def _wait(self, rank: int, index: int, clock: float, value: int) -> None:
        self.index[rank], self.clock[rank] = index, clock
        self.waiting[value] = rank

    def _arrive(self, value: int, at: float) -> None:
        self.values[value] = at
        rank = self.waiting.pop(value, None)
        if rank is not None:
            self.ready.append(rank)

    def _joint_pair(self, rank: int, index: int, clock: float, parts: tuple[Action, ...]) -> tuple[float, float] | None:
        """Start and end of a pair whose parts run at the same time; None if an input is not there yet."""
        begin = clock
        for op, stage, microbatch, _ in parts:
            for base in self.needs[op][stage]:
                at = self.values[base + microbatch]
                if at is None:
                    self._wait(rank, index, clock, base + microbatch)
                    return None
                begin = max(begin, at)
        total = sum(self.durations.compute[part.op][part.stage] for part in parts)
        end = begin + total * (self.durations.overlap or 0.0)
        for op, stage, microbatch, _ in parts:
            kind = produces(op) or Op.F
            value = (kind * self.program.num_stages + stage) * self.program.num_microbatches + microbatch
            self.values[value] = end
            hop = self.handover[kind][stage]
            if hop is not None:
                self._arrive(value + self.half, end + hop)
        return begin, end

    def _issue(self, rank: int, action: Action, at: float) -> None:
        """Issue one end of a message, and let through what its channel can now carry."""
        name = kind, stage, _ = message(action)
        ranks = self.program.placement.stage_to_rank
        edge = ranks[stage], ranks[consumer_stage(kind, stage)]
        channel = self.channels.get(edge)
        if channel is None:
            channel = self.channels[edge] = Channel()
        (channel.sent if action.op.is_send else channel.posted).append((name, at))
        while channel.through < len(channel.sent) and channel.through < len(channel.posted):
            (name, sent), (expected, posted) = channel.sent[channel.through], channel.posted[channel.through]
            if name != expected:
                return
            channel.through += 1
            kind, stage, microbatch = name
            start = sent if self.buffered else max(sent, posted)
            channel.free_at = max(start, channel.free_at) + self.durations.hop[kind][stage]
            value = (kind * self.program.num_stages + stage) * self.program.num_microbatches + microbatch
            self._arrive(value + self.half, max(channel.free_at, posted))
