"""What travels between stages as plain data: a value taken apart into its tensors and their layout, and put together.

layout, tensors = pack((hidden, {"mask": mask, "step": 3}))
layout.to_bytes()                                           # for a receiver that does not know it yet
args, kwargs = as_call(unpack(layout, tensors))             # how the next stage is called
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hocket.runtime import wire
from hocket.runtime.wire import DTYPE_NAMES, MAX_DEPTH, Node, PayloadError, TensorMeta

__all__ = ["Layout", "PayloadError", "TensorMeta", "as_call", "pack", "unpack"]


class Layout:
    """How a value is built from its tensors. Hashable; equal if all is equal but the contents of tensors.

    tensors: the tensors' dtypes and shapes, in the order in which they travel.
    grads: indices of those that require grad, for which gradients come back.
    """

    __slots__ = ("grads", "node", "tensors")

    tensors: tuple[TensorMeta, ...]
    grads: tuple[int, ...]
    node: Node

    def __init__(self, node: Node, tensors: tuple[TensorMeta, ...]):
        self.node = node
        self.tensors = tensors
        self.grads = tuple([index for index, meta in enumerate(tensors) if meta[2]])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.tensors == other.tensors and self.node == other.node

    def __hash__(self) -> int:
        return hash((self.tensors, self.node))

    def __repr__(self) -> str:
        return _describe(self.node, iter(self.tensors))

    def to_bytes(self) -> bytes:
        """Raises PayloadError for what `from_bytes` in another process could not read."""
        return wire.to_bytes(self.node, self.tensors)

    @property
    def gradients(self) -> list[TensorMeta]:
        """What comes back for the message: a gradient for each of its tensors that requires one."""
        return [self.tensors[index] for index in self.grads]

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """The layout that `to_bytes` wrote. Raises PayloadError for any other bytes."""
        return cls(*wire.from_bytes(data))

    def empty(self, device: torch.device | str) -> list[torch.Tensor]:
        """Room for the tensors: contiguous, contents undefined."""
        return [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, _ in self.tensors]


def pack(value: Any) -> tuple[Layout, list[torch.Tensor]]:
    """The layout of `value` and its tensors, the very ones.

    value: a tensor, None, a plain Python value (bool, int, float, complex, str, bytes, an Enum member, torch.dtype,
    torch.device, torch.Size), or any nesting of tuples, lists, dicts, namedtuples and types registered as pytree nodes.

    Raises PayloadError, naming the type and its place in `value`, for anything else.
    """
    tensors: list[torch.Tensor] = []
    try:
        node = _node(value, tensors, 0)
    except _RefusedError as refused:
        raise PayloadError(f"{refused.place} is {refused.what}") from None
    return Layout(node, tuple([TensorMeta(t.dtype, t.shape, t.requires_grad) for t in tensors])), tensors


def unpack(layout: Layout, tensors: Sequence[torch.Tensor]) -> Any:
    """The value again, its containers new. Raises PayloadError if `tensors` are not as many as in `layout`."""
    if len(tensors) != len(layout.tensors):
        raise PayloadError(f"a layout of {len(layout.tensors)} tensors cannot be filled with {len(tensors)}")
    if layout.node == "t":
        return tensors[0]
    return _build(layout.node, iter(tensors))


def as_call(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How what a stage returned arrives at the next one: (positional arguments, keyword arguments).

    A tuple arrives as positional arguments and a dict with names as keys as keyword arguments; anything else, also a
    list, a namedtuple or a registered type, as one positional argument.
    """
    kind = type(value)
    if kind is tuple:
        return value, {}
    if (kind is dict or kind is OrderedDict) and all(type(key) is str for key in value):
        return (), dict(value)
    return (value,), {}


# --- taking apart -----------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """A value cannot travel; each container on the way out adds the key under which it holds it."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    @property
    def place(self) -> str:
        return "value" + "".join(reversed(self.path)) if len(self.path) < MAX_DEPTH else "value[...]"


