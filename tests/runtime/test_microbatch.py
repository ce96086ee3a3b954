"""Microbatches: what is divided, what goes whole, who says the batch size, and outputs put together again."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from hocket.errors import ConfigError
from hocket.partition import split_microbatch_ranges
from hocket.runtime.microbatch import Batch, measure_batch, merge_outputs, split_step


@dataclass
class Pair:
    ids: Any
    table: Any


_pytree.register_dataclass(Pair)

X = torch.arange(14).view(7, 2)
Y = torch.arange(7)
TABLE = torch.arange(9).view(3, 3)


def sizes_of(parts: list[Any]) -> list[int]:
    return [len(part) for part in parts]


# --- dividing ---------------------------------------------------------------------------------------------------------


def test_tensors_as_long_as_the_batch_are_divided_and_all_else_goes_whole() -> None:
    mask = object()
    values = {"y": Y, "table": TABLE, "scale": torch.tensor(2.0), "mask": mask, "flag": True, "none": None, "n": [1, 2]}
    got = split_step((X, TABLE), values, Y, 4)
    assert (got.count, got.batch_size, got.sizes) == (4, 7, [2, 2, 2, 1])
    assert torch.equal(torch.cat([args[0] for args in got.args]), X)
    assert torch.equal(torch.cat(got.targets), Y) and torch.equal(torch.cat([k["y"] for k in got.kwargs]), Y)
    for args, kwargs in zip(got.args, got.kwargs, strict=True):
        assert args[1] is TABLE
        assert all(kwargs[name] is values[name] for name in values if name != "y")


@pytest.mark.parametrize("batch, count", [(7, 4), (8, 4), (4, 4), (5, 1), (23, 6)])
def test_sizes_follow_the_rule_of_split_microbatch_ranges(batch: int, count: int) -> None:
    got = split_step((torch.arange(batch),), {}, None, count)
    assert [part.tolist() for (part,) in got.args] == [list(r) for r in split_microbatch_ranges(batch, count)]


def test_microbatches_are_views() -> None:
    got = split_step((X,), {}, None, 4)
    got.args[1][0][0, 0] = 100
    assert X[2, 0] == 100
    X[2, 0] = 4


def test_microbatches_of_an_input_that_requires_grad_do_not_share_a_node() -> None:
    x = X.double().requires_grad_()
    parts = [args[0] for args in split_step((x,), {}, None, 4).args]
    parts[2].sum().backward()
    parts[0].sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 1, 0, 0, 1, 1, 0]


def test_nests_are_divided_leaf_by_leaf() -> None:
    batch = {"a": (X, [Y, TABLE]), "n": 3, "p": Pair(Y, None), "o": OrderedDict(y=Y)}
    got = split_step((batch,), {}, {"labels": Y, "weights": torch.ones(3)}, 4)
    second = got.args[1][0]
    assert second["a"][0].tolist() == [[4, 5], [6, 7]] and second["a"][1][0].tolist() == [2, 3]
    assert second["a"][1][1] is TABLE and second["n"] == 3
    assert isinstance(second["p"], Pair) and second["p"].ids.tolist() == [2, 3] and second["p"].table is None
    assert type(second["o"]) is OrderedDict and second["o"]["y"].tolist() == [2, 3]
    assert got.targets[3]["labels"].tolist() == [6] and len(got.targets[3]["weights"]) == 3


def test_nests_without_batch_data_stay_the_same_object() -> None:
    table = {"t": TABLE}
    assert all(kwargs["table"] is table for kwargs in split_step((X,), {"table": table}, None, 4).kwargs)


def test_without_targets_or_arguments() -> None:
    got = split_step((), {}, None, 3)
    assert (got.args, got.kwargs, got.targets) == ([()] * 3, [{}] * 3, [None] * 3)
    assert got.sizes is None and got.batch_size is None
    assert got.kwargs[0] is not got.kwargs[1]


# --- rules ------------------------------------------------------------------------------------------------------------


def test_p42_a_dimension_for_a_keyword() -> None:
    pos = torch.arange(3 * 8 * 5).view(3, 8, 5)
    got = split_step((torch.ones(8, 5),), {"pos": pos}, None, 4, split={"pos": 1})
    assert [k["pos"].shape for k in got.kwargs] == [(3, 2, 5)] * 4
    assert torch.equal(torch.cat([k["pos"] for k in got.kwargs], 1), pos)
    # Without the rule it goes whole: 3 is not the batch size.
    assert split_step((torch.ones(8, 5),), {"pos": pos}, None, 4).kwargs[0]["pos"] is pos


@pytest.mark.parametrize("dim", [1, -2])
def test_dimensions_for_positions_and_targets(dim: int) -> None:
    x = torch.arange(5 * 7 * 2).view(5, 7, 2)
    got = split_step((TABLE, x), {}, x + 1, 4, split={0: "whole", 1: dim, "targets": dim})
    assert got.sizes == [2, 2, 2, 1]
    assert torch.equal(torch.cat([args[1] for args in got.args], 1), x)
    assert torch.equal(torch.cat(got.targets, 1), x + 1)


def test_whole_keeps_what_only_looks_like_batch_data() -> None:
    square = torch.ones(7, 7)
    assert split_step((X,), {"m": square}, None, 4).kwargs[0]["m"].shape == (2, 7)
    got = split_step((X,), {"m": square}, square, 4, split={"m": "whole", "targets": "whole"})
    assert all(k["m"] is square for k in got.kwargs) and all(t is square for t in got.targets)


def test_a_function_divides_as_it_likes() -> None:
    offsets = [0, 3, 5]
    got = split_step((X,), {"o": offsets}, None, 2, split={"o": lambda value, n: [value[: i + 2] for i in range(n)]})
    assert [k["o"] for k in got.kwargs] == [[0, 3], [0, 3, 5]]


def test_lists_are_microbatches_already_divided() -> None:
    parts = [X[:3], X[3:4], X[4:6], X[6:]]
    masks = [object() for _ in range(4)]
    got = split_step((parts,), {"mask": masks, "y": Y}, [3, 2, 1, 0], 4)
    assert all(args[0] is part for args, part in zip(got.args, parts, strict=True))
    assert [k["mask"] for k in got.kwargs] == masks and got.targets == [3, 2, 1, 0]
    # The others follow its sizes.
    assert got.sizes == [3, 1, 2, 1] and sizes_of([k["y"] for k in got.kwargs]) == [3, 1, 2, 1]


def test_lists_of_plain_values_are_values_but_as_targets() -> None:
    got = split_step((X,), {"lengths": [1, 2, (3, None)], "names": ["a"] * 4}, ["a", "b", "c", "d"], 4)
    assert got.kwargs[0] == {"lengths": [1, 2, (3, None)], "names": ["a"] * 4}
    assert got.targets == ["a", "b", "c", "d"]


def test_a_list_under_a_dimension_is_one_value() -> None:
    got = split_step(([X, Y],), {}, None, 4, split={0: 0})
    assert [part.tolist() for part in got.args[3][0]] == [[[12, 13]], [6]]


def test_a_list_of_tensors_that_are_no_batch_leaves_the_batch_size_to_others() -> None:
    offsets = [torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(9)]
    got = split_step((X,), {"offsets": offsets}, Y, 4)
    assert got.sizes == [2, 2, 2, 1] and got.kwargs[3]["offsets"] is offsets[3]


# --- the batch size ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs, targets, split, expected",
    [
        ((X,), {}, None, {}, 7),
        ((), {}, Y, {}, 7),
        ((), {"pos": Y}, None, {}, 7),
        ((), {"pos": X}, Y[:5], {}, 5),
        ((TABLE, X), {}, None, {}, 3),
        ((TABLE, X), {}, None, {0: "whole"}, 7),
        ((TABLE, X), {}, None, {1: 0}, 3),
        ((X,), {"pos": X}, None, {"pos": 1}, 7),
        ((), {"table": TABLE, "pos": X}, None, {"table": "whole"}, 7),
        ((torch.tensor(1.0), {"n": 1, "x": X}), {}, None, {}, 7),
        (("text", None), {}, None, {}, None),
        (([X, Y],), {}, None, {}, 14),
        (([object(), object()],), {}, Y, {}, 7),
        ((X,), {}, None, {0: lambda value, n: [value] * n}, None),
    ],
)
def test_who_says_the_batch_size(args: Any, kwargs: Any, targets: Any, split: Any, expected: int | None) -> None:
    assert measure_batch(args, kwargs, targets, 2, split=split).size == expected


def test_measure_batch_tells_the_sizes_of_divided_arguments() -> None:
    assert measure_batch(([X[:4], X[4:]],), {}, None, 2) == Batch(7, (4, 3))
    assert measure_batch((X,), {}, None, 2) == Batch(7, None)


def test_the_batch_size_of_other_ranks_counts() -> None:
    got = split_step((), {"pos": TABLE, "y": Y}, None, 4, batch_size=7)
    assert got.kwargs[0]["pos"] is TABLE and got.sizes == [2, 2, 2, 1]
    got = split_step((), {"pos": TABLE, "y": Y}, Y, 2, batch_size=[6, 1])
    assert got.sizes == [6, 1] and sizes_of(got.targets) == [6, 1] and got.batch_size == 7


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs, targets, split, words",
    [
        pytest.param((X[:2],), {}, None, {}, ["2 items", "4 microbatches", "at most 2"], id="P40"),
        pytest.param((X[:0],), {}, None, {}, ["0 items", "4 microbatches"], id="empty"),
        ((X,), {"p": TABLE}, None, {"p": 1}, ["'p'", "dimension 1", "[3, 3]", "3 items", "batch has 7"]),
        ((X,), {"p": TABLE}, None, {"p": 2}, ["'p'", "dimension 2", "[3, 3]"]),
        ((X,), {"p": torch.tensor(1)}, None, {"p": 0}, ["'p'", "shape []"]),
        ((X, {"k": TABLE}), {}, None, {1: 0}, ["argument 1", "3 items", "batch has 7"]),
        ((torch.ones(5, 3), X), {}, None, {1: 0}, ["argument 1", "7 items", "batch has 5", "'whole'"]),
        (([X, X, X],), {}, None, {}, ["argument 0", "list of 3", "step has 4", "n_microbatches=3"]),
        ((X,), {"m": [object()]}, None, {}, ["'m'", "list of 1", "step has 4"]),
        ((X,), {}, [1, 2], {}, ["targets", "list of 2", "step has 4"]),
        ((X,), {}, TABLE, {}, ["targets", "[3, 3]", "3 items", "batch has 7"]),
        ((X,), {}, {"labels": TABLE}, {}, ["targets", "[3, 3]", "batch has 7"]),
        ((X,), {"p": Y}, None, {"p": True}, ["'p'", "True", "'whole'"]),
        ((X,), {"p": Y}, None, {"p": "all"}, ["'p'", "'all'", "'whole'"]),
        ((X,), {"p": Y}, None, {"p": lambda value, n: [value]}, ["'p'", "1 parts", "4 microbatches"]),
        ((X,), {"p": Y}, None, {"p": lambda value, n: 1 / 0}, ["'p'", "ZeroDivisionError"]),
        ((X,), {"p": Y.numpy()}, None, {}, ["'p'", "numpy.ndarray", "7", "convert it"]),
        ((X,), {"p": (1, np.zeros((7, 2)))}, None, {}, ["'p'", "numpy.ndarray"]),
    ],
)
def test_refused(args: Any, kwargs: Any, targets: Any, split: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        split_step(args, kwargs, targets, 4, split=split)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_have_no_slices_are_refused_by_name() -> None:
    sparse = torch.eye(7).to_sparse_csr()
    with pytest.raises(ConfigError, match=r"argument 0 .*sparse_csr"):
        split_step((sparse,), {}, None, 4)
    assert (
        split_step((X,), {"adjacency": sparse}, None, 4, split={"adjacency": "whole"}).kwargs[0]["adjacency"] is sparse
    )


def test_sizes_for_another_number_of_microbatches() -> None:
    with pytest.raises(ConfigError, match=r"2 sizes .* 3 microbatches"):
        split_step((X,), {}, None, 3, batch_size=[4, 3])


# --- merging ----------------------------------------------------------------------------------------------------------


def test_outputs_are_merged_where_they_carry_the_batch() -> None:
    outputs = [
        {"x": part, "aux": torch.tensor(float(len(part))), "table": TABLE, "none": None, "n": 1} for part in X.split(4)
    ]
    merged = merge_outputs(outputs, [4, 3])
    assert torch.equal(merged["x"], X) and merged["none"] is None
    assert merged["aux"] == [torch.tensor(4.0), torch.tensor(3.0)]
    assert merged["table"][1] is TABLE and merged["n"] == [1, 1]


@pytest.mark.parametrize(
    "outputs, sizes",
    [
        ([X[:4], X[4:]], None),
        ([X[:4], X[4:]], [3, 4]),
        ([X[:4], X[4:].double()], [4, 3]),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], [2, 2]),
        ([torch.tensor(1.0), torch.tensor(2.0)], [1, 1]),
        ([(X,), [X]], [7, 7]),
        ([X, (X,)], [7, 7]),
        ([{"a": X}, {"b": X}], [7, 7]),
        ([object(), None], [1, 1]),
        ([], None),
    ],
)
def test_else_outputs_are_listed(outputs: list[Any], sizes: list[int] | None) -> None:
    merged = merge_outputs(outputs, sizes)
    assert type(merged) is list and all(a is b for a, b in zip(merged, outputs, strict=True))


def test_registered_outputs_keep_their_type() -> None:
    merged = merge_outputs([Pair(X[:4], None), Pair(X[4:], None)], [4, 3])
    assert type(merged) is Pair and torch.equal(merged.ids, X) and merged.table is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_merging_undoes_dividing(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, batch))
    leaf = st.lists(st.integers(0, 2), max_size=2).map(lambda rest: torch.randn(batch, *rest))
    nest = st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.text(), inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )
    value = data.draw(nest)
    parts = split_step((value,), {}, None, count)
    merged = merge_outputs([args[0] for args in parts.args], parts.sizes)
    leaves, structure = _pytree.tree_flatten(value)
    again, same = _pytree.tree_flatten(merged)
    assert structure == same and all(map(torch.equal, leaves, again))


def test_dividing_is_fast() -> None:
    x, y, mask = torch.ones(64, 8), torch.arange(64), torch.ones(8, 8)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(20):
            split_step((x,), {"mask": mask, "flag": True}, y, 16)
        best = min(best, (time.perf_counter() - begun) / 20)
    assert best < 2e-3, f"{best * 1e6:.0f} µs for 32 views"  # about 100 µs on an idle machine
