"""Whether a payload may be given to fastavro, which is C and follows the payload without bounds.

- Values within values take the C stack. With a type that refers to itself, 20 KB of payload
  overflow it, and the process ends.
- Values without bytes take time without end: an array says how many nulls it has.
- The digits of a decimal take time in their square: 400 KB take 16 s.

The schema may be a producer's, as long as the broker finds it compatible, also in a field that the
consumer skips. With such types in the schema, each payload is read beforehand in Python, and no
values are made. All other schemas cost nothing: each value takes a byte, and the schema bounds its
depth.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from magnetar.protos.entry import read_varint

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTH_MAX: Final = 256
"""Values within values. fastavro takes some 1.6 KB of the stack for each."""

DECIMAL_BYTES_MAX: Final = 1_024
"""The bytes of a decimal: some 2,400 digits."""

STEPS_FREE: Final = 10_000
STEPS_PER_BYTE: Final = 4
"""Values that are read for a payload, at most: each byte is a value in a union in a record."""

_EMPTY: Final = ("null", "record", "fixed")


@dataclass(slots=True, eq=False)
class _Type:
    kind: str
    parts: list[_Type] = field(default_factory=list)  # fields, branches, or one kind of items
    size: int = 0  # the size of a fixed type
    is_decimal: bool = False


def payload_check(schema: Any) -> Callable[[bytes], None] | None:
    """Return the function that raises ValueError for a payload that must not be decoded with the
    schema, in fastavro's parsed form; None: it is safe with all payloads. Raises ValueError if the
    schema is nested too deep to tell."""
    try:
        root = _Types().of(schema)
        if _is_bounded(root):
            return None
    except RecursionError:
        raise ValueError("the types of the schema are nested too deeply") from None
    return lambda data: _check(data, root)


class _Types:
    def __init__(self) -> None:
        self._named: dict[str, _Type] = {}

    def of(self, tree: Any) -> _Type:
        if isinstance(tree, list):
            return _Type("union", [self.of(branch) for branch in tree])
        if isinstance(tree, str):
            return self._named.get(tree) or _Type(tree)
        kind = tree["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        is_decimal = tree.get("logicalType") == "decimal"
        made = _Type(kind, size=tree.get("size", 0), is_decimal=is_decimal)
        if kind in ("record", "error", "enum", "fixed"):
            self._named[tree["name"]] = made
        match kind:
            case "record" | "error":
                made.kind = "record"
                made.parts = [self.of(it["type"]) for it in tree["fields"]]
            case "array":
                made.parts = [self.of(tree["items"])]
            case "map":
                made.parts = [self.of(tree["values"])]
            case "enum":
                made.kind = "int"
            case _ if kind in self._named and kind != tree.get("name"):
                return self._named[kind]
        return made


def _is_bounded(root: _Type) -> bool:
    """Whether each value takes a byte, none is a decimal, and the schema bounds the depth."""
    depths: dict[int, int] = {}  # 0: being found out

    def depth_of(found: _Type) -> int:
        known = depths.get(id(found))
        if known is None:
            depths[id(found)] = 0
            inner = [depth_of(part) for part in found.parts]
            known = 0 if 0 in inner or _takes_care(found) else 1 + max(inner, default=0)
            depths[id(found)] = known
        return known

    return 0 < depth_of(root) <= DEPTH_MAX


def _takes_care(found: _Type) -> bool:
    """Whether values without bytes, or decimals, are in a value of this type."""
    if found.is_decimal:
        return True
    return found.kind != "union" and any(_is_empty(part) for part in found.parts)


def _is_empty(found: _Type) -> bool:
    return found.kind in _EMPTY and not found.parts and not found.size


def _check(data: bytes, root: _Type) -> None:
    try:
        _read(data, root, STEPS_FREE + STEPS_PER_BYTE * len(data))
    except IndexError:
        raise ValueError("the payload ends within a value") from None


def _read(data: bytes, root: _Type, steps: int) -> None:
    at = 0
    stack = [(root, 1, 0)]  # the type, its depth, and how many items its block has left
    while stack:
        found, depth, left = stack.pop()
        steps -= 1
        if steps < 0 or depth > DEPTH_MAX:
            why = f"deeper than {DEPTH_MAX}" if depth > DEPTH_MAX else "without bytes"
            raise ValueError(f"the payload has too many values {why}")
        match found.kind:
            case "record":
                stack += [(part, depth + 1, 0) for part in reversed(found.parts)]
            case "union":
                branch, at = _long(data, at)
                if not 0 <= branch < len(found.parts):
                    raise ValueError(f"the union has no branch {branch}")
                stack.append((found.parts[branch], depth + 1, 0))
            case "array" | "map":
                if not left:
                    left, at = _block(data, at)
                    if not left:
                        continue
                if found.kind == "map":
                    at = _skip_bytes(data, at)
                stack += [(found, depth, left - 1), (found.parts[0], depth + 1, 0)]
            case _:
                end = _skip_leaf(data, at, found)
                if found.is_decimal and end - at > DECIMAL_BYTES_MAX:
                    raise ValueError(f"a decimal has {end - at} bytes")
                at = end


def _skip_leaf(data: bytes, at: int, found: _Type) -> int:
    match found.kind:
        case "null":
            return at
        case "boolean":
            return at + 1
        case "int" | "long":
            return _long(data, at)[1]
        case "float":
            return at + 4
        case "double":
            return at + 8
        case "fixed":
            return at + found.size
    return _skip_bytes(data, at)


def _skip_bytes(data: bytes, at: int) -> int:
    size, at = _long(data, at)
    if not 0 <= size <= len(data) - at:
        raise ValueError(f"a value of {size} bytes is longer than the payload")
    return at + size


def _block(data: bytes, at: int) -> tuple[int, int]:
    """The number of items in the next block. 0: no block follows."""
    count, at = _long(data, at)
    if count < 0:  # the size of the block in bytes follows
        count = -count
        _, at = _long(data, at)
    return count, at


def _long(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at
