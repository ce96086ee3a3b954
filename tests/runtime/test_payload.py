"""Payloads: any value a stage may return survives the way to the next; anything else is refused by name."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils import _pytree

from hocket.errors import ConfigError
from hocket.runtime import wire
from hocket.runtime.payload import Layout, PayloadError, TensorMeta, as_call, pack, unpack
from runtime.payload_values import Color, Level, Parts, Point, values


@dataclass
class Registered:
    hidden: Any
    mask: Any = None


@dataclass
class Unregistered:
    hidden: Any


class Odd:
    """Registered with a context that needs the type's own conversion."""

    def __init__(self, value: Any, note: frozenset[str]):
        self.value, self.note = value, note


class Broken:
    """Registered with an unflatten function that fails."""


_pytree.register_dataclass(Registered)
_pytree.register_pytree_node(
    Odd,
    lambda odd: ([odd.value], odd.note),
    lambda values, note: Odd(*values, note),
    serialized_type_name="test.Odd",
    to_dumpable_context=sorted,
    from_dumpable_context=frozenset,
)
_pytree.register_pytree_node(Broken, lambda _: ([], None), lambda values, _: 1 / 0)

X = torch.arange(6.0).view(2, 3)
G = torch.ones(4, requires_grad=True)


def through(value: Any) -> Any:
    """`value` as it arrives in another process."""
    layout, tensors = pack(value)
    arrived = Layout.from_bytes(layout.to_bytes())
    assert arrived == layout and hash(arrived) == hash(layout)
    return unpack(arrived, [t.detach().clone() for t in tensors])


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b) or (a.isnan() & b.isnan()).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    return a == b


@pytest.mark.parametrize(
    "value",
    [
        X,
        None,
        (),
        [],
        {},
        (X, G, None),
        [X, [G, (X,)]],
        {"a": X, "b": {"c": None, 1: X, (2, "d"): 1.5, None: 0, Color.RED: X, False: 2}},
        Point(X, Point(1, None)),
        OrderedDict(b=X, a=G),
        defaultdict(list, {"k": X}),
        deque([X, 1], maxlen=3),
        (True, 1, 1.0, -0.0, math.inf, -math.inf, math.nan, 2**200, -(2**200), 1 + 2j, complex(math.nan, -0.0)),
        ("", "t", "\0", "ü", "\ud800", "a" * 5000, b"", b"\0\xff"),
        (Color.RED, Color.BLUE, Level.LOW, Parts.A, Parts.A | Parts.B, Parts(0)),
        (torch.float32, torch.complex32, torch.bool, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 0])),
        torch.max(X, 0),
    ],
    ids=repr,
)
def test_values_survive(value: Any) -> None:
    assert same(through(value), value)


def test_registered_types_survive() -> None:
    got = through({"r": Registered(X, None), "o": Odd(X, frozenset({"b", "a"}))})
    assert type(got["r"]) is Registered and same(got["r"].hidden, X) and got["r"].mask is None
    assert type(got["o"]) is Odd and same(got["o"].value, X) and got["o"].note == frozenset({"a", "b"})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", list(wire.DTYPES.values()), ids=list(wire.DTYPES))
def test_every_dtype_has_a_layout(dtype: torch.dtype) -> None:
    layout, _ = pack(torch.empty(2, 3, dtype=dtype))
    assert Layout.from_bytes(layout.to_bytes()).tensors == (TensorMeta(dtype, (2, 3), False),)


def test_tensors_are_the_very_ones_and_grads_are_listed() -> None:
    parameter = nn.Parameter(X.clone())
    layout, tensors = pack({"a": X, "b": [G, parameter], "c": X.t()})
    assert [t is u for t, u in zip(tensors, [X, G, parameter], strict=False)] == [True] * 3
    assert layout.grads == (1, 2)
    assert layout.tensors[3].shape == (3, 2) and tensors[3].data_ptr() == X.data_ptr()


def test_containers_come_new_each_time() -> None:
    layout, tensors = pack([{"a": X}, []])
    first, second = unpack(layout, tensors), unpack(layout, tensors)
    first[0]["b"] = 1
    first[1].append(1)
    assert same(second, [{"a": X}, []])


def test_a_tensor_twice_is_two_tensors() -> None:
    layout, tensors = pack((X, X))
    assert len(layout.tensors) == len(tensors) == 2


def test_empty_makes_contiguous_room_for_each_tensor() -> None:
    layout, _ = pack((X.t(), torch.ones(3, dtype=torch.bool), torch.tensor(1j), torch.empty(0, 4)))
    assert [(t.shape, t.dtype, t.is_contiguous()) for t in layout.empty("cpu")] == [
        ((3, 2), torch.float32, True),
        ((3,), torch.bool, True),
        ((), torch.complex64, True),
        ((0, 4), torch.float32, True),
    ]


