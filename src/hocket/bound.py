"""Proven lower bounds of the makespan: what no program beats at given costs, placement and memory.

Each bound looks at one rank and lets all others be as fast as their own path allows. With m microbatches:

Work. The rank computes for m (F + I + W), and before its first F the activation must come through the stages before:
    T >= head + work.

Warm-up. Before the earliest moment at which the first I of a stage can start (a microbatch must pass all stages and
    come back) the rank can only do forwards there, and memory says how many. What that leaves of the time is idle:
    T >= (start of the first I - work possible before) + work.

Cool-down. When the last F (or the last I) of a stage ends, its microbatch still has a path to go: up to the last stage,
    down to the first, and the last W. Of the rank's work only what memory can hold back is left to fill that time:
    T >= idle at the start + (work - work that can be pending) + path. The idle time at the start may be that of the
    warm-up only if the two do not overlap, that is if memory cannot hold all microbatches at once.

Path. One microbatch through all stages and back: T >= sum of all F and I with their hops, and the longest W.

Memory. An activation is held at least from the start of F until its gradient is back, and the rest until W is done.
    The area under the memory of a rank is at least the sum of these, and at most capacity x time, less what must stay
    unused while memory fills up, one F after the other, and empties, one I or W after the other:
    T >= head + (area + unused at both ends) / capacity.

None assumes equal stages, an order of the microbatches, or one stage per rank. Work, path and the counting of forwards
in the warm-up are folklore (Narayanan et al., SC 2021, section 2.2; Qi et al., arXiv 2401.10241, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hocket.cost import CostModel
from hocket.counts import positive
from hocket.errors import ConfigError
from hocket.program import Placement

_MARGIN = 1e-9
_MOST_UNITS = 512


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: CostModel,
    capacity: float | Sequence[float] | None = None,
    *,
    split: bool = True,
    forward_only: bool = False,
) -> float:
    """Seconds from the first start to the last end that no program undercuts: the strongest of the bounds above.

    `capacity` is the memory of each rank (one number for all, or one each): bytes, `static_bytes` included, where the
    costs give activations a size, else activations of single stages, each held from F to W or B. None: no limit.
    `split` says that backwards may be split into I and W (and need not be); False: full backwards only. An overlapped
    pair counts at its speed. Linear in stages, whatever the number of microbatches.

    Raises ConfigError if a rank cannot hold even one microbatch, or a number is out of range.
    """
    microbatches = positive("microbatches", microbatches)
    if forward_only:
        return max(_forward_only(placement, microbatches, costs))
    path = _Path.of(placement, costs, split)
    limits = _limits(placement, costs, capacity)
    ranks = (_Rank.of(path, placement.stages_of(rank), microbatches) for rank in range(placement.num_ranks))
    return max(path.whole, *(_rank_bound(rank, number, limits[number]) for number, rank in enumerate(ranks)))


def _forward_only(placement: Placement, microbatches: int, costs: CostModel) -> Iterable[float]:
    """For each rank: its first F must wait for the stages before, and its last is followed by the stages after."""
    stages, home = placement.num_stages, placement.stage_to_rank
    forward, hops = costs.per_stage("forward", stages), costs.hops(stages)[0]
    crossing = [hop if a != b else 0.0 for hop, (a, b) in zip(hops, pairwise(home), strict=False)]
    reach = [0.0, *accumulate(f + c for f, c in zip(forward, [*crossing, 0.0], strict=True))]
    for rank in range(placement.num_ranks):
        hosted = placement.stages_of(rank)
        after = reach[-1] - (reach[hosted[-1] + 1] if hosted[-1] + 1 < stages else reach[-1])
        hop = crossing[hosted[-1]] if hosted[-1] + 1 < stages else 0.0
        yield reach[hosted[0]] + microbatches * sum(forward[s] for s in hosted) + hop + after


def _limits(
    placement: Placement, costs: CostModel, capacity: float | Sequence[float] | None
) -> tuple[float, ...] | tuple[None, ...]:
    """What is left for activations on each rank."""
    ranks = placement.num_ranks
    if capacity is None:
        return (None,) * ranks
    given = (float(capacity),) * ranks if isinstance(capacity, int | float) else tuple(map(float, capacity))
    if len(given) != ranks:
        raise ConfigError(f"capacity has {len(given)} numbers for {ranks} ranks; give one number, or {ranks}")
    static = costs.static_of(ranks) if costs.counts_bytes else (0.0,) * ranks
    return tuple(whole - part for whole, part in zip(given, static, strict=True))


@dataclass(frozen=True)
class _Path:
    """One microbatch alone: how long its ops take at best, when each starts, and how long it then takes to the end."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    held: tuple[float, ...]
    """Memory of a stage from F to I."""
    kept: tuple[float, ...]
    """Memory of a stage from I to W."""
    head: tuple[float, ...]
    """Earliest start of F."""
    back: tuple[float, ...]
    """Earliest start of I."""
    tail: tuple[float, ...]
    """Time from the end of I to the end of all, at least."""

    @property
    def whole(self) -> float:
        """From the first start to the last end."""
        return max(b + i + t for b, i, t in zip(self.back, self.inputs, self.tail, strict=True))

    @classmethod
    def of(cls, placement: Placement, costs: CostModel, split: bool) -> _Path:
        stages, home = placement.num_stages, placement.stage_to_rank
        forward, inputs, weights = _best_durations(costs, stages, split)
        up, down = costs.hops(stages)
        head, back, tail = [0.0] * stages, [0.0] * stages, [0.0] * stages
        for s in range(1, stages):
            head[s] = head[s - 1] + forward[s - 1] + (up[s - 1] if home[s] != home[s - 1] else 0.0)
        back[-1] = head[-1] + forward[-1]
        for s in range(stages - 2, -1, -1):
            back[s] = back[s + 1] + inputs[s + 1] + (down[s + 1] if home[s] != home[s + 1] else 0.0)
        for s in range(stages):
            below = tail[s - 1] + inputs[s - 1] + (down[s] if home[s] != home[s - 1] else 0.0) if s else 0.0
            tail[s] = max(weights[s], below)
        counted = costs.counts_bytes
        held = costs.per_stage("activation_bytes", stages) if counted else (1.0,) * stages
        kept = costs.per_stage("weight_bytes", stages) if counted else (1.0,) * stages
        # A full backward keeps nothing for a W, and while it lasts no more than its activation.
        kept = tuple(min(h, k) if split else 0.0 for h, k in zip(held, kept, strict=True))
        return cls(forward, inputs, weights, held, kept, tuple(head), tuple(back), tuple(tail))


