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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from hocket.collector import collector_paused
from hocket.errors import ProgramError
from hocket.program import Action, Op, Program, make_actions, recv_of, send_of
from hocket.replay import Replay
from hocket.verify import prove

if TYPE_CHECKING:
    from hocket.wiring import Ints


def add_communication(program: Program) -> Program:
    """The same program with its sends and receives. Linear in the number of actions.

    Raises ProgramError if `program` has sends or receives already, or is not legal.
    """
    with collector_paused():
        plan = _plan(program)
        rows = tuple(_weave(plan, rank) for rank in range(program.num_ranks))
        return Program(program.placement, rows, program.num_microbatches)


def communicating_rank(program: Program, rank: int) -> tuple[Action, ...]:
    """The list of one rank in `add_communication(program)`, without making those of the others."""
    with collector_paused():
        return _weave(_plan(program, rank), rank)


@dataclass(frozen=True)
class _Plan:
    """Where the messages of a program stand: behind and before which of its actions, counted through all ranks.

    Rank r has the actions from `first[r]` on.
    """

    program: Program
    first: Ints
    sends: _Ends
    recvs: _Ends


@dataclass(frozen=True)
class _Ends:
    """One end of every message, in the order of the actions before which it is put: their `place`, and its `slot`.

    `ops` and `stages` are by kind and stage of the value.
    """

    ops: list[Op]
    stages: list[int]
    place: Ints
    slot: Ints

    def between(self, low: int, high: int, microbatches: int) -> tuple[Ints, Iterator[Action]]:
        """Those put at the places from `low` up to `high`, and the actions."""
        import numpy as np

        part = slice(*np.searchsorted(self.place, (low, high)))
        value, microbatch = np.divmod(self.slot[part], microbatches)
        values = value.tolist()
        actions = make_actions(
            map(self.ops.__getitem__, values), map(self.stages.__getitem__, values), microbatch.tolist()
        )
        return self.place[part], actions


def _plan(program: Program, only: int | None = None) -> _Plan:
    """Where all messages stand; or only the RECVs of one rank, with all SENDs."""
    import numpy as np

    if program.is_lowered:
        raise ProgramError("the program has sends and receives already; pass program.compute_only()")
    result = prove(program)
    wiring, columns = result.wiring, result.wiring.columns
    first = np.cumsum([0, *map(len, program.ranks)])
    place = first[columns.rank] + columns.step
    # Every action is an entry here. The consumer of each value that crosses ranks, in the order in which they are made:
    crossing = np.flatnonzero(wiring.far >= 0)
    consumer = np.full(len(place), -1)
    consumer[wiring.maker[wiring.far[crossing]]] = crossing
    producer = np.flatnonzero(consumer >= 0)
    consumer = consumer[producer]
    slot = wiring.far[consumer]
    arriving = np.arange(len(slot)) if only is None else np.flatnonzero(columns.rank[consumer] == only)
    arriving = arriving[np.argsort(columns.channel_of(slot[arriving]), kind="stable")]
    before = _post(result, first, place, producer[arriving], consumer[arriving])
    stably = np.argsort(before, kind="stable")
    values = [columns.name(v * program.num_microbatches) for v in range(2 * program.num_stages)]
    sends, recvs = [send_of(*value) for value in values], [recv_of(*value) for value in values]
    return _Plan(
        program,
        first,
        _Ends([a.op for a in sends], [a.stage for a in sends], place[producer] + 1, slot),
        _Ends([a.op for a in recvs], [a.stage for a in recvs], before[stably], slot[arriving][stably]),
    )


def _post(result: Replay, first: Ints, place: Ints, producer: Ints, consumer: Ints) -> Ints:
    """For each message, given channel by channel, the place of the action before which its RECV stands.

    Both limits grow along a channel, so its order is kept.
    """
    import numpy as np

    wiring, columns = result.wiring, result.wiring.columns
    channel = columns.channel_of(wiring.far[consumer]).astype(np.intp)
    target = columns.rank[consumer]
    # One channel, or one rank, after the other in a single array: far enough apart, they do not meet.
    apart = channel * len(place)
    needed = np.minimum.accumulate((place[consumer] + apart)[::-1])[::-1] - apart
    ends = np.array(result.ends, dtype=float)
    horizon = ends.max() + 1.0
    by_place = np.zeros(first[-1])
    by_place[place] = ends + columns.rank * horizon
    running = np.searchsorted(by_place, ends[wiring.last[producer]] + target * horizon, side="right")
    return np.minimum(running, np.maximum(needed - 1, first[target]))


def _weave(plan: _Plan, rank: int) -> tuple[Action, ...]:
    """The list of one rank, with its SENDs and RECVs."""
    import numpy as np

    row, count = plan.program.ranks[rank], plan.program.num_microbatches
    low, high = plan.first[rank : rank + 2]
    # A SEND behind the last action of a rank stands at the place of the next rank's first.
    behind, sends = plan.sends.between(low + 1, high + 1, count)
    before, recvs = plan.recvs.between(low, high, count)
    places = np.concatenate([behind, before]) - low
    if not len(places):
        return row
    added = np.fromiter(chain(sends, recvs), object, len(places))
    return tuple(np.insert(np.fromiter(row, object, len(row)), places, added).tolist())
