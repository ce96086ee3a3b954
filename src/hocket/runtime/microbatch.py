"""Divides a step's arguments into microbatches, and merges the outputs of microbatches again.

What happens to an argument, or to `targets`:

1. A rule given for it in `split`, by its name or position: an int is the dimension on which its tensors are divided,
   "whole" gives all of it to every microbatch, and a function `(value, n_microbatches) -> list` divides it itself.
2. A `list` is microbatches already divided, one element for each, and its length must be their number. Only a list of
   nothing but None and plain numbers, strings and bytes is a value like any other; for targets not even that.
3. In anything else tensors are divided on dimension 0 if their length there is the batch size; all else goes whole.

The batch size is the length of the first tensor that is not said to go whole: among positional arguments, then targets,
then keyword arguments; on its rule's dimension or else on dimension 0. A divided list counts by the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import _pytree

from hocket.errors import ConfigError
from hocket.partition import split_microbatch_ranges

SplitRule = int | Literal["whole"] | Callable[[Any, int], Sequence[Any]]
"""A dimension, "whole", or a function (value, n_microbatches) -> list."""


@dataclass(slots=True)
class Microbatches:
    """A step's arguments, one of each for every microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    """None for each where there are no targets."""
    sizes: list[int] | None
    """Items in each microbatch; None where no argument says."""
    batch_size: int | None
    count: int


class Batch(NamedTuple):
    """How many items a batch has, and, if its arguments came divided, how many are in each microbatch."""

    size: int | None
    sizes: tuple[int, ...] | None


def split_step(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Any,
    n_microbatches: int,
    *,
    split: Mapping[str | int, SplitRule] | None = None,
    batch_size: int | Sequence[int] | None = None,
) -> Microbatches:
    """Divide the arguments of one step as the module's docstring says; tensors become views.

    split: rules by keyword, by position (an int), or under "targets". batch_size: what other ranks know of the batch:
    its size, or the sizes of its microbatches; None: this rank's arguments say.

    Raises ConfigError, naming the argument and the numbers, for what cannot be divided as asked.
    """
    columns = _columns(args, kwargs, targets, n_microbatches, split or {})
    batch = _measure(columns, batch_size)
    sizes = None
    if batch.size is not None:
        sizes = list(batch.sizes or map(len, split_microbatch_ranges(batch.size, n_microbatches)))
        if len(sizes) != n_microbatches:
            raise ConfigError(f"{len(sizes)} sizes were given for {n_microbatches} microbatches; give one for each")
    parts = [_divide(column, batch.size, sizes or [], n_microbatches) for column in columns]
    first = len(args)
    named = list(kwargs)
    return Microbatches(
        list(zip(*parts[:first], strict=True)) if first else [()] * n_microbatches,
        [dict(zip(named, values, strict=True)) for values in zip(*parts[first + 1 :], strict=True)]
        if named
        else [{} for _ in range(n_microbatches)],
        parts[first],
        sizes,
        batch.size,
        n_microbatches,
    )


def measure_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Any,
    n_microbatches: int,
    *,
    split: Mapping[str | int, SplitRule] | None = None,
) -> Batch:
    """What this rank's arguments say of the batch, without dividing them. Raises ConfigError like `split_step`."""
    return _measure(_columns(args, kwargs, targets, n_microbatches, split or {}), None)


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int] | None) -> Any:
    """The outputs of all microbatches as one value.

    Where all outputs have one structure, it is kept, and in the place of each leaf stands: the concatenation on
    dimension 0, if the leaves are tensors whose lengths there are `sizes` and which agree in the rest; None, if all are
    None; else the list of the microbatches' leaves. Without a common structure: the list of outputs.
    """
    if not outputs:
        return []
    if isinstance(outputs[0], torch.Tensor):
        return _merge_leaves(outputs, sizes) if all(isinstance(o, torch.Tensor) for o in outputs) else list(outputs)
    flat, structures = zip(*map(_pytree.tree_flatten, outputs), strict=True)
    if any(structure != structures[0] for structure in structures[1:]):
        return list(outputs)
    leaves = [_merge_leaves(column, sizes) for column in zip(*flat, strict=True)]
    return _pytree.tree_unflatten(leaves, structures[0])


