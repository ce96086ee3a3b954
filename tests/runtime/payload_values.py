"""Random values that can travel between stages, and types for them."""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Parts(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(max_size=20)
    | st.sampled_from([Color.RED, Level.LOW, Parts.A | Parts.B, torch.float32, torch.device("cpu"), torch.Size([3])])
)  # fmt: skip
shapes = st.lists(st.integers(0, 3), max_size=4)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    shapes,
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]),
)
keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=5) | st.tuples(st.text(), st.integers())
)
values = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)
