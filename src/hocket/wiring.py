"""A program as columns of integers, and who waits for whom in it: made once for the checker, the replay and the passes.

`read` lays the actions of all ranks out one after the other, the parts of a pair side by side, and refuses what is out
of range. `wire` numbers the compute actions among them through as *entries* and finds for each what it needs, where
that is made and, in a lowered program, where it is sent and received.

In a legal program an entry waits for at most one entry of another rank, whatever SENDs and RECVs lie between: a SEND is
issued when the entry before it ends, and by then all SENDs before it in its channel have been; when the turn of the
consumer comes, its RECV and all RECVs before it in the channel have been posted. So a message that takes no time is
there when the entry before its SEND has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hocket.errors import ProgramError
from hocket.program import Action, Op, Program, consumer_stage, message, needs, produces, unfold

Ints = NDArray[np.intp]
Value = tuple[Op, int]
"""Kind and producing stage of a value, for any microbatch."""

NEVER = np.iinfo(np.intp).max
"""The entry at whose end that happens which never happens."""


@dataclass(frozen=True)
class Columns:
    """All actions of a program. Those of rank r are the rows `first[r]` to `first[r + 1]`.

    `orders[r]` is what rank r runs in turn: its list, or, unless pairs run jointly, its list with the pairs unfolded.
    `step` is the place in that order; both parts of a joint pair share one.

    A value or a message, (kind, producing stage, microbatch), is named by one number, its slot.
    """

    program: Program
    joint: bool
    has_pairs: bool
    orders: tuple[Sequence[Action], ...]
    first: Ints
    step: Ints
    op: NDArray[np.uint8]
    stage: Ints
    microbatch: Ints

    @cached_property
    def rank(self) -> Ints:
        return np.repeat(np.arange(len(self.orders)), np.diff(self.first))

    @cached_property
    def home(self) -> Ints:
        """The rank of each stage."""
        return np.array(self.program.placement.stage_to_rank)

    @cached_property
    def is_lowered(self) -> bool:
        return bool((self.op > Op.W).any())

    @property
    def num_slots(self) -> int:
        return 2 * self.program.num_stages * self.program.num_microbatches

    @cached_property
    def slot(self) -> Ints:
        """What each action makes or moves; negative for W, which makes no value."""
        return self.look_up(_made_or_moved)

    def look_up(self, rule: Callable[[Op, int], Value | None], rows: Ints | None = None) -> Ints:
        """The slot of what `rule` names for the op and stage of each action; negative where it names nothing."""
        stages, count = self.program.num_stages, self.program.num_microbatches
        table = np.full((8, stages), -count, dtype=np.intp)
        for op in list(Op)[:8]:
            for stage in range(stages):
                value = rule(op, stage)
                if value is not None and 0 <= value[1] < stages:
                    table[op, stage] = (value[0] * stages + value[1]) * count
        if rows is None:
            return table[self.op, self.stage] + self.microbatch
        return table[self.op[rows], self.stage[rows]] + self.microbatch[rows]

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The channels, as (rank, rank), by number."""
        return tuple(sorted({edge for edge in self._edge_of_value if edge[0] != edge[1]}))

    @cached_property
    def _edge_of_value(self) -> list[tuple[int, int]]:
        home, stages = self.program.placement.stage_to_rank, range(self.program.num_stages)
        targets = [(stage, consumer_stage(kind, stage)) for kind in (Op.F, Op.B) for stage in stages]
        return [(home[stage], home[target if target in stages else stage]) for stage, target in targets]

    def channel_of(self, slots: Ints) -> Ints:
        """The number of the channel of each message."""
        number = {edge: index for index, edge in enumerate(self.edges)}
        # As few bits as will do: sorting by 16 bits takes linear time.
        smallest = np.min_scalar_type(len(number))
        by_value = np.array([number.get(edge, len(number)) for edge in self._edge_of_value], smallest)
        return by_value[slots // self.program.num_microbatches]

    def name(self, slot: np.integer | int) -> tuple[Op, int, int]:
        """The (kind, producing stage, microbatch) of a slot."""
        value, microbatch = divmod(int(slot), self.program.num_microbatches)
        kind, stage = divmod(value, self.program.num_stages)
        return Op(kind), stage, microbatch

    def action(self, row: np.integer | int) -> Action:
        return Action(Op(int(self.op[row])), int(self.stage[row]), int(self.microbatch[row]))


def read(program: Program, joint: bool = False) -> Columns:
    """The columns of `program`; `joint` says that both parts of a pair run at the same time.

    Raises ProgramError for an action that is out of range or not on the rank of its stage.
    """
    orders: list[Sequence[Action]] = []
    steps: list[Ints] = []
    columns: list[tuple[NDArray[np.uint8], Ints, Ints]] = []
    has_pairs = False
    for rank, order in enumerate(program.ranks):
        step = np.arange(len(order))
        try:
            ops, stages, microbatches, parts = zip(*order, strict=True) if order else ((), (), (), ())
            if parts.count(()) < len(parts) or Op.OVERLAP_F_B in bytes(ops):
                has_pairs = True
                _check_pairs(program, order)
                order = order if joint else unfold(order)
                step = np.repeat(np.arange(len(order)), [len(action.parts) or 1 for action in order])
                ops, stages, microbatches, _ = zip(*(p for a in order for p in a.parts or (a,)), strict=True)
            of_op = np.frombuffer(bytes(ops), np.uint8)
            of_stage, of_microbatch = (np.fromiter(column, np.intp, len(column)) for column in (stages, microbatches))
            columns.append((of_op, of_stage, of_microbatch))
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, ProgramError):
                raise
            raise ProgramError(f"rank {rank} has an action that is no Op and two whole numbers: {error}") from None
        orders.append(order)
        steps.append(step)
    first = np.concatenate([[0], np.cumsum([len(step) for step in steps])])
    op, stage, microbatch = map(np.concatenate, zip(*columns, strict=True))
    found = Columns(program, joint, has_pairs, tuple(orders), first, np.concatenate(steps), op, stage, microbatch)
    _check_range(found)
    return found


