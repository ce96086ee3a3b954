"""A layout as bytes and back: a fixed format without pickle, checked to the last byte.

    b"HKT1"  length of the rest, 4 bytes, little-endian  JSON: [node, [[dtype, shape, requires_grad], ...]]

A node says how a value is built. In Python it is a hashable tuple led by its kind, in JSON a list:

    "t"                               the next tensor              None                   None
    ("bool" | "int" | "float" | "complex" | "str" | "bytes" | "dtype" | "device" | "size", value)
    ("class", class)                  ("enum", class, member)
    ("tuple" | "list", children)      ("dict", keys, children)     ("named", class, children)
    ("tree", class, context, dumped, children)

Classes travel by name and are looked up among what is already imported; nothing is imported to read bytes.
"""

from __future__ import annotations

import enum
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from hocket.errors import ConfigError

Node = Any
"""None, "t", or a hashable tuple led by its kind."""

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_DIMS = 64

_MAGIC = b"HKT1"
_LARGEST = 2**63 - 1

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype)
}
"""All dtypes by name but the quantized ones, whose tensors have scales besides."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PayloadError(ConfigError):
    """A value cannot travel between stages, or bytes do not describe one."""


class TensorMeta(NamedTuple):
    """What a receiver must know of a tensor to make room for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


