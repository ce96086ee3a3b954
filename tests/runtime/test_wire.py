"""Layouts as bytes: damaged, random and hostile ones are refused, in bounded time and memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.runtime.payload import Layout, PayloadError, pack
from runtime.payload_values import Color, values


@settings(max_examples=120, deadline=None)
@given(values, st.data())
def test_damaged_bytes_are_refused_or_read_as_another_layout(value: Any, data: st.DataObject) -> None:
    raw = bytearray(pack(value)[0].to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for damaged in (bytes(raw), cut, bytes(raw) + b"x"):
        read_or_refuse(damaged)


def read_or_refuse(data: bytes) -> None:
    try:
        layout = Layout.from_bytes(data)
    except PayloadError:
        return
    assert Layout.from_bytes(layout.to_bytes()) == layout
    repr(layout)


def framed(body: bytes) -> bytes:
    return b"HKT1" + len(body).to_bytes(4, "little") + body


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        Layout.from_bytes(data)
    read_or_refuse(framed(data))


KINDS = ["t", "tuple", "list", "dict", "named", "tree", "class", "enum", "int", "float", "size", "device", "dtype"]
WORDS = [
    "bytes",
    "complex",
    "bool",
    "0x1",
    "nan",
    "cpu",
    "float32",
    "Point",
    "Color",
    "RED",
    "builtins",
    "os",
    "system",
]
words = st.sampled_from([*KINDS, *WORDS, Color.__module__])
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(words, inner, max_size=2),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None)
@given(jsons, st.lists(st.tuples(words, st.lists(st.integers(), max_size=3), st.booleans()), max_size=2) | jsons)
def test_random_json_is_refused_or_read(node: Any, metas: Any) -> None:
    read_or_refuse(framed(json.dumps([node, metas]).encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'[["list",[' * 100_000,
        json.dumps([["int", "0x" + "f" * 100_000], [["float32", [2**70], False]]]).encode(),
        json.dumps(["t", [["float32", [2**40, 2**40], False]]]).encode(),
        json.dumps(["t", [["float32", [1] * 65, False]]]).encode(),
        json.dumps(["t", [["float32", [-1], False]]]).encode(),
        json.dumps(["t", [["float32", [True], False]]]).encode(),
        json.dumps(["t", [["int64", [1], True]]]).encode(),
        json.dumps(["t", []]).encode(),
        json.dumps([None, [["float32", [1], False]]]).encode(),
        json.dumps([["dict", [["str", "a"]], []], []]).encode(),
        json.dumps([["dict", [["list", []]], [None]], []]).encode(),
        json.dumps([["dict", [["str", "a"], ["str", "a"]], [None, None]], []]).encode(),
        json.dumps([["named", ["builtins", "tuple"], []], []]).encode(),
        json.dumps([["tree", ["builtins", "object"], None, False, []], []]).encode(),
        json.dumps([["enum", ["builtins", "int"], ["int", "0x1"]], []]).encode(),
        json.dumps([["enum", [Color.__module__, "Color"], ["str", "GREEN"]], []]).encode(),
        json.dumps([["enum", [Color.__module__, "Color"], ["int", "0x1"]], []]).encode(),
        json.dumps([["float", "1.5"], []]).encode(),
        json.dumps([["device", "toaster"], []]).encode(),
        json.dumps([["class", ["os", "system"]], []]).encode(),
        b"9" * 100_000,
        b'{"a": 1}',
        b"null",
        b"[1, 2, 3]",
        b"\xff\xfe",
    ],
    ids=lambda body: body[:60].decode(errors="replace"),
)
def test_hostile_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(PayloadError):
        Layout.from_bytes(framed(body))


def test_a_length_that_lies_is_refused() -> None:
    with pytest.raises(PayloadError, match="4294967295"):
        Layout.from_bytes(b"HKT1\xff\xff\xff\xff[]")
