"""Divides layers over stages and items over microbatches, so that nothing is lost and nothing comes twice."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hocket.counts import whole
from hocket.errors import PartitionError

if TYPE_CHECKING:
    import numpy as np

    _Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
    _Numbers = np.ndarray[tuple[int], np.dtype[np.int64 | np.float64]]


def split_microbatch_ranges(total_items: int, microbatches: int) -> list[range]:
    """The items of each microbatch: contiguous, the first `remainder` ranges one longer.

    Raises PartitionError, a ValueError, if there are no microbatches or fewer items than microbatches.
    """
    total_items, microbatches = _whole("total_items", total_items), _whole("microbatches", microbatches)
    if microbatches < 1:
        raise PartitionError(f"cannot split {total_items} items into {microbatches} microbatches; ask for at least 1")
    if total_items < microbatches:
        raise PartitionError(
            f"cannot split {total_items} items into {microbatches} microbatches: each needs at least one; "
            f"use at most {max(total_items, 1)} microbatches or a larger batch"
        )
    return _even(total_items, microbatches)


def partition_layers(
    n_layers: int,
    num_stages: int,
    costs: Sequence[float] | None = None,
    *,
    counts: Sequence[int] | None = None,
    first: float = 0.0,
    last: float = 0.0,
    allow_empty: bool = False,
) -> list[range]:
    """The layers of each stage, contiguous and in order.

    Without costs: sizes differ by at most one, longer ones first. With `costs`, one per layer in any unit, the
    costliest stage is as cheap as can be; among those the most even (least sum of squared stage costs); among those
    the one with longer stages first. `first` and `last` are costs of their own on the first and the last stage
    (embedding, head); without `costs` a layer then counts as 1. `counts` states the number of layers of each stage
    instead. No stage is empty unless `allow_empty`.

    The costliest stage is exact whatever the numbers are; evenness is exact where the square of the total fits in 62
    bits, in units of the costs' common divisor, and is judged to 15 digits elsewhere. 10,000 layers on 512 stages take
    about a second at worst.

    Raises PartitionError, a ValueError, for numbers that cannot be: no layers or stages, fewer layers than stages,
    costs or counts of a wrong length, negative ones, counts that do not add up.
    """
    n_layers, num_stages = _whole("n_layers", n_layers), _whole("num_stages", num_stages)
    _check_numbers(n_layers, num_stages, allow_empty or counts is not None)
    if counts is not None:
        if costs is not None or first or last:
            raise PartitionError("give either counts or costs (with first and last), not both")
        found = _by_counts(n_layers, num_stages, counts, allow_empty)
    elif costs is None and not first and not last and not (allow_empty and n_layers < num_stages):
        found = _even(n_layers, num_stages)
    else:
        found = _by_costs(n_layers, num_stages, costs, first, last, allow_empty)
    # Whatever went on above: no layer is lost and none comes twice.
    edges = [0, *(stage.stop for stage in found)]
    if [stage.start for stage in found] != edges[:-1] or edges[-1] != n_layers or sorted(edges) != edges:
        raise PartitionError(f"a partition of {n_layers} layers came out as {found}; this is a fault of hocket")
    return found


# --- what is refused --------------------------------------------------------------------------------------------------


def _whole(name: str, value: int) -> int:
    return whole(name, value, PartitionError)


def _check_numbers(n_layers: int, num_stages: int, allow_empty: bool) -> None:
    if num_stages < 1:
        raise PartitionError(f"cannot place {n_layers} layers on {num_stages} stages; ask for at least 1 stage")
    if n_layers < 1:
        raise PartitionError(f"cannot place {n_layers} layers on {num_stages} stages; there must be at least 1 layer")
    if n_layers < num_stages and not allow_empty:
        raise PartitionError(
            f"cannot place {n_layers} layers on {num_stages} stages: each stage needs a layer; use at most {n_layers} "
            "stages, more layers, or allow_empty=True"
        )


def _by_counts(n_layers: int, num_stages: int, counts: Sequence[int], allow_empty: bool) -> list[range]:
    counts = [_whole(f"counts[{stage}]", count) for stage, count in enumerate(counts)]
    if len(counts) != num_stages:
        raise PartitionError(f"counts has {len(counts)} numbers for {num_stages} stages; give one for each stage")
    least = 0 if allow_empty else 1
    for stage, count in enumerate(counts):
        if count < least:
            raise PartitionError(
                f"counts[{stage}] is {count}: stage {stage} would have no layer; give it at least 1"
                + ("" if count else " or say allow_empty=True")
            )
    if sum(counts) != n_layers:
        raise PartitionError(
            f"counts {counts} place {sum(counts)} layers, but there are {n_layers}; "
            f"change them by {n_layers - sum(counts):+d} in all"
        )
    return _ranges([0, *accumulate(counts)])


def _exact(name: str, value: float) -> Fraction:
    try:
        number = Fraction(value)
    except (TypeError, ValueError, OverflowError):
        number = Fraction(-1)
    if isinstance(value, str) or number < 0:
        raise PartitionError(f"{name} is {value!r}; a cost is a finite number of at least 0")
    return number


# --- the partitions ---------------------------------------------------------------------------------------------------


def _ranges(bounds: Sequence[int]) -> list[range]:
    return [range(low, high) for low, high in pairwise(bounds)]


def _even(total: int, parts: int) -> list[range]:
    size, longer = divmod(total, parts)
    return _ranges([part * size + min(part, longer) for part in range(parts + 1)])


def _by_costs(
    n_layers: int, num_stages: int, costs: Sequence[float] | None, first: float, last: float, allow_empty: bool
) -> list[range]:
    if costs is not None and len(costs) != n_layers:
        raise PartitionError(f"costs has {len(costs)} numbers for {n_layers} layers; give one for each layer")
    layers = [_exact(f"costs[{i}]", c) for i, c in enumerate(costs)] if costs is not None else [Fraction(1)] * n_layers
    head, tail = _exact("first", first), _exact("last", last)
    if not allow_empty:
        layers[0] += head
        layers[-1] += tail
        return _ranges(_best_bounds(_integers(layers), num_stages))
    # The embedding and the head become items pinned to the ends, so that the stage there may have no layer. Where items
    # are too few for all stages, those before the head's, or the last ones, stay empty.
    items = [*([head] if head else []), *layers, *([tail] if tail else [])]
    used = min(num_stages, len(items))
    bounds = _best_bounds(_integers(items), used)
    spare = used - 1 if tail else used
    bounds[spare:spare] = [bounds[spare]] * (num_stages - used)
    return _ranges([min(max(bound - bool(head), 0), n_layers) for bound in bounds])


def _integers(values: Sequence[Fraction]) -> list[int]:
    """The same proportions in whole numbers, as small as can be; where all is 0, layers count alike."""
    scale = math.lcm(*{value.denominator for value in values})
    whole = [value.numerator * (scale // value.denominator) for value in values]
    divisor = math.gcd(*whole)
    return [value // divisor for value in whole] if divisor else [1] * len(whole)


def _least_largest(sums: Sequence[int], parts: int) -> int:
    """The smallest possible largest part, by bisection over whole numbers; `sums` are the prefix sums."""
    total = sums[-1]
    low = max(max(b - a for a, b in pairwise(sums)), -(-total // parts))
    high = low + max(b - a for a, b in pairwise(sums))  # filling greedily, no part overshoots the mean by more
    while low < high:
        middle = (low + high) // 2
        at = 0
        for _ in range(parts):
            at = bisect_right(sums, sums[at] + middle) - 1
            if at == len(sums) - 1:
                break
        low, high = (low, middle) if at == len(sums) - 1 else (middle + 1, high)
    return low


def _best_bounds(items: Sequence[int], parts: int) -> list[int]:
    """Bounds of `parts` non-empty runs of `items`: least largest sum, then least sum of squares, then longer first.

    Dynamic programming from the end, one row for each number of parts still to make. Only items at which a bound can
    stand are looked at: those that the parts before can reach and from which the parts after can end. The squared sum
    has Monge's property, also under the limit on the largest part, so the best next bound moves on with the start, and
    back with the number of parts still to make (F. F. Yao, "Efficient dynamic programming using quadrangle
    inequalities", 1980); both narrow the search.
    """
    import numpy as np  # here, so that the command line's help need not wait for it

    sums = [0, *accumulate(items)]
    count, limit = len(items), _least_largest(sums, parts)
    ahead, behind = [0], [count]
    for _ in range(parts):
        ahead.append(bisect_right(sums, sums[ahead[-1]] + limit) - 1)
        behind.append(bisect_left(sums, sums[behind[-1]] - limit))
    furthest = np.fromiter(_furthest(sums, limit), dtype=np.int64, count=count + 1)
    exact = sums[-1] ** 2 < 2**62
    prefix = np.array(sums if exact else [value / sums[-1] for value in sums], dtype=np.int64 if exact else np.float64)

    at, best = count, np.zeros(1, dtype=prefix.dtype)  # the row: bounds from `at` on, and their best cost to the end
    choices: list[tuple[int, _Ints]] = []
    for left in range(1, parts + 1):
        low, high = max(behind[left], parts - left), min(ahead[parts - left], count - left)
        starts = np.arange(low, high + 1, dtype=np.int64)
        least = np.maximum(starts + 1, at)
        most = np.minimum(furthest[starts], at + len(best) - 1)
        if choices:
            shared = slice(at - low, high + 1 - low)  # the starts that the row before has as well
            most[shared] = np.minimum(most[shared], choices[-1][1][: max(0, high + 1 - at)])
        best, choice = _row(prefix, starts, least, most, best, at)
        at = low
        choices.append((low, choice))
    bounds = [0]
    for low, choice in reversed(choices):
        bounds.append(int(choice[bounds[-1] - low]))
    return bounds


def _furthest(sums: Sequence[int], limit: int) -> list[int]:
    """For each bound the last one that a part from there can reach within `limit`."""
    found, end = [], 0
    for value in sums:
        while end + 1 < len(sums) and sums[end + 1] - value <= limit:
            end += 1
        found.append(end)
    return found


def _row(
    prefix: _Numbers, starts: _Ints, least: _Ints, most: _Ints, after: _Numbers, base: int
) -> tuple[_Numbers, _Ints]:
    """Best cost, and last best next bound in least..most, for all `starts`; `after` holds the row before, from `base`.

    Where few pairs are possible all are tried at once; else every second start first, which brackets the others.
    """
    import numpy as np

    if len(starts) < 4 or int((most - least).sum()) < max(8 * len(starts), 20_000):
        return _try_all(prefix, starts, least, most, after, base)
    costs, choice = np.empty(len(starts), dtype=prefix.dtype), np.empty(len(starts), dtype=np.int64)
    costs[::2], choice[::2] = _row(prefix, starts[::2], least[::2], most[::2], after, base)
    odd = slice(1, None, 2)
    size = len(starts[odd])
    low = np.maximum(least[odd], choice[::2][:size])
    high = most[odd].copy()
    nexts = choice[2::2]
    high[: len(nexts)] = np.minimum(high[: len(nexts)], nexts)
    costs[odd], choice[odd] = _try_all(prefix, starts[odd], low, high, after, base)
    return costs, choice


def _try_all(
    prefix: _Numbers, starts: _Ints, least: _Ints, most: _Ints, after: _Numbers, base: int
) -> tuple[_Numbers, _Ints]:
    import numpy as np

    sizes = most - least + 1
    edges = np.cumsum(sizes) - sizes
    ends = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(least - edges, sizes)
    part = prefix[ends] - np.repeat(prefix[starts], sizes)
    costs = part * part + after[ends - base]
    best = np.minimum.reduceat(costs, edges)
    choice = np.maximum.reduceat(np.where(costs == np.repeat(best, sizes), ends, -1), edges)
    return best, choice
