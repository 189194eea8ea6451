"""Checks a payload before fastavro decodes it. fastavro is C code and has no limits of its own.

- Nested values take the C stack. With a recursive type, 20 KB of payload overflow the stack, and
  the process ends.
- Values without bytes take unlimited time: an array states how many nulls it has.
- The time for a decimal grows with the square of its digits: 400 KB take 16 s.

The schema may come from a producer, if the broker finds it compatible. A type that allows such
values may even be in a field that the consumer skips. If the schema has such a type, the check
reads each payload in Python first, without creating values. For all other schemas no check is
necessary, because each value takes a byte, and the schema bounds the depth.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from magnetar.protos.entry import read_varint

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTH_MAX: Final = 256
"""The maximum depth of nested values. fastavro takes some 1.6 KB of the stack for each level."""

DECIMAL_BYTES_MAX: Final = 1_024
"""The maximum of bytes of a decimal: some 2,400 digits."""

STEPS_FREE: Final = 10_000
STEPS_PER_BYTE: Final = 4
"""The maximum of values that the check reads: STEPS_FREE, plus STEPS_PER_BYTE for each byte of the
payload. One byte can take several steps, for example: a record, a union in the record, and a null
in the union."""

_EMPTY: Final = ("null", "record", "fixed")


@dataclass(slots=True, eq=False)
class _Type:
    kind: str
    parts: list[_Type] = field(default_factory=list)  # fields, branches, or one kind of items
    size: int = 0  # the size of a fixed type
    is_decimal: bool = False


def payload_check(schema: Any) -> Callable[[bytes], None] | None:
    """Return a function that raises ValueError for a payload that is not safe to decode.

    None: all payloads are safe. `schema`: the schema in fastavro's parsed form. Raises ValueError
    if the schema is nested too deeply for the decision.
    """
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
    """Return whether each value takes a byte and is no decimal, and the schema bounds the depth."""
    depths: dict[int, int] = {}  # id of a type -> depth; 0: unbounded, or not known yet

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
    """Return whether a value of this type is a decimal or contains values without bytes."""
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
    stack = [(root, 1, 0)]  # the type, its depth, and the number of items left in its block
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
    """Return the number of items in the next block, and where they begin. 0: no block."""
    count, at = _long(data, at)
    if count < 0:  # the size of the block in bytes follows
        count = -count
        _, at = _long(data, at)
    return count, at


def _long(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at