def _node(value: Any, tensors: list[torch.Tensor], depth: int) -> Node:
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES or value.is_nested or value.is_meta:
            raise _RefusedError(_why_no_tensor(value))
        tensors.append(value)
        return "t"
    if value is None:
        return None
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar(value)
    if depth >= MAX_DEPTH:
        raise _RefusedError(f"nested more than {MAX_DEPTH} deep; does it contain itself?")
    if kind is tuple:
        return "tuple", _children(value, tensors, depth)
    if kind is list:
        return "list", _children(value, tensors, depth)
    if kind is dict:
        return "dict", _keys(value), _children(value.values(), tensors, depth, value)
    return _rare_node(value, kind, tensors, depth)


def _children(
    values: Iterable[Any], tensors: list[torch.Tensor], depth: int, keys: Iterable[Any] | None = None
) -> tuple[Node, ...]:
    nodes: list[Node] = []
    try:
        for value in values:
            nodes.append(_node(value, tensors, depth + 1))
    except _RefusedError as refused:
        refused.path.append(f"[{(len(nodes) if keys is None else list(keys)[len(nodes)])!r:.80}]")
        raise
    return tuple(nodes)


def _keys(mapping: dict[Any, Any]) -> tuple[Node, ...]:
    return tuple([("str", key) if type(key) is str else _key(key) for key in mapping])


def _key(key: Any) -> Node:
    try:
        node = _node(key, [], MAX_DEPTH - 8)
    except _RefusedError as refused:
        raise _RefusedError(f"a dict with a {type(key).__qualname__} as key: {refused.what}") from None
    if not wire.is_key(node):
        raise _RefusedError(f"a dict with a {type(key).__qualname__} as key; use plain Python values")
    return node


def _rare_node(value: Any, kind: type, tensors: list[torch.Tensor], depth: int) -> Node:
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        children, context = registered.flatten_fn(value)
        nodes = _children(children, tensors, depth, _child_names(value, len(children)))
        return "tree", kind, *_context(kind, context, depth), nodes
    if _pytree.is_namedtuple_class(kind):
        return "named", kind, _children(value, tensors, depth, value._fields)
    if isinstance(value, enum.Enum):
        flag = isinstance(value, enum.Flag)
        return "enum", kind, ("int", value.value) if flag else ("str", value.name)
    raise _RefusedError(_why_not(value, kind))


def _child_names(value: Any, count: int) -> list[Any]:
    """Names of the children of a registered type, for messages."""
    keys = list(value) if isinstance(value, dict) else range(count)
    return list(keys) if len(keys) == count else list(range(count))


def _context(kind: type, context: Any, depth: int) -> tuple[Node, bool]:
    """What a registered type keeps beside its children, and whether it went through the type's own conversion."""
    try:
        return _plain(context, depth + 1), False
    except _RefusedError as refused:
        serial = _pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
        if serial is None or serial.to_dumpable_context is None or kind is defaultdict:
            raise _RefusedError(
                f"a {kind.__qualname__}, whose pytree context holds {refused.what}; let flatten_fn return a context of "
                "plain values, or register it with to_dumpable_context and from_dumpable_context"
            ) from None
        return _plain(serial.to_dumpable_context(context), depth + 1), True


def _plain(value: Any, depth: int) -> Node:
    """The node of a value without tensors; classes are allowed here."""
    if isinstance(value, type):
        return "class", value
    if type(value) in (tuple, list) and depth < MAX_DEPTH:
        return type(value).__name__, tuple([_plain(item, depth + 1) for item in value])
    found: list[torch.Tensor] = []
    node = _node(value, found, depth)
    if found:
        raise _RefusedError("a tensor")
    return node


_SCALARS: dict[type, Callable[[Any], Node]] = {
    bool: lambda value: ("bool", value),
    int: lambda value: ("int", value),
    # As text, so that nan equals nan and 0.0 differs from -0.0.
    float: lambda value: ("float", value.hex()),
    complex: lambda value: ("complex", (value.real.hex(), value.imag.hex())),
    str: lambda value: ("str", value),
    bytes: lambda value: ("bytes", value),
    torch.dtype: lambda value: ("dtype", value) if value in DTYPE_NAMES else _refuse_dtype(value),
    torch.device: lambda value: ("device", str(value)),
    torch.Size: lambda value: ("size", tuple(value)),
}