@pytest.mark.parametrize(
    "a, b",
    [
        (X, X.double()),
        (X, X.t()),
        (G, G.detach()),
        (X, (X,)),
        ((X,), [X]),
        ({"a": X}, {"b": X}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (None, ()),
        (Point(1, 2), (1, 2)),
        ("t", X),
    ],
    ids=repr,
)
def test_layouts_differ(a: Any, b: Any) -> None:
    assert pack(a)[0] != pack(b)[0]


def test_layouts_equal_whatever_the_contents() -> None:
    a, b = pack((X, math.nan, {"k": G}))[0], pack((X + 1, math.nan, {"k": G * 2}))[0]
    assert a == b and hash(a) == hash(b) and a != "something else"


def test_layouts_say_what_they_are() -> None:
    text = repr(pack((G, {"m": X > 0, "n": None}, [1, "s"], Point(X, ()), (X,)))[0])
    assert (
        text == "(float32[4] grad, {'m': bool[2, 3], 'n': None}, [1, 's'], Point(float32[2, 3], ()), (float32[2, 3],))"
    )


# --- refused ----------------------------------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    value: Any = X
    for _ in range(levels):
        value = [value]
    return value


def local_class() -> Any:
    return namedtuple("Local", "a")(X)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "value, words",
    [
        ({1, 2}, ["value is a set", "tuple or a list"]),
        ((X, {"a": [None, object()]}), ["value[1]['a'][1]", "object", "register_pytree_node"]),
        ({"r": Unregistered(X)}, ["value['r']", "Unregistered", "register_dataclass(Unregistered)"]),
        (Point(X, Unregistered(X)), ["value['y']", "register_dataclass"]),
        (Registered({"k": {1}}), ["value[0]['k']", "set"]),
        (OrderedDict(a={1}), ["value['a']", "set"]),
        ((X, np.ones(3)), ["value[1]", "numpy.ndarray", "from_numpy"]),
        ({"f": np.float64(1.0)}, ["value['f']", "numpy.float64", ".item()"]),
        (lambda: None, ["function"]),
        ([X.to_sparse()], ["value[0]", "sparse_coo", ".to_dense()"]),
        (torch.qint8, ["qint8"]),
        (torch.empty(2, device="meta"), ["meta device"]),
        (nn.parameter.UninitializedParameter(), ["UninitializedParameter"]),
        ({frozenset({1}): X}, ["a dict with a frozenset as key"]),
        ({(1, frozenset()): X}, ["a dict with a tuple as key"]),
        (defaultdict(lambda: 0, a=X), ["defaultdict", "context"]),
        (deep(70), ["64 deep"]),
        (LOOP, ["64 deep", "contain itself"]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_refused_by_name_and_place(value: Any, words: list[str]) -> None:
    with pytest.raises(PayloadError) as caught:
        pack(value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_with_more_than_their_data_are_refused() -> None:
    for tensor, words in (
        (torch.nested.nested_tensor([X[0], X[1]]), "nested tensor"),
        (torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), "NestedTensor, a tensor subclass"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), r"qint8.*\.dequantize"),
    ):
        with pytest.raises(PayloadError, match=words):
            pack([tensor])


def test_what_would_not_be_found_elsewhere_is_refused_by_the_sender() -> None:
    layout, tensors = pack((local_class(), X))
    assert same(unpack(layout, tensors)[1], X)
    with pytest.raises(PayloadError, match=r"local_class\.<locals>\.Local|test_payload\.Local"):
        layout.to_bytes()


def test_a_class_unknown_to_the_receiver_is_refused_there_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(Point(X, 1))[0].to_bytes()
    monkeypatch.delattr(sys.modules[Point.__module__], "Point")
    with pytest.raises(PayloadError, match=r"\.Point is not known in this process.*top of a module"):
        Layout.from_bytes(data)


def test_too_much_beside_tensors_is_refused() -> None:
    with pytest.raises(PayloadError, match="put long strings, bytes and lists"):
        pack((X, b"\0" * wire.MAX_BYTES))[0].to_bytes()


def test_a_type_that_cannot_be_put_together_is_named() -> None:
    layout, tensors = pack(Broken())
    with pytest.raises(PayloadError, match=r"Broken could not be put together.*ZeroDivisionError"):
        unpack(layout, tensors)


def test_wrong_number_of_tensors() -> None:
    with pytest.raises(PayloadError, match="2 tensors cannot be filled with 1"):
        unpack(pack((X, X))[0], [X])


def test_payload_errors_are_config_errors() -> None:
    assert issubclass(PayloadError, ConfigError) and issubclass(PayloadError, ValueError)


# --- the call of the next stage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, call",
    [
        (X, ((X,), {})),
        (None, ((None,), {})),
        ((X, None), ((X, None), {})),
        ((), ((), {})),
        ({"a": X}, ((), {"a": X})),
        (OrderedDict(a=X), ((), {"a": X})),
        ({}, ((), {})),
        ({1: X}, (({1: X},), {})),
        ([X, X], (([X, X],), {})),
        (Point(X, 1), ((Point(X, 1),), {})),
        (((X,), {"a": 1}), (((X,), {"a": 1}), {})),
    ],
    ids=repr,
)
def test_how_a_value_arrives(value: Any, call: Any) -> None:
    assert same(as_call(value), call)


# --- random values ----------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(values)
def test_random_values_survive(value: Any) -> None:
    assert same(through(value), value)