# --- arguments as columns ---------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """One argument: its value, the dimension its rule demands, or its microbatches if it came or was made divided."""

    name: str
    value: Any
    dim: int | None
    parts: list[Any] | None
    measures: bool
    """Whether its length may be the batch size."""


def _columns(
    args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, count: int, split: Mapping[str | int, SplitRule]
) -> list[_Column]:
    """Positional arguments, targets, keyword arguments: the order in which they are asked for the batch size."""
    columns = [_column(f"argument {i}", value, split.get(i), count) for i, value in enumerate(args)]
    columns.append(_column("targets", targets, split.get("targets"), count))
    columns += [_column(f"argument {name!r}", value, split.get(name), count) for name, value in kwargs.items()]
    return columns


def _column(name: str, value: Any, rule: SplitRule | None, count: int) -> _Column:
    if rule is None:
        if type(value) is list and (name == "targets" or not _is_plain(value)):
            _check_count(name, value, count)
            return _Column(name, value, None, value, True)
        return _Column(name, value, None, None, True)
    if rule == "whole":
        return _Column(name, value, None, [value] * count, False)
    if type(rule) is int:
        return _Column(name, value, rule, None, True)
    if callable(rule):
        return _Column(name, value, None, _call_rule(name, value, rule, count), False)
    raise ConfigError(f"split of {name} is {rule!r}; give a dimension, 'whole', or a function (value, n) -> list")