def _check_pairs(program: Program, order: Sequence[Action]) -> None:
    for action in order:
        ops = tuple(part.op for part in action.parts)
        if ops != () if action.op != Op.OVERLAP_F_B else ops not in ((Op.F, Op.B), (Op.F, Op.I)):
            raise program.fault(
                f"{action!r} is no action: a pair has two parts, an F and a B or an I, and nothing else has any; make "
                "it with Action.pair",
                {action: "here"},
            )


def _check_range(columns: Columns) -> None:
    program, stage, microbatch = columns.program, columns.stage, columns.microbatch
    bad = (stage < 0) | (stage >= program.num_stages) | (microbatch < 0) | (microbatch >= program.num_microbatches)
    bad |= columns.op > Op.RECV_B
    if not bad.any():
        bad = columns.home[stage] != columns.rank
        if not bad.any():
            return
    row = int(bad.argmax())
    rank = int(columns.rank[row])
    if columns.op[row] > Op.RECV_B:
        raise ProgramError(f"rank {rank} has an action with op {columns.op[row]}; the ops are those of hocket.Op")
    action = columns.action(row)
    if not 0 <= action.stage < program.num_stages:
        text = f"there are stages 0..{program.num_stages - 1} only"
    elif not 0 <= action.microbatch < program.num_microbatches:
        text = f"there are microbatches 0..{program.num_microbatches - 1} only"
    else:
        text = f"stage {action.stage} lives on rank {program.placement.rank_of(action.stage)}"
    raise program.fault(f"{action} on rank {rank}: {text}", {action: "here"})