def _best_durations(costs: CostModel, stages: int, split: bool) -> tuple[tuple[float, ...], ...]:
    """F, I and W such that any F, any B, any I with its W, and any pair takes at least as long as these in turn.

    A pair at speed s lasts (F + B) / s, and hands both values over at its end: no earlier than F/s and then B/s would.
    A B is no shorter than this I and then this W, and hands its value over no earlier.
    """
    ratio = costs.overlap or 1.0
    forward = tuple(ratio * f for f in costs.per_stage("forward", stages))
    whole = costs.per_stage("backward", stages)
    if not split:
        return forward, tuple(ratio * b for b in whole), (0.0,) * stages
    inputs, weights = [], []
    for b, i, w in zip(
        whole, costs.per_stage("backward_input", stages), costs.per_stage("backward_weight", stages), strict=True
    ):
        inputs.append(ratio * min(i, b))
        weights.append(max(0.0, min(ratio * i + w, ratio * b) - inputs[-1]))
    return forward, tuple(inputs), tuple(weights)


@dataclass(frozen=True)
class _Rank:
    """The stages of one rank, lowest first, on the path of a microbatch."""

    microbatches: int
    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    head: tuple[float, ...]
    back: tuple[float, ...]
    tail: tuple[float, ...]

    @classmethod
    def of(cls, path: _Path, stages: Sequence[int], microbatches: int) -> _Rank:
        rows = (path.forward, path.inputs, path.weights, path.held, path.kept, path.head, path.back, path.tail)
        return cls(microbatches, *(tuple(row[s] for s in stages) for row in rows))

    @property
    def size(self) -> int:
        return len(self.f)

    @property
    def work(self) -> float:
        return self.microbatches * (sum(self.f) + sum(self.i) + sum(self.w))

    def after_forward(self, k: int) -> float:
        """Time from the end of the F of stage k to the end of all, at least."""
        return self.back[k] - self.head[k] - self.f[k] + self.i[k] + self.tail[k]

    def whole_above(self, k: int) -> float:
        """F, I and W of the stages after k."""
        return sum(self.f[k + 1 :]) + sum(self.i[k + 1 :]) + sum(self.w[k + 1 :])


def _rank_bound(rank: _Rank, number: int, limit: float | None) -> float:
    if limit is not None and sum(rank.held) > limit * (1 + _MARGIN):
        raise ConfigError(
            f"capacity leaves {limit:g} for the activations of rank {number}, but one microbatch alone holds "
            f"{sum(rank.held):g}; raise the capacity, or place fewer or smaller stages on the rank"
        )
    work, head = rank.work, rank.head[0]
    idle = [max(head, rank.back[j] - _possible_before(rank, j, limit)) for j in range(rank.size)]
    best = max(idle) + work
    for k in range(rank.size):
        for forward in (True, False):
            path = rank.after_forward(k) if forward else rank.tail[k]
            pending = _pending_after(rank, k, forward, limit)
            start = max([head, *(idle[j] for j in range(rank.size) if _apart(rank, j, k, forward, limit))])
            best = max(best, start + work - pending + path)
    return best if limit is None or limit <= 0 else max(best, _area_bound(rank, limit, best))


def _possible_before(rank: _Rank, j: int, limit: float | None) -> float:
    """The most work that the rank can have done when the first I of its stage j starts.

    Up to stage j nothing is given back yet, so the microbatches that came as far as stage t <= j hold all stages up to
    t. Those that passed stage j may have done all there is to do on the stages above.
    """
    above = rank.whole_above(j)
    items = [(sum(rank.held[: t + 1]), sum(rank.f[: t + 1]) + (above if t == j else 0.0)) for t in range(j + 1)]
    return min(rank.microbatches * items[-1][1], _most(items, limit))


