"""Divides layers over stages and items over microbatches, so that nothing is lost and nothing comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hocket.errors import PartitionError


def split_microbatch_ranges(total_items: int, microbatches: int) -> list[range]:
    """The items of each microbatch: contiguous, the first `remainder` ranges one longer.

    Raises PartitionError, a ValueError, if there are no microbatches or fewer items than microbatches.
    """
    if microbatches < 1:
        raise PartitionError(f"cannot split {total_items} items into {microbatches} microbatches; ask for at least 1")
    if total_items < microbatches:
        raise PartitionError(
            f"cannot split {total_items} items into {microbatches} microbatches: each needs at least one; "
            f"use at most {max(total_items, 1)} microbatches or a larger batch"
        )
    return _even(total_items, microbatches)


def partition_layers(n_layers: int, num_stages: int, costs: Sequence[float] | None = None) -> list[range]:
    """The layers of each stage: contiguous, sizes differing by at most one, longer ones first, none empty."""
    if num_stages < 1:
        raise PartitionError(f"cannot place {n_layers} layers on {num_stages} stages; ask for at least 1 stage")
    if n_layers < num_stages:
        raise PartitionError(
            f"cannot place {n_layers} layers on {num_stages} stages: each stage needs a layer; "
            f"use at most {max(n_layers, 1)} stages or more layers"
        )
    return _even(n_layers, num_stages)


def _even(total: int, parts: int) -> list[range]:
    size, longer = divmod(total, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]