def to_bytes(node: Node, tensors: Sequence[TensorMeta]) -> bytes:
    """Raises PayloadError for a class that another process could not find by its name, and beyond `MAX_BYTES`."""
    metas = [[DTYPE_NAMES[dtype], list(shape), grad] for dtype, shape, grad in tensors]
    body = json.dumps([_dump(node), metas], separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise PayloadError(
            f"the structure that travels between two stages takes {len(body)} bytes, more than {MAX_BYTES}; put long "
            "strings, bytes and lists of numbers into tensors"
        )
    return _MAGIC + len(body).to_bytes(4, "little") + body


def from_bytes(data: bytes) -> tuple[Node, tuple[TensorMeta, ...]]:
    """Raises PayloadError for anything that `to_bytes` does not make; bounded in time and memory by len(data)."""
    if len(data) < 8 or data[:4] != _MAGIC:
        raise PayloadError(f"{len(data)} bytes are no layout: they begin with {data[:4]!r}, not {_MAGIC!r}")
    length = int.from_bytes(data[4:8], "little")
    if length != len(data) - 8 or length > MAX_BYTES:
        raise PayloadError(f"a layout of {length} bytes (at most {MAX_BYTES}) came with {len(data) - 8}")
    try:
        node, metas = json.loads(data[8:])
        tensors = tuple(_load_meta(*meta) for meta in metas)
        kinds = Counter[str]()
        built = _load(node, 0, kinds)
    except PayloadError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise PayloadError(f"{len(data)} bytes are no layout: {type(error).__name__}: {error}"[:500]) from error
    if kinds["t"] != len(tensors):
        raise PayloadError(f"a layout places {kinds['t']} tensors but describes {len(tensors)}")
    return built, tensors


# --- classes ----------------------------------------------------------------------------------------------------------


def _find_class(module: str, qualname: str) -> type:
    """The class of that name among imported modules, or else among the types registered as pytree nodes."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type):
        return found
    for cls in reversed(list(_pytree.SUPPORTED_NODES)):
        if isinstance(cls, type) and (cls.__module__, cls.__qualname__) == (module, qualname):
            return cls
    raise PayloadError(
        f"class {module}.{qualname} is not known in this process; define it at the top of a module that all ranks "
        "import, or register it as a pytree node on all of them"
    )


def _dump_class(cls: type) -> list[str]:
    name = [cls.__module__, cls.__qualname__]
    try:
        found = _find_class(*name)
    except PayloadError:
        found = None
    if found is not cls:
        raise PayloadError(
            f"class {'.'.join(name)} cannot be found by its name, so it cannot travel between stages; define it at "
            "the top of a module, or register it as a pytree node"
        )
    return name


# --- nodes to JSON ----------------------------------------------------------------------------------------------------


def _dump(node: Node) -> Any:
    if node is None or node == "t":
        return node
    kind, *rest = node
    match kind:
        case "tuple" | "list":
            return [kind, _dump_all(rest[0])]
        case "dict":
            return [kind, _dump_all(rest[0]), _dump_all(rest[1])]
        case "named":
            return [kind, _dump_class(rest[0]), _dump_all(rest[1])]
        case "tree":
            return [kind, _dump_class(rest[0]), _dump(rest[1]), rest[2], _dump_all(rest[3])]
        case "class":
            return [kind, _dump_class(rest[0])]
        case "enum":
            return [kind, _dump_class(rest[0]), _dump(rest[1])]
    return [kind, _SCALARS[kind].dump(rest[0])]


def _dump_all(nodes: Sequence[Node]) -> list[Any]:
    return [_dump(node) for node in nodes]


class _Scalar(NamedTuple):
    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PayloadError(f"a layout has {type(value).__name__} {value!r:.50} in the place of a {kind.__name__}")
    return value


def _same(kind: type) -> _Scalar:
    return _Scalar(lambda value: value, lambda value: _expect(value, kind))


_SCALARS: dict[str, _Scalar] = {
    "bool": _same(bool),
    "int": _Scalar(hex, lambda text: int(_expect(text, str), 16)),
    "float": _same(str),  # float.hex already: see payload
    "complex": _Scalar(list, lambda parts: tuple(_expect(part, str) for part in _expect(parts, list))),
    "str": _same(str),
    "bytes": _Scalar(bytes.hex, bytes.fromhex),
    "dtype": _Scalar(DTYPE_NAMES.__getitem__, DTYPES.__getitem__),
    "device": _same(str),
    "size": _Scalar(list, lambda numbers: tuple(_size(n) for n in _expect(numbers, list))),
}


# --- JSON to nodes ----------------------------------------------------------------------------------------------------


def _load(value: Any, depth: int, kinds: Counter[str]) -> Node:
    if value is None:
        return None
    if value == "t":
        kinds["t"] += 1
        return "t"
    if depth > MAX_DEPTH:
        raise PayloadError(f"a layout is nested more than {MAX_DEPTH} deep")
    kind, *rest = _expect(value, list)
    match kind, rest:
        case (("tuple" | "list"), [children]):
            return kind, _load_all(children, depth, kinds)
        case "dict", [keys, children]:
            return _checked_dict(_load_all(keys, depth, Counter()), _load_all(children, depth, kinds))
        case "named", [name, children]:
            return kind, _namedtuple_class(name, len(children)), _load_all(children, depth, kinds)
        case "tree", [name, context, dumped, children]:
            tree = _tree_class(name, _expect(dumped, bool))
            return kind, tree, _load(context, depth + 1, kinds), dumped, _load_all(children, depth, kinds)
        case "class", [name]:
            return kind, _find_class(*map(_text, name))
        case "enum", [name, member]:
            return _checked_enum(_find_class(*map(_text, name)), _load(member, depth + 1, kinds))
        case str(), [scalar]:
            return _checked_scalar(kind, _SCALARS[kind].load(scalar))
    raise PayloadError(f"a layout has a node that is none: {value!r:.80}")


def _load_all(values: Any, depth: int, kinds: Counter[str]) -> tuple[Node, ...]:
    return tuple([_load(value, depth + 1, kinds) for value in _expect(values, list)])


def _text(value: Any) -> str:
    return _expect(value, str)


def _size(value: Any) -> int:
    if not 0 <= _expect(value, int) <= _LARGEST:
        raise PayloadError(f"a layout has the size {value}")
    return value


def _load_meta(name: str, shape: Any, grad: bool) -> TensorMeta:
    dtype = DTYPES[name]
    sizes = torch.Size([_size(n) for n in _expect(shape, list)])
    if len(sizes) > MAX_DIMS or math.prod(max(n, 1) for n in sizes) * dtype.itemsize > _LARGEST:
        raise PayloadError(f"a layout describes a tensor that cannot be, of shape {list(sizes)!s:.80} and {dtype}")
    if _expect(grad, bool) and not (dtype.is_floating_point or dtype.is_complex):
        raise PayloadError(f"a layout describes a tensor of {dtype} that requires grad")
    return TensorMeta(dtype, sizes, grad)


def _checked_dict(keys: tuple[Node, ...], children: tuple[Node, ...]) -> Node:
    if len(keys) != len(children) or len(set(keys)) != len(keys) or not all(map(is_key, keys)):
        raise PayloadError(f"a layout has a dict of {len(children)} values with the keys {keys!s:.80}")
    return "dict", keys, children


def is_key(node: Node) -> bool:
    if node is None:
        return True
    return node != "t" and (
        node[0] in _SCALARS or node[0] == "enum" or (node[0] == "tuple" and all(map(is_key, node[1])))
    )


def _namedtuple_class(name: Any, count: int) -> type:
    cls = _find_class(*map(_text, name))
    if not _pytree.is_namedtuple_class(cls) or len(cls._fields) != count:  # type: ignore[attr-defined]
        raise PayloadError(f"{cls.__qualname__} is no namedtuple of {count} fields")
    return cls


def _tree_class(name: Any, dumped: bool) -> type:
    cls = _find_class(*map(_text, name))
    if dumped and cls is defaultdict:
        raise PayloadError("a layout has a defaultdict whose factory is to be imported")  # by torch's own conversion
    if cls not in _pytree.SUPPORTED_NODES:
        raise PayloadError(f"{cls.__module__}.{cls.__qualname__} is not registered as a pytree node in this process")
    return cls


def _checked_enum(cls: type, member: Node) -> Node:
    if not issubclass(cls, enum.Enum) or member is None or member == "t":
        raise PayloadError(f"{cls.__qualname__} is no Enum with the member {member}")
    kind, key = member
    if kind == "str" and key not in cls.__members__:
        raise PayloadError(f"{cls.__qualname__} has no member {key!r:.80}")
    if kind != "str" and not (kind == "int" and issubclass(cls, enum.Flag)):
        raise PayloadError(f"{cls.__qualname__} has no member {key!r:.80}")
    return "enum", cls, member


def _checked_scalar(kind: str, value: Any) -> Node:
    """The node of a value; refuses texts that do not stand for one."""
    if kind == "float" and float.fromhex(value).hex() != value:
        raise PayloadError(f"a layout has {value!r:.50} in the place of a float")
    if kind == "complex" and (len(value) != 2 or [float.fromhex(part).hex() for part in value] != list(value)):
        raise PayloadError(f"a layout has {value!r:.50} in the place of a complex number")
    if kind == "device":
        torch.device(value)
    return kind, value
