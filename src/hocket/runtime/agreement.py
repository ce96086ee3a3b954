"""How the ranks agree before anything is sent: one small control message a step, and the words behind a refusal.

Each rank says whether its call can work, and what it knows of the batch. If all is well everywhere, all go on; if not,
all raise the same error, which shows what each rank found.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from hocket.errors import ConfigError, HocketError
from hocket.runtime.p2p import Transport

E = TypeVar("E", bound=HocketError)


def agreed(error: E) -> E:
    """`error`, marked as one that all ranks raise alike, so that it does not end the pipeline."""
    error.agreed = True
    return error


def agree(transport: Transport | None, problem: HocketError | None, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's `numbers`, by rank, if no rank has a `problem`; else raises on all ranks what the ranks found.

    Equal for all ranks must be the number of `numbers`. Raises `problem` itself where it arose, and a ConfigError with
    the same text elsewhere.
    """
    if transport is None:
        if problem is not None:
            raise agreed(problem)
        return [list(numbers)]
    rows = transport.gather([problem is not None, *numbers])
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        texts = transport.gather_text("" if problem is None else str(problem))
        if problem is not None:
            raise agreed(problem)
        raise agreed(ConfigError("\n".join(f"on rank {rank}: {texts[rank]}" for rank in failed)))
    return [row[1:] for row in rows]


def agree_on_text(transport: Transport | None, text: str) -> None:
    """Raise ConfigError on all ranks, with the lines that differ, unless every rank gives the same `text`."""
    if transport is None:
        return
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    if len({row[0] for row in transport.gather([digest])}) == 1:
        return
    columns = [rank_text.splitlines() for rank_text in transport.gather_text(text)]
    lines = []
    for facts in zip(*columns, strict=False):
        if len(set(facts)) > 1:
            lines += [f"  rank {rank}: {fact}" for rank, fact in enumerate(facts)]
    raise agreed(
        ConfigError(
            "the ranks do not build the same pipeline; give build_schedule the same arguments on all of them:\n"
            + "\n".join(lines)
        )
    )


def signature(values: Any, shapes_only: Any) -> int:
    """A number for shapes, dtypes and plain values of `values`, and for those of `shapes_only` but its plain values."""
    return hash((_describe(values, True), _describe(shapes_only, False)))


def _describe(value: Any, plain: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.requires_grad)
    kind = type(value)
    if isinstance(value, (tuple, list)):
        return (kind.__qualname__, *[_describe(item, plain) for item in value])
    if kind is dict:
        return tuple([(repr(key), _describe(item, plain)) for key, item in value.items()])
    if value is None or kind in _PLAIN or isinstance(value, enum.Enum):
        # As text: Python gives -1 and -2 one hash.
        return (kind.__qualname__, repr(value) if plain else None)
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return (kind.__qualname__, *[_describe(item, plain) for item in node.flatten_fn(value)[0]])
    return (kind.__qualname__, str(getattr(value, "shape", None)))


_PLAIN = {bool, int, float, complex, str, bytes, torch.dtype, torch.device}
