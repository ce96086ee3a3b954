"""Runs a program on paper: when each action starts and ends, or where the ranks wait in a circle.

One linear replay serves the communication pass, the checker and the simulator. The order of every rank's actions and
of every channel's messages is fixed, so times follow from maxima and sums in any order that respects the
dependencies; no event queue is needed.

Semantics (design.md, "Communication"): a SEND or RECV is issued in program order and does not hold the rank up; a
compute action waits for the values that feed it. A directed channel a→b carries its messages one after the other.
Rendezvous: a message starts when both ends have issued it; buffered: when its send has. A compute-only program hands
its values over by itself, after the hop's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from hocket.program import Action, Op, Program, consumer_stage, message

if TYPE_CHECKING:
    from hocket.wiring import Wiring

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
    """The messages of one direction between two ranks, in order, with the time when each end issued them."""

    sent: list[tuple[tuple[Op, int, int], float]] = field(default_factory=list)
    posted: list[tuple[tuple[Op, int, int], float]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Replay:
    """The outcome, for the entries of `wiring`: when each began and ended. What was never reached has no end.

    `done` is true if every action ran.
    """

    wiring: Wiring
    durations: Durations
    mode: Mode
    begins: list[float]
    ends: list[float | None]
    done: bool

    @property
    def orders(self) -> tuple[Sequence[Action], ...]:
        """What each rank runs in turn: its list, with pairs unfolded unless they run jointly."""
        return self.wiring.columns.orders

    @cached_property
    def _times(self) -> tuple[list[list[float]], list[list[float]]]:
        return self.wiring.times(self.begins, self.ends)

    @property
    def start(self) -> list[list[float]]:
        """`start[r][i]`: when the i-th action of `orders[r]` starts, or, for a SEND or a RECV, is issued."""
        return self._times[0]

    @property
    def end(self) -> list[list[float]]:
        """`end[r][i]`: when the i-th action of `orders[r]` ends; a SEND or a RECV does not take the rank's time."""
        return self._times[1]

    def made(self, kind: Op, stage: int, microbatch: int) -> float | None:
        """When a value was made, at its own stage."""
        program = self.wiring.columns.program
        return self.ends[self.wiring.made[(kind * program.num_stages + stage) * program.num_microbatches + microbatch]]

    def arrived(self, kind: Op, stage: int, microbatch: int) -> float | None:
        """When a value was there for the next stage, in a compute-only program."""
        at, home = self.made(kind, stage, microbatch), self.wiring.columns.program.placement.stage_to_rank
        target = consumer_stage(kind, stage)
        if at is None or not 0 <= target < len(home) or home[target] == home[stage]:
            return at
        return at + self.durations.hop[kind][stage]

    @cached_property
    def channels(self) -> dict[tuple[int, int], Channel]:
        """The channels of a lowered program, by (rank, rank)."""
        home = self.wiring.columns.program.placement.stage_to_rank
        found: dict[tuple[int, int], Channel] = defaultdict(Channel)
        for order, times in zip(self.orders, self.end, strict=True):
            for action, at in zip(order, times, strict=True):
                if Op.SEND_F <= action.op <= Op.RECV_B:
                    name = kind, stage, _ = message(action)
                    channel = found[home[stage], home[consumer_stage(kind, stage)]]
                    (channel.sent if action.op.is_send else channel.posted).append((name, at))
        return dict(found)


def replay(program: Program, durations: Durations, mode: Mode = "rendezvous") -> Replay:
    """Run a legal `program` on paper; linear in the number of actions.

    What `verify` checks is taken for granted here, but for one thing: where ranks wait in a circle, the replay comes
    back not `done`.
    """
    from hocket.wiring import read, wire  # here, so that `import hocket` need not wait for numpy

    return run(wire(read(program, joint=durations.overlap is not None)), durations, mode)


def run(wiring: Wiring, durations: Durations, mode: Mode = "rendezvous") -> Replay:
    """The replay of a program that is wired already. Each rank in turn runs until it must wait."""
    starts, waits = wiring.starts.tolist(), wiring.waits.tolist()
    seconds = wiring.seconds(durations.compute, durations.overlap)
    begins: list[float] = [0.0] * len(waits)
    ends: list[float | None] = [None] * len(waits)
    delay = _delay(wiring, durations, mode, ends)
    waiting: dict[int, list[Generator[int]]] = {}

    def work(low: int, high: int) -> Generator[int]:
        """One rank: runs its entries, and yields one of another rank when it cannot go on before that has ended."""
        clock = 0.0
        for entry in range(low, high):
            source = waits[entry]
            if source >= 0:
                at = ends[source]
                while at is None:
                    yield source
                    at = ends[source]
                if delay is not None:
                    at = delay(entry, at)
                if at > clock:
                    clock = at
            begins[entry] = clock
            ends[entry] = clock = clock + seconds[entry]
            if entry in waiting:
                ready.extend(waiting.pop(entry))

    ready = [work(*span) for span in pairwise(starts)]
    while ready:
        rank = ready.pop()
        for source in rank:
            waiting.setdefault(source, []).append(rank)
            break
    return Replay(wiring, durations, mode, begins, ends, done=not waiting)


class _Carrier:
    """Brings messages through their channels, in each channel one after the other.

    A channel is moved on by whoever takes a message out of it: by then all up to that one have been issued.
    """

    def __init__(self, wiring: Wiring, hop: Sequence[Sequence[float]], buffered: bool, ends: Sequence[float | None]):
        messages = wiring.messages
        self.ends, self.buffered = ends, buffered
        self.wanted, self.hop = messages.feeds.tolist(), wiring.hops(messages.slot, hop)
        self.channel, self.through = messages.channel.tolist(), messages.first.tolist()
        self.sent, self.posted = messages.sent.tolist(), messages.posted.tolist()
        self.free_at = [0.0] * len(self.through)
        self.arrival = [0.0] * len(self.hop)

    def arrive(self, entry: int, issued: float) -> float:
        """When the message that feeds `entry` is there; its SEND was `issued` then, and so were those before it."""
        wanted, ends = self.wanted[entry], self.ends
        channel = self.channel[wanted]
        free = self.free_at[channel]
        for index in range(self.through[channel], wanted + 1):
            at = self.posted[index]
            sent, posted = ends[self.sent[index]] or 0.0, (ends[at] or 0.0) if at >= 0 else 0.0
            free = max(free, sent if self.buffered else max(sent, posted)) + self.hop[index]
            self.arrival[index] = max(free, posted)
            self.through[channel] = index + 1
        self.free_at[channel] = free
        return self.arrival[wanted]


def _delay(
    wiring: Wiring, durations: Durations, mode: Mode, ends: Sequence[float | None]
) -> Callable[[int, float], float] | None:
    """What makes the arrival of a value at an entry out of the time when it was made or sent; None if they are one."""
    if not any(map(any, durations.hop)):
        return None
    if wiring.columns.is_lowered:
        return _Carrier(wiring, durations.hop, mode == "buffered", ends).arrive
    hop = wiring.hops(wiring.far, durations.hop)
    return lambda entry, made: made + hop[entry]
