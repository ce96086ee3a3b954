"""Program x CostModel -> Timeline: when everything runs, what the ranks hold, and how far that is from the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from hocket.bound import lower_bound
from hocket.cost import CostModel
from hocket.errors import ConfigError, ProgramError
from hocket.program import Action, Op, Program, consumer_stage
from hocket.replay import Mode, Replay, replay
from hocket.verify import verify

if TYPE_CHECKING:
    from hocket.wiring import Columns


class Event(NamedTuple):
    """A compute action of a rank and the seconds at which it starts and ends; `action` is an F, B, I or W."""

    rank: int
    start: float
    end: float
    action: Action


class Message(NamedTuple):
    """A value on its way from one rank to another: the activation (`kind` Op.F) or the gradient (Op.B) of `stage`.

    `start` is when the channel begins to carry it, `end` when the receiver has it.
    """

    source: int
    dest: int
    kind: Op
    stage: int
    microbatch: int
    start: float
    end: float


def simulate(program: Program, costs: CostModel | None = None, mode: Mode = "buffered", check: bool = True) -> Timeline:
    """Run `program` on paper at these costs (default: F = I = W = 1, B = 2, no communication).

    Takes compute-only programs, whose values arrive after the hop's time, and lowered ones, whose messages take turns
    on their channel. `mode` says when a message of a lowered program may start: "rendezvous", when both ends have
    issued it (as NCCL does); "buffered", when the sender has. Linear in the number of actions.

    Raises ProgramError if the program is not legal (`check=False` trusts one that `verify` has seen), and ConfigError
    if the costs are for another number of stages or ranks, or the mode is unknown.
    """
    if mode not in ("buffered", "rendezvous"):
        raise ConfigError(f"mode is {mode!r}; choose 'buffered' or 'rendezvous'")
    costs = CostModel() if costs is None else costs
    if not isinstance(costs, CostModel):
        raise ConfigError(f"costs is a {type(costs).__name__}; give a CostModel, as CostModel.from_mapping makes one")
    durations = costs.durations(program.num_stages)
    costs.static_of(program.num_ranks)
    if check:
        verify(program)
    result = replay(program, durations, mode)
    if not result.done:
        verify(program)
        raise ProgramError("the program cannot end: some rank waits for ever; `verify(program)` says why")
    return Timeline(program, costs, mode, result)


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """A program with a start and an end for each action. Times are in the unit of the costs, from 0 on."""

    program: Program
    costs: CostModel
    mode: Mode
    replay: Replay

    def __repr__(self) -> str:
        return (
            f"Timeline(ranks={self.program.num_ranks}, microbatches={self.program.num_microbatches}, "
            f"makespan={self.makespan:g}, bubble_fraction={self.bubble_fraction:.4f})"
        )

    # --- time -------------------------------------------------------------------------------------------------------

    @cached_property
    def _spans(self) -> tuple[tuple[float, float], ...]:
        """First start and last end of each rank's compute."""
        result = self.replay
        edges = pairwise(result.wiring.starts.tolist())
        return tuple((result.begins[a], result.ends[b - 1] or 0.0) if a < b else (0.0, 0.0) for a, b in edges)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks: what a synchronous step costs."""
        return max(end for _, end in self._spans) - min(start for start, _ in self._spans)

    @property
    def span(self) -> float:
        """The largest over ranks of last end - first start: the "cost" of the zero-bubble papers (arXiv 2401.10241).

        What a step costs when the next one begins before all ranks have ended this one.
        """
        return max(end - start for start, end in self._spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        wiring, durations = self.replay.wiring, self.replay.durations
        seconds = wiring.seconds(durations.compute, durations.overlap)
        return tuple(math.fsum(seconds[a:b]) for a, b in pairwise(wiring.starts.tolist()))

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the makespan that each rank does not compute."""
        return tuple(max(0.0, self.makespan - busy) for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (ranks x makespan): the part of the ranks' time that is lost."""
        total = self.program.num_ranks * self.makespan
        return max(0.0, 1.0 - sum(self.busy) / total) if total else 0.0

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no program beats at the same costs and placement within the memory that this one uses.

        Memory is that of `peak_bytes` where the costs give activations a size, else that of `peak_in_flight`. A
        program may split its backward or not, as it likes; see `hocket.bound.lower_bound`.
        """
        program = self.program
        if not program.has_backward:
            return lower_bound(program.placement, program.num_microbatches, self.costs, forward_only=True)
        # Without the static bytes, in whose rounding small activations would drown.
        costs = replace(self.costs, static_bytes=0.0)
        if costs.counts_bytes:
            capacity = _peak_bytes(self.replay.wiring.columns, costs)
        else:
            capacity = tuple(map(float, self.peak_in_flight))
        return min(lower_bound(program.placement, program.num_microbatches, costs, capacity), self.makespan)

    # --- memory -----------------------------------------------------------------------------------------------------

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most activations of single stages that each rank holds at once.

        Each counts from the start of its F to the end of its W (or B); in a forward-only program, to the end of its F.
        """
        ones = (1.0,) * self.program.num_stages
        return tuple(map(int, _peaks(self.replay.wiring.columns, ones, ones)))

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each rank holds at once: `static_bytes`, `activation_bytes` and `weight_bytes`.

        Buffers of messages that wait for their consumer are not counted.
        """
        return _peak_bytes(self.replay.wiring.columns, self.costs)

    # --- what there is to draw ----------------------------------------------------------------------------------------

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every F, B, I and W, rank by rank in order. The parts of a pair that runs jointly share start and end."""
        return tuple(chain.from_iterable(self.events_of(rank) for rank in range(self.program.num_ranks)))

    def events_of(self, rank: int) -> list[Event]:
        """The events of one rank, in order."""
        result = self.replay
        found = []
        for action, start, end in zip(result.orders[rank], result.start[rank], result.end[rank], strict=True):
            if action.op <= 3:
                found.append(Event(rank, start, end, action))
            else:
                found.extend(Event(rank, start, end, part) for part in action.parts)
        return found

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every value that goes from one rank to another, by channel and time."""
        found = self._channel_messages() if self.program.is_lowered else self._direct_messages()
        return tuple(sorted(found, key=lambda m: (m.source, m.dest, m.start, m.kind, m.microbatch)))

    def _channel_messages(self) -> list[Message]:
        hops, found = self.costs.hops(self.program.num_stages), []
        for (source, dest), channel in self.replay.channels.items():
            free = 0.0
            for ((kind, stage, microbatch), sent), (_, posted) in zip(channel.sent, channel.posted, strict=True):
                start = max(free, sent if self.mode == "buffered" else max(sent, posted))
                free = start + hops[kind][stage]
                found.append(Message(source, dest, kind, stage, microbatch, start, free))
        return found

    def _direct_messages(self) -> list[Message]:
        program, result, found = self.program, self.replay, []
        ranks = program.placement.stage_to_rank
        for kind in (Op.F, Op.B) if program.has_backward else (Op.F,):
            for stage, source in enumerate(ranks):
                target = consumer_stage(kind, stage)
                if not 0 <= target < len(ranks) or ranks[target] == source:
                    continue
                for microbatch in range(program.num_microbatches):
                    start, end = result.made(kind, stage, microbatch), result.arrived(kind, stage, microbatch)
                    if start is not None and end is not None:
                        found.append(Message(source, ranks[target], kind, stage, microbatch, start, end))
        return found


# --- memory of an order ---------------------------------------------------------------------------------------------


def peak_bytes(program: Program, costs: CostModel) -> tuple[float, ...]:
    """The most bytes that each rank of `program` holds at once, as `Timeline.peak_bytes`; needs no times, so no replay.

    Raises ConfigError if the costs are for another number of stages or ranks.
    """
    from hocket.wiring import read  # here, so that `import hocket` need not wait for numpy

    return _peak_bytes(read(program, joint=costs.overlap is not None), costs)


def _peak_bytes(columns: Columns, costs: CostModel) -> tuple[float, ...]:
    program = columns.program
    whole, rest = (costs.per_stage(name, program.num_stages) for name in ("activation_bytes", "weight_bytes"))
    static = costs.static_of(program.num_ranks)
    return tuple(s + p for s, p in zip(static, _peaks(columns, whole, rest), strict=True))


def _peaks(columns: Columns, whole: tuple[float, ...], rest: tuple[float, ...]) -> list[float]:
    """The largest sum each rank holds, where a stage holds `whole` from F to I or B, and `rest` from I to W.

    A rank does one thing at a time, so the order alone decides. Both parts of a joint pair hold theirs at once: the
    forward comes first, and takes memory before the backward gives any back.
    """
    import numpy as np

    held, kept = np.array(whole), np.array(rest)
    none = np.zeros_like(held)
    taken = np.array([held, none, none, none])
    given = np.array([none if columns.program.has_backward else held, held, held - kept, kept])
    computes = columns.op <= Op.W
    op, stage = columns.op[computes], columns.stage[computes]
    change = np.column_stack([taken[op, stage], -given[op, stage]]).ravel()
    edges = 2 * np.concatenate([[0], np.cumsum(computes)])[columns.first]
    return [float(np.cumsum(change[a:b]).max(initial=0.0)) for a, b in pairwise(edges.tolist())]
