"""V-Half and V-Min: a V of two stages per rank in half, or a third, of 1F1B's memory (Qi et al., arXiv 2405.15362).

Each microbatch runs down the V and up again, forward and then backward: four ways. In steady state all of them repeat
every six ticks (two stages, three ops each), so a wave is told by how many ticks a way takes per rank, its stagger, and
by how long it waits at a turn. The longer the four ways take together, the longer an activation is held. Where two ways
would meet on a rank in the same tick, modulo six, the turn is put off.

The wave leaves two ticks of six free, which the weight halves take. Start and end of the step are where the wave is
not there yet or no longer: a list schedule packs them, by the order of the wave and within the memory.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hocket.errors import ScheduleError
from hocket.program import Action, Op, Placement, Program
from hocket.schedules.orders import by_rows, column
from hocket.schedules.registry import ScheduleConfig, register_schedule

_PERIOD = 6
_NEVER = 1 << 60


class VHalfConfig(ScheduleConfig):
    """Two stages per rank placed as a V, backward in two halves, half the activations of 1F1B.

    On p ranks a rank holds at most 2 * ((p + 2) // 2) activations of single stages, against 2p for ZBV.
    """

    schedule: Literal["v_half"] = "v_half"
    """Name of the schedule."""


class VMinConfig(ScheduleConfig):
    """Two stages per rank placed as a V, backward in two halves, a third of the activations of 1F1B.

    On p ranks a rank holds at most 2 * ((p + 4) // 3) activations of single stages, against 2p for ZBV. Its bubble
    does not shrink where F, I and W differ.
    """

    schedule: Literal["v_min"] = "v_min"
    """Name of the schedule."""


@register_schedule(VHalfConfig)
def build_v_half(config: VHalfConfig, ranks: int, microbatches: int) -> Program:
    """V placement; the staggers of the four ways add up to the six ticks of the period."""
    if ranks == 2:
        wave = _wave(ranks, (1, 1, 1, 1), (1, 5, 1))
    else:
        wave = _wave(ranks, (1, 2, 1, 2), (1, 1, 2) if ranks % 2 else (1, 4, 2))
    memory = 2 * ((ranks + 2) // 2)
    return _program(wave, microbatches, memory, _quotas(wave, memory))


@register_schedule(VMinConfig)
def build_v_min(config: VMinConfig, ranks: int, microbatches: int) -> Program:
    """V placement; every way takes one tick per rank, the fewest there can be."""
    turns = ((3, 3, 3), (1, 1, 1), (1, 5, 1))[ranks % 3]
    wave = _wave(ranks, (1, 1, 1, 1), turns)
    memory = 2 * ((ranks + 4) // 3)
    return _program(wave, microbatches, memory, None if ranks % 3 == 1 else _quotas(wave, memory))


class _Ways(NamedTuple):
    """The tick at which microbatch 0 meets one rank on each of its four ways."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def _wave(ranks: int, staggers: tuple[int, int, int, int], turns: tuple[int, int, int]) -> list[_Ways]:
    """The ways of each rank. "Down" goes from rank 0 to the last one, "up" back to rank 0."""
    last = ranks - 1
    up = staggers[0] * last + turns[0]
    back = up + staggers[1] * last + turns[1]
    home = back + staggers[2] * last + turns[2]
    return [
        _Ways(
            staggers[0] * rank,
            up + staggers[1] * (last - rank),
            back + staggers[2] * rank,
            home + staggers[3] * (last - rank),
        )
        for rank in range(ranks)
    ]


def _quotas(wave: list[_Ways], memory: int) -> list[int]:
    """Activations that each rank's stage on the way down may hold, so that the one on the way up has what it needs.

    In steady state the latter holds as many microbatches as begin while one goes from there to its turn and back.
    """
    return [memory - max(1, -(-(ways.backward_down - ways.forward_up) // _PERIOD)) for ways in wave]


class _Rank:
    """One rank while its list is packed: what it holds, what it has done, and what it would do next."""

    def __init__(self, rank: int, ranks: int, ways: _Ways, memory: int, quota: int | None):
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.ways, self.memory, self.quota = ways, memory, quota
        self.held = self.held_down = self.weights_done = 0
        self.order: list[Action] = []
        self.inputs: list[Action] = []

    def choose(self, forwards: list[int], backwards: list[int]) -> Action | None:
        """Of what is ready, the op that is first in the wave; else the oldest weight half; else nothing.

        `forwards[s]` and `backwards[s]` count what stage s had done when the tick began. The item behind the last
        stage's, which is also the one before stage 0's, counts all microbatches.
        """
        down, up, ways = self.down, self.up, self.ways
        first, op, stage, microbatch = _NEVER, Op.W, 0, 0
        if self.held < self.memory:
            done = forwards[up]
            turn = ways.forward_up + _PERIOD * done
            if done < forwards[up - 1]:
                first, op, stage, microbatch = turn, Op.F, up, done
            done = forwards[down]
            at = ways.forward_down + _PERIOD * done
            in_turn = at < turn if self.quota is None else self.held_down < self.quota
            if done < forwards[down - 1] and at < first and in_turn:
                first, op, stage, microbatch = at, Op.F, down, done
        done = backwards[up]
        at = ways.backward_down + _PERIOD * done
        if done < forwards[up] and done < backwards[up + 1] and at < first:
            first, op, stage, microbatch = at, Op.I, up, done
        done = backwards[down]
        at = ways.backward_up + _PERIOD * done
        if done < backwards[down + 1] and at < first:
            first, op, stage, microbatch = at, Op.I, down, done
        if first < _NEVER:
            return Action(op, stage, microbatch)
        if self.weights_done < len(self.inputs):
            _, stage, microbatch, _ = self.inputs[self.weights_done]
            return Action(Op.W, stage, microbatch)
        return None

    def record(self, action: Action) -> None:
        """Append `action` to the rank's list and keep count of what it holds."""
        self.order.append(action)
        op, stage, _, _ = action
        if op == Op.I:
            self.inputs.append(action)
            return
        change = 1 if op == Op.F else -1
        self.held += change
        if stage == self.down:
            self.held_down += change
        if op == Op.W:
            self.weights_done += 1


def _program(wave: list[_Ways], microbatches: int, memory: int, quotas: list[int] | None) -> Program:
    """Pack the lists; for many microbatches, pack the lists for fewer and repeat their steady state."""
    ranks = len(wave)
    enough = 2 * ranks + 8
    if microbatches > enough:
        orders = [_stretch(order, microbatches - enough) for order in _pack(wave, enough, memory, quotas)]
    else:
        orders = _pack(wave, microbatches, memory, quotas)
    return Program(Placement.v(ranks), tuple(map(tuple, orders)), microbatches)


def _stretch(order: list[Action], more: int) -> list[Action]:
    """Make room for `more` microbatches by repeating what the rank does in the middle, one period a microbatch."""
    middle = len(order) // 2
    repeated = [(0, column(op, stage, range(k, k + more))) for op, stage, k, _ in order[middle : middle + _PERIOD]]
    tail = [Action(op, stage, k + more) for op, stage, k, _ in order[middle:]]
    return order[:middle] + by_rows(*repeated) + tail


def _pack(wave: list[_Ways], microbatches: int, memory: int, quotas: list[int] | None) -> list[list[Action]]:
    """A list schedule: in each tick every rank does, of what is ready, what comes first in the wave.

    With `quotas` forwards on the way down run ahead of the wave as far as those allow; without, they keep their turn.
    """
    ranks = len(wave)
    stages = 2 * ranks
    lines = [_Rank(rank, ranks, ways, memory, quotas[rank] if quotas else None) for rank, ways in enumerate(wave)]
    forwards, backwards = [0] * stages + [microbatches], [0] * stages + [microbatches]
    left = 3 * stages * microbatches
    while left:
        chosen = [(line, action) for line in lines if (action := line.choose(forwards, backwards)) is not None]
        if not chosen:
            raise ScheduleError(
                f"no order of {microbatches} microbatches on {ranks} ranks fits {memory} activations per rank; "
                "choose 'zero_bubble_v'"
            )
        for line, action in chosen:
            line.record(action)
            if action.op == Op.F:
                forwards[action.stage] += 1
            elif action.op == Op.I:
                backwards[action.stage] += 1
        left -= len(chosen)
    return [line.order for line in lines]