# --- putting together -------------------------------------------------------------------------------------------------


def _build(node: Node, tensors: Iterator[torch.Tensor]) -> Any:
    if node is None:
        return None
    kind = node[0]
    if kind == "tuple":
        return tuple([next(tensors) if child == "t" else _build(child, tensors) for child in node[1]])
    if kind == "list":
        return [next(tensors) if child == "t" else _build(child, tensors) for child in node[1]]
    if kind == "dict":
        return {_build(key, tensors): _build(child, tensors) for key, child in zip(node[1], node[2], strict=True)}
    if node == "t":
        return next(tensors)
    return _BUILDERS[kind](node, tensors)


def _build_tree(node: Node, tensors: Iterator[torch.Tensor]) -> Any:
    _, kind, context, dumped, children = node
    built = [_build(child, tensors) for child in children]
    try:
        value = _build(context, tensors)
        if dumped:
            load = _pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
            assert load is not None
            value = load(value)
        return _pytree.SUPPORTED_NODES[kind].unflatten_fn(built, value)
    except Exception as error:
        raise PayloadError(
            f"a {kind.__module__}.{kind.__qualname__} could not be put together again by the unflatten function it was "
            f"registered with: {type(error).__name__}: {error}"
        ) from error


def _build_enum(node: Node, tensors: Iterator[torch.Tensor]) -> Any:
    _, cls, (kind, key) = node
    return cls[key] if kind == "str" else cls(key)


_BUILDERS: dict[str, Callable[[Node, Iterator[torch.Tensor]], Any]] = {
    **{kind: lambda node, _: node[1] for kind in ("bool", "int", "str", "bytes", "dtype", "class")},
    "float": lambda node, _: float.fromhex(node[1]),
    "complex": lambda node, _: complex(*map(float.fromhex, node[1])),
    "device": lambda node, _: torch.device(node[1]),
    "size": lambda node, _: torch.Size(node[1]),
    "enum": _build_enum,
    "named": lambda node, tensors: node[1](*[_build(child, tensors) for child in node[2]]),
    "tree": _build_tree,
}


# --- words ------------------------------------------------------------------------------------------------------------


def _refuse_dtype(dtype: torch.dtype) -> Node:
    raise _RefusedError(f"the quantized {dtype}, which cannot travel between stages")


def _why_no_tensor(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor, which cannot travel between stages; send its values and offsets, or a padded tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}, which cannot travel between stages; call .to_dense() on it"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no data to send; move the stage to a real device"
    return f"a tensor of {tensor.dtype}, which cannot travel between stages; call .dequantize() on it"


def _why_not(value: Any, kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.Tensor):
        remedy = ".to_local()" if hasattr(value, "to_local") else ".as_subclass(torch.Tensor)"
        return (
            f"a {name}, a tensor subclass, which would arrive as a plain tensor; return one, for instance by {remedy}"
        )
    if dataclasses.is_dataclass(kind):
        how = f"register it on all ranks: torch.utils._pytree.register_dataclass({kind.__name__})"
    elif kind.__module__ == "numpy":
        how = "convert it, with torch.from_numpy or .item()"
    elif kind in (set, frozenset):
        how = "return a tuple or a list"
    else:
        how = "return tensors and plain values in tuples, lists or dicts, or register it with register_pytree_node"
    return f"a {name}, which cannot travel between stages; {how}"


def _describe(node: Node, tensors: Iterator[TensorMeta]) -> str:
    if node is None:
        return "None"
    if node == "t":
        dtype, shape, grad = next(tensors)
        return f"{DTYPE_NAMES[dtype]}{list(shape)}{' grad' if grad else ''}"
    kind, *rest = node
    if kind not in ("tuple", "list", "dict", "named", "tree"):
        return f"{_build(node, iter(()))!r:.80}"
    parts = [_describe(child, tensors) for child in rest[-1]]
    if kind == "list":
        return f"[{', '.join(parts)}]"
    if kind == "tuple":
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if kind == "dict":
        return f"{{{', '.join(f'{_describe(k, tensors)}: {p}' for k, p in zip(rest[0], parts, strict=True))}}}"
    return f"{rest[0].__qualname__}({', '.join(parts)})"