def _pending_after(rank: _Rank, k: int, forward: bool, limit: float | None) -> float:
    """The most work that can be left when the last F (`forward`) or the last I of stage k ends.

    That microbatch itself holds the stages up to k (below k, if it was the I) and has them and all above k to do. Each
    other microbatch either waits with some of its lowest stages held, or for W's only. Where a W keeps no memory, all
    of them may be left.
    """
    count, free = rank.microbatches, [w if kept == 0 else 0.0 for w, kept in zip(rank.w, rank.kept, strict=True)]
    top = k if forward else k - 1
    later = rank.whole_above(k) if forward else 0.0
    own = sum(rank.i[: top + 1]) + sum(rank.w[: top + 1])
    own += later if forward else rank.w[k] + sum(free[k + 1 :])
    space = None if limit is None else limit - sum(rank.held[: top + 1]) - (0.0 if forward else rank.kept[k])
    items = []
    for t in range(top + 1):
        value = sum(rank.i[: t + 1]) + sum(rank.w[: t + 1]) - sum(free[: t + 1])
        if t == k:
            value += later - sum(free[k + 1 :])
        items.append((sum(rank.held[: t + 1]), value))
    items += [(kept, w) for kept, w in zip(rank.kept, rank.w, strict=True) if kept > 0]
    most = own + (count - 1) * sum(free) + _most(items, space)
    everything = count * (
        sum(rank.i[: top + 1]) + sum(rank.w) + (sum(rank.f[k + 1 :]) + sum(rank.i[k + 1 :])) * forward
    )
    return min(most, everything)


def _apart(rank: _Rank, j: int, k: int, forward: bool, limit: float | None) -> bool:
    """True if the first I of stage j must start before the last F (or I) of stage k ends.

    Else all microbatches would hold their activations up to the lower of both stages at once.
    """
    if not forward and k <= j:
        return True
    return limit is not None and rank.microbatches * sum(rank.held[: min(j, k) + 1]) > limit * (1 + _MARGIN)


def _most(items: Sequence[tuple[float, float]], limit: float | None) -> float:
    """The largest value of any number of `items` (size, value) within `limit`, or a little more.

    Exact where sizes are small multiples of a common unit; else as if items could be cut.
    """
    items = [(size, value) for size, value in items if value > 0]
    if not items:
        return 0.0
    if limit is None or any(size <= 0 for size, _ in items):
        return math.inf
    smallest = min(size for size, _ in items)
    for parts in range(1, 9):
        unit = smallest / parts
        units = [round(size / unit) for size, _ in items]
        room = math.floor(limit / unit * (1 + _MARGIN) + _MARGIN)
        if room > _MOST_UNITS:
            break
        if all(abs(n * unit - size) <= _MARGIN * size for n, (size, _) in zip(units, items, strict=True)):
            best = [0.0] * (room + 1)
            for space in range(1, room + 1):
                gains = (best[space - n] + value for n, (_, value) in zip(units, items, strict=True) if n <= space)
                best[space] = max(best[space - 1], *gains, 0.0)
            return best[-1]
    return max(0.0, limit) * max(value / size for size, value in items)


def _area_bound(rank: _Rank, limit: float, proven: float) -> float:
    """The memory bound of the head of this file, where another bound has `proven` that filling up ends before emptying
    begins; else without what stays unused.
    """
    area = 0.0
    for s in range(rank.size):
        area += rank.held[s] * (rank.back[s] + rank.i[s] - rank.head[s]) + rank.kept[s] * rank.w[s]
    filling = [(held, f) for held, f in zip(rank.held, rank.f, strict=True)]
    emptying = [(kept, w) for kept, w in zip(rank.kept, rank.w, strict=True)]
    emptying += [(held - kept, i) for held, kept, i in zip(rank.held, rank.kept, rank.i, strict=True)]
    (unused, up), (more, down) = _unused(filling, limit), _unused(emptying, limit)
    ending = 0.0 if any(rank.w) else rank.tail[0]
    if rank.head[0] + up + down + ending > proven:
        unused = more = 0.0
    return rank.head[0] + (rank.microbatches * area + unused + more) / limit + ending


def _unused(steps: Sequence[tuple[float, float]], limit: float) -> tuple[float, float]:
    """Memory x time that stays unused while memory fills up by `steps` (size, seconds) in turn, and how long that is.

    While the n-th step runs, at most n times the largest size is in use; and at no time more than the largest size and
    then the best rate.
    """
    steps = [(size, seconds) for size, seconds in steps if size > 0]
    if not steps or min(seconds for _, seconds in steps) <= 0:
        return 0.0, 0.0
    size, quickest = max(s for s, _ in steps), min(t for _, t in steps)
    count = math.floor(limit / size)
    rate = max(s / t for s, t in steps)
    slope = max(0.0, limit - size)
    return max(
        (quickest * (count * limit - size * count * (count + 1) / 2), count * quickest),
        (slope**2 / (2 * rate), slope / rate),
    )
