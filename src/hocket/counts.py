"""Whole numbers given by users: of ranks, stages, microbatches, layers, items."""

from __future__ import annotations

import operator
from typing import Any

from hocket.errors import ConfigError


def whole(name: str, value: Any, error: type[ConfigError] = ConfigError) -> int:
    """`value` as an int: every type of whole number will do, numpy's too, but True and False; else raises `error`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise error(f"{name} must be a whole number, got {value!r:.60}; pass an int") from None


def positive(name: str, value: Any, error: type[ConfigError] = ConfigError) -> int:
    """`whole`, and at least 1."""
    count = whole(name, value, error)
    if count < 1:
        raise error(f"{name} must be at least 1, got {count}; raise {name}")
    return count