@dataclass(frozen=True)
class Wiring:
    """What each entry needs, and where that comes from. Entry e is the action in row `row[e]`; those of rank r are
    `starts[r]` to `starts[r + 1]`.

    By entry, the slots of what it needs: of its `own` stage, of a stage `near` on the same rank, of one `far` away on
    another rank; negative for nothing. By slot: the entry that is the `maker` of the value; the one at whose end the
    value is `made` (the maker, or the second part of its joint pair); those at whose end the SEND (`sent`) and the RECV
    (`posted`) is issued. NEVER where there is none; what stands ahead of all entries of its rank has the one before.
    """

    columns: Columns
    row: Ints
    starts: Ints
    last: Ints
    own: Ints
    near: Ints
    far: Ints
    maker: Ints
    made: Ints
    sent: Ints
    posted: Ints

    @cached_property
    def waits(self) -> Ints:
        """The entry of another rank that must have ended before each entry starts; -1 for none."""
        source = self.sent if self.columns.is_lowered else self.made
        return np.where(self.far >= 0, source[self.far], -1)

    @cached_property
    def messages(self) -> Messages:
        """The messages of a lowered program."""
        columns = self.columns
        slot = by_channel(columns, columns.slot[rows_of(columns, Op.SEND_F, Op.SEND_B)])
        channel = columns.channel_of(slot).astype(np.intp)
        target = np.array([target for _, target in columns.edges], dtype=np.intp)[channel]
        posted = self.posted[slot]
        number = np.full(columns.num_slots, -1)
        number[slot] = np.arange(len(slot))
        return Messages(
            slot,
            channel,
            np.searchsorted(channel, np.arange(len(columns.edges))),
            self.sent[slot],
            np.where(posted >= self.starts[target], posted, -1),
            np.where(self.far >= 0, number[self.far], -1),
        )

    def seconds(self, compute: Sequence[Sequence[float]], overlap: float | None) -> list[float]:
        """The time of each entry. Of a joint pair the second part takes the time of both."""
        op, stage = self.columns.op[self.row], self.columns.stage[self.row]
        cost = np.asarray(compute, dtype=float)[op, stage]
        first = np.flatnonzero(self.last > np.arange(len(self.last)))
        if overlap is not None and len(first):
            cost[first + 1] = (cost[first] + cost[first + 1]) * overlap
            cost[first] = 0.0
        return cost.tolist()

    def hops(self, slots: Ints, hop: Sequence[Sequence[float]]) -> list[float]:
        """The time of the hop of each value."""
        return np.asarray(hop, dtype=float).ravel()[slots // self.columns.program.num_microbatches].tolist()

    def times(
        self, begins: Sequence[float], ends: Sequence[float | None]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """The start and the end of each action of each order, from those of the entries; NaN for what has none."""
        columns, is_entry = self.columns, self.columns.op <= Op.W
        entry = np.cumsum(is_entry) - 1
        ended = np.append(np.array(ends, dtype=float), 0.0)
        end = ended[np.where(entry >= self.starts[columns.rank], entry, -1)]
        start = end.copy()
        start[is_entry] = begins
        place = columns.first[columns.rank] + columns.step
        final = np.append(place[1:] != place[:-1], True)
        cuts = np.cumsum([len(order) for order in columns.orders])[:-1]
        split = [[part.tolist() for part in np.split(column[final], cuts)] for column in (start, end)]
        return split[0], split[1]


@dataclass(frozen=True)
class Messages:
    """The messages of a lowered program, channel by channel; channel c has those from `first[c]` on.

    By message, in the order of its channel: its `slot`, its `channel`, the entries at whose end its SEND and its RECV
    are issued (`sent`, `posted`; -1 at time 0). By entry: the message that `feeds` it, or -1.
    """

    slot: Ints
    channel: Ints
    first: Ints
    sent: Ints
    posted: Ints
    feeds: Ints


def wire(columns: Columns) -> Wiring:
    """The wiring of a program in which each action stands once."""
    is_entry = columns.op <= Op.W
    row = np.flatnonzero(is_entry)
    last = np.arange(len(row))
    if columns.joint and columns.has_pairs:
        place = (columns.first[columns.rank] + columns.step)[row]
        last = np.searchsorted(place, place, side="right") - 1
    slot = columns.slot[row]
    maker, made, sent, posted = (np.full(columns.num_slots, NEVER) for _ in range(4))
    makes = np.flatnonzero(slot >= 0)
    maker[slot[makes]], made[slot[makes]] = makes, last[makes]
    if columns.is_lowered:
        before = np.cumsum(is_entry) - 1
        for issued, ops in ((sent, (Op.SEND_F, Op.SEND_B)), (posted, (Op.RECV_F, Op.RECV_B))):
            rows = rows_of(columns, *ops)
            issued[columns.slot[rows]] = before[rows]
    own, near, far = (columns.look_up(rule, row) for rule in _inputs(columns.program))
    return Wiring(columns, row, np.searchsorted(row, columns.first), last, own, near, far, maker, made, sent, posted)


def rows_of(columns: Columns, first: Op, second: Op) -> Ints:
    """The rows with one of two ops."""
    return np.flatnonzero((columns.op == first) | (columns.op == second))


def by_channel(columns: Columns, slots: Ints) -> Ints:
    """Messages, given in the order in which the ranks issue them, sorted by channel."""
    return slots[np.argsort(columns.channel_of(slots), kind="stable")]


def _made_or_moved(op: Op, stage: int) -> Value | None:
    if op > Op.W:
        return message(Action(op, stage, 0))[:2]
    kind = produces(op)
    return None if kind is None else (kind, stage)


def _inputs(program: Program) -> tuple[Callable[[Op, int], Value | None], ...]:
    """The dependency rule in three: what an op needs of its own stage, of another one on its rank, of another rank."""
    stages, home = program.num_stages, program.placement.stage_to_rank

    def one(wanted: Callable[[int, int], bool]) -> Callable[[Op, int], Value | None]:
        def find(op: Op, stage: int) -> Value | None:
            found = needs(op, stage, stages) if op <= Op.W else ()
            return next((value for value in found if wanted(value[1], stage)), None)

        return find

    return (
        one(lambda at, stage: at == stage),
        one(lambda at, stage: at != stage and home[at] == home[stage]),
        one(lambda at, stage: home[at] != home[stage]),
    )