def _is_plain(value: Any) -> bool:
    """Whether a list holds nothing but plain values, at any depth of lists and tuples."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _check_count(name: str, value: list[Any], count: int) -> None:
    if len(value) != count:
        raise ConfigError(
            f"{name} is a list of {len(value)} microbatches, but the step has {count}; pass a list of {count}, or "
            f"n_microbatches={len(value)}; if it is one value for all, pass a tuple or give split a rule for it"
        )


def _call_rule(name: str, value: Any, rule: Callable[[Any, int], Sequence[Any]], count: int) -> list[Any]:
    try:
        parts = list(rule(value, count))
    except Exception as error:
        raise ConfigError(f"the split function of {name} failed: {type(error).__name__}: {error}") from error
    if len(parts) != count:
        raise ConfigError(
            f"the split function of {name} gave {len(parts)} parts for {count} microbatches; return one for each"
        )
    return parts


# --- the batch size ---------------------------------------------------------------------------------------------------


def _measure(columns: Sequence[_Column], known: int | Sequence[int] | None) -> Batch:
    if known is not None and not isinstance(known, int):
        return Batch(sum(known), tuple(known))
    size = _size(columns) if known is None else known
    if size is not None:
        for column in columns:
            sizes = _part_sizes(column.parts) if column.measures and column.parts is not None else None
            if sizes and sum(sizes) == size:
                return Batch(size, sizes)
    return Batch(size, None)


def _size(columns: Sequence[_Column]) -> int | None:
    for column in columns:
        if column.parts is not None:
            sizes = _part_sizes(column.parts) if column.measures else None
            if sizes:
                return sum(sizes)
            continue
        for leaf in _tensors(column.value):
            if column.dim is not None:
                return leaf.size(_checked_dim(column, leaf))
            if leaf.dim():
                return leaf.size(0)
    return None


def _part_sizes(parts: Sequence[Any]) -> tuple[int, ...] | None:
    """The length of the first tensor in each part; None if one has none."""
    sizes = [next((leaf.size(0) for leaf in _tensors(part) if leaf.dim()), None) for part in parts]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


# --- dividing ---------------------------------------------------------------------------------------------------------


def _divide(column: _Column, batch: int | None, sizes: Sequence[int], count: int) -> list[Any]:
    value = column.value
    if column.parts is not None:
        return list(column.parts)
    if batch is None or value is None:
        return [value] * count
    if isinstance(value, torch.Tensor):
        parts = _divide_leaf(column, value, batch, sizes)
        if parts is None and column.name == "targets" and value.dim():
            raise _mismatch(column, value, batch)
        return [value] * count if parts is None else parts
    return _divide_tree(column, batch, sizes, count)


def _divide_tree(column: _Column, batch: int, sizes: Sequence[int], count: int) -> list[Any]:
    leaves, structure = _pytree.tree_flatten(column.value)
    divided = [_divide_leaf(column, leaf, batch, sizes) for leaf in leaves]
    if not any(divided):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if column.name == "targets" and tensors:
            raise _mismatch(column, tensors[0], batch)
        return [column.value] * count
    whole = [[leaf] * count if parts is None else parts for leaf, parts in zip(leaves, divided, strict=True)]
    return [_pytree.tree_unflatten(part, structure) for part in zip(*whole, strict=True)]


def _divide_leaf(column: _Column, leaf: Any, batch: int, sizes: Sequence[int]) -> list[Any] | None:
    """The leaf's microbatches, or None if it goes whole."""
    if not isinstance(leaf, torch.Tensor):
        if column.measures and _is_array(leaf) and leaf.shape[0] == batch:
            raise ConfigError(
                f"{column.name} holds a {type(leaf).__module__}.{type(leaf).__name__} as long as the batch, {batch}; "
                "only tensors are divided: convert it, or give split 'whole' or a function for it"
            )
        return None
    dim = column.dim
    if dim is None:
        if leaf.dim() == 0 or leaf.size(0) != batch:
            return None
        dim = 0
    else:
        dim = _checked_dim(column, leaf)
        if leaf.size(dim) != batch:
            raise ConfigError(
                f"{column.name} is to be divided on dimension {column.dim}, where its shape {list(leaf.shape)} has "
                f"{leaf.size(dim)} items, but the batch has {batch}; correct the argument or its dimension in split, "
                "or give 'whole' for what comes before it and is no batch data"
            )
    try:
        if leaf.requires_grad or leaf.layout is not torch.strided:
            # One by one: torch.split would tie the microbatches to one node of autograd.
            return [leaf.narrow(dim, stop - size, size) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        # No views to autograd: an in-place op of a stage on one microbatch must neither make the whole batch require
        # grad nor count as a change of the others. Hence `data`, which counts changes by itself, not `detach()`.
        return [part.data for part in leaf.split_with_sizes(list(sizes), dim)]
    except RuntimeError as error:
        raise ConfigError(
            f"{column.name} of type {type(leaf).__name__} and layout {leaf.layout} cannot be divided on dimension "
            f"{dim}: {error}; give split a function for it, or pass a list of microbatches"
        ) from error


def _checked_dim(column: _Column, leaf: torch.Tensor) -> int:
    dim = column.dim
    assert dim is not None
    if not -leaf.dim() <= dim < leaf.dim():
        raise ConfigError(
            f"{column.name} is to be divided on dimension {dim}, but has a tensor of shape {list(leaf.shape)}; "
            "correct the dimension in split, or give a function"
        )
    return dim % leaf.dim()


def _is_array(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and bool(getattr(leaf, "shape", ()))


def _mismatch(column: _Column, leaf: torch.Tensor, batch: int) -> ConfigError:
    return ConfigError(
        f"{column.name} has shape {list(leaf.shape)}, with {leaf.size(0)} items on dimension 0, but the batch has "
        f"{batch}; pass as many, or say how it is divided: split={{'targets': dimension, 'whole' or a function}}"
    )


# --- merging ----------------------------------------------------------------------------------------------------------


def _merge_leaves(leaves: Sequence[Any], sizes: Sequence[int] | None) -> Any:
    first = leaves[0]
    if all(leaf is None for leaf in leaves):
        return None
    if (
        sizes is not None
        and isinstance(first, torch.Tensor)
        and all(
            isinstance(leaf, torch.Tensor)
            and leaf.dim() > 0
            and leaf.size(0) == size
            and leaf.shape[1:] == first.shape[1:]
            and leaf.dtype == first.dtype
            for leaf, size in zip(leaves, sizes, strict=True)
        )
    ):
        return torch.cat(list(leaves))
    return list(leaves)
