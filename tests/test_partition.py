"""Partitions: even, by costs (against brute force), by counts; nothing lost, and what is refused."""

from __future__ import annotations

import random
import time
from itertools import combinations, combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import PartitionError
from hocket.partition import partition_layers, split_microbatch_ranges


def _whole(parts: list[range], total: int) -> bool:
    return [i for part in parts for i in part] == list(range(total))


def test_microbatches_first_ones_longer():
    assert split_microbatch_ranges(7, 4) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert split_microbatch_ranges(4, 4) == [range(i, i + 1) for i in range(4)]
    assert split_microbatch_ranges(5, 1) == [range(5)]


@pytest.mark.parametrize(
    "items, microbatches, text",
    [
        (2, 4, r"cannot split 2 items into 4 microbatches: .* use at most 2 microbatches or a larger batch"),
        (8, 0, r"cannot split 8 items into 0 microbatches; ask for at least 1"),
        (0, 1, r"cannot split 0 items into 1 microbatches"),
        (8, 1.5, r"microbatches must be a whole number, got 1.5"),
    ],
)
def test_microbatches_refused(items: int, microbatches: int, text: str):
    with pytest.raises(PartitionError, match=text):
        split_microbatch_ranges(items, microbatches)


def test_every_layer_is_placed_once_and_evenly():
    for layers in range(1, 25):
        for stages in range(1, layers + 1):
            found = partition_layers(layers, stages)
            sizes = list(map(len, found))
            assert _whole(found, layers)
            assert len(found) == stages and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
            assert partition_layers(layers, stages, [1.0] * layers) == found, "equal costs are no reason to differ"
            assert partition_layers(layers, stages, [0.1] * layers) == found, "nor are those that round"
    assert list(map(len, partition_layers(30, 4))) == [8, 8, 7, 7]
    assert list(map(len, partition_layers(38, 8))) == [5, 5, 5, 5, 5, 5, 4, 4]


def _loads(parts: list[range], costs: list[float], first: float, last: float) -> list[float]:
    loads = [sum(costs[i] for i in part) for part in parts]
    loads[0] += first
    loads[-1] += last
    return loads


def _brute(costs: list[int], stages: int, first: int, last: int, allow_empty: bool) -> tuple[int, int]:
    """Least largest stage, and then least sum of squares, over all partitions."""
    count = len(costs)
    if allow_empty:
        cuts = combinations_with_replacement(range(count + 1), stages - 1)
    else:
        cuts = combinations(range(1, count), stages - 1)
    found = []
    for cut in cuts:
        loads = _loads([range(a, b) for a, b in pairwise((0, *cut, count))], costs, first, last)
        found.append((max(loads), sum(load * load for load in loads)))
    return min(found)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    stages=st.integers(1, 9),
    first=st.integers(0, 15),
    last=st.integers(0, 15),
    allow_empty=st.booleans(),
)
def test_by_costs_is_exact(costs: list[int], stages: int, first: int, last: int, allow_empty: bool):
    stages = stages if allow_empty and stages <= 5 else min(stages, len(costs))
    found = partition_layers(len(costs), stages, costs, first=first, last=last, allow_empty=allow_empty)
    assert _whole(found, len(costs)) and len(found) == stages
    assert allow_empty or all(found)
    if sum(costs) + first + last:
        loads = _loads(found, costs, first, last)
        assert (max(loads), sum(x * x for x in loads)) == _brute(costs, stages, first, last, allow_empty)


def test_ties_go_to_the_most_even_and_then_to_longer_first():
    assert list(map(len, partition_layers(6, 3, [4, 1, 1, 1, 1, 1]))) == [1, 3, 2]
    assert list(map(len, partition_layers(5, 2, [1, 1, 1, 1, 1]))) == [3, 2]


def test_embedding_and_head_weigh_on_the_ends():
    assert list(map(len, partition_layers(12, 4, first=2, last=3))) == [3, 4, 4, 1]
    assert list(map(len, partition_layers(3, 2, first=9, allow_empty=True))) == [0, 3]
    assert list(map(len, partition_layers(2, 5, first=5, last=5, allow_empty=True))) == [0, 1, 1, 0, 0]
    assert list(map(len, partition_layers(2, 4, allow_empty=True))) == [1, 1, 0, 0]


@pytest.mark.parametrize("scale", [1e-300, 1e-3, 1 / 3, 1e15, 1e300])
def test_units_do_not_matter(scale: float):
    rng = random.Random(3)
    costs = [rng.randint(1, 50) for _ in range(40)]
    found = partition_layers(40, 7, [cost * scale for cost in costs])
    assert max(_loads(found, costs, 0, 0)) == max(_loads(partition_layers(40, 7, costs), costs, 0, 0))


def test_by_counts():
    assert partition_layers(6, 3, counts=[1, 2, 3]) == [range(1), range(1, 3), range(3, 6)]
    assert partition_layers(6, 3, counts=[3, 0, 3], allow_empty=True) == [range(3), range(3, 3), range(3, 6)]


@pytest.mark.parametrize(
    "layers, stages, options, text",
    [
        (3, 4, {}, r"cannot place 3 layers on 4 stages: .* use at most 3 stages, more layers, or allow_empty=True"),
        (0, 1, {}, r"cannot place 0 layers on 1 stages; there must be at least 1 layer"),
        (4, 0, {}, r"cannot place 4 layers on 0 stages; ask for at least 1 stage"),
        (4, 2, {"costs": [1, 2, 3]}, r"costs has 3 numbers for 4 layers; give one for each layer"),
        (2, 2, {"costs": [1, -2]}, r"costs\[1\] is -2; a cost is a finite number of at least 0"),
        (2, 2, {"costs": [1, float("nan")]}, r"costs\[1\] is nan"),
        (2, 2, {"first": -1}, r"first is -1"),
        (30, 4, {"counts": [8, 8, 8, 8]}, r"place 32 layers, but there are 30; change them by -2 in all"),
        (30, 4, {"counts": [10, 10, 10]}, r"counts has 3 numbers for 4 stages"),
        (30, 1, {"counts": [29]}, r"counts \[29\] place 29 layers, but there are 30; change them by \+1"),
        (4, 2, {"counts": [4, 0]}, r"counts\[1\] is 0: stage 1 would have no layer; .* or say allow_empty=True"),
        (4, 2, {"counts": [5, -1], "allow_empty": True}, r"counts\[1\] is -1"),
        (4, 2, {"counts": [2, 2], "costs": [1] * 4}, r"give either counts or costs"),
    ],
)
def test_refused(layers: int, stages: int, options: dict, text: str):
    with pytest.raises(PartitionError, match=text) as error:
        partition_layers(layers, stages, **options)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("kind", ["equal", "random", "giant", "ends"])
def test_ten_thousand_layers_on_512_stages(kind: str):
    """Takes a second at worst; a busy machine may need a second try."""
    rng = random.Random(5)
    costs = [1.0] * 10_000 if kind == "equal" else [rng.random() for _ in range(10_000)]
    if kind == "giant":
        costs[5000] = 500.0
    seconds = []
    while not seconds or (seconds[-1] > 2 and len(seconds) < 3):
        start = time.process_time()
        found = partition_layers(10_000, 512, costs, first=3000.0 if kind == "ends" else 0.0)
        seconds.append(time.process_time() - start)
        assert _whole(found, 10_000) and all(found)
    assert min(seconds) < 2
