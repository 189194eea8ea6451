"""Checks a payload before fastavro decodes it. fastavro is C code and has no limits of its own.

- Nested values take the C stack. With a recursive type, 20 KB of payload overflow the stack, and
  the process ends.
- Values without bytes take unlimited time: an array states how many nulls it has.
- The time for a decimal grows with the square of its digits: 400 KB take 16 s.
- fastavro does not notice the end of the payload while it skips values of a fixed size, such as
  floats in a field that the reader's schema lacks. An array states how many floats it has.

The schema may come from a producer, if the broker finds it compatible. A type that allows such
values may even be in a field that the consumer skips. If the schema has such a type, the check
reads each payload in Python first, without creating values. For all other schemas no check is
necessary: each value takes a byte, fastavro notices the end of the payload when it reads this byte,
and the schema bounds the depth. fastavro itself reaches DEPTH_MAX with a stack of less than 512 KB.

The check takes a few steps for each byte. It counts values without bytes, but does not read them.
A chain of nested records takes one step if the next record is each record's only field with bytes.
A block of an array takes one step if all items have the same fixed size.

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
"""The maximum size of a decimal in bytes: some 2,400 digits."""

EMPTY_FREE: Final = 10_000
EMPTY_PER_BYTE: Final = 4
EMPTY_PER_BYTE_MAX: Final = 64
"""The maximum number of values without bytes is EMPTY_FREE plus a number for each byte of the
payload. This number is EMPTY_PER_BYTE plus the schema's `_Types.empty_fields`, but at most
EMPTY_PER_BYTE_MAX. Valid payloads can exceed the maximum if they hold arrays of nulls, or if the
schema's `empty_fields` is above 60."""


BLIND_MAX: Final = 10_000
"""The maximum number of values of a fixed size in a record that may be skipped without a check."""

_FIXED_SIZES: Final = {"boolean": 1, "float": 4, "double": 8}


@dataclass(slots=True, eq=False)
class _Type:
    kind: str
    parts: list[_Type] = field(default_factory=list)
    """The branches of a union, the one type of the items of an array or map, or the fields of a
    record that take bytes."""
    size: int = 0
    """The bytes of each value. 0: their number varies, or the value or one in it takes no bytes."""
    is_decimal: bool = False
    empties: int = 0
    """The number of values without bytes in one value, without those in its parts."""
    levels: int = 1
    """The number of records of which each contains the next. 0: the record is not complete."""
    height: int = 1
    """The depth of the levels and of the values without bytes in them."""
    blind: int = 0
    """The number of values that fastavro skips in one value without noticing the payload's end."""
    is_blind: bool = False
    """Whether fastavro can skip a whole value after the payload's end without an error."""

    @property
    def is_empty(self) -> bool:
        """Whether the values take no bytes."""
        return self.empties > 0 and not self.parts


def payload_check(schema: Any, *, may_skip: bool) -> Callable[[bytes], None] | None:
    """Return a function that raises ValueError for a payload that is not safe to decode.

    None: all payloads are safe. `schema`: the writer's schema in fastavro's parsed form.
    `may_skip`: the reader's schema differs and may lack fields. Raises ValueError if the schema is
    nested too deeply for the decision, or has a fixed type of an invalid size.
    """
    types = _Types()
    try:
        root = types.of(schema)
        if _is_bounded(root, may_skip=may_skip):
            return None
    except RecursionError:
        raise ValueError("the types of the schema are nested too deeply") from None
    per_byte = min(EMPTY_PER_BYTE + types.empty_fields, EMPTY_PER_BYTE_MAX)
    return lambda data: _check(data, root, EMPTY_FREE + per_byte * len(data))


class _Types:
    def __init__(self) -> None:
        self.empty_fields = 0
        """An upper bound of the values without bytes that one byte of the payload can bring, except
        in arrays of such values.

        A byte can begin several values: different records of which each contains the next, and a
        union or map in the last record. The bound is the sum for all types of the schema.
        """
        self._named: dict[str, _Type] = {}

    def of(self, tree: Any) -> _Type:
        if isinstance(tree, list):
            return self._with_bytes(_Type("union", [self.of(branch) for branch in tree]))
        if isinstance(tree, str):
            return self._named.get(tree) or _leaf(_Type(tree))
        kind = tree["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        is_decimal = tree.get("logicalType") == "decimal"
        made = _Type(kind, size=_fixed_size(tree), is_decimal=is_decimal)
        if kind in ("record", "error", "enum", "fixed"):
            self._named[tree["name"]] = made
        match kind:
            case "record" | "error":
                made.kind, made.levels = "record", 0
                self._complete(made, [self.of(it["type"]) for it in tree["fields"]])
            case "array":
                made.parts = [self.of(tree["items"])]
            case "map":
                made.parts = [self.of(tree["values"])]
                self._with_bytes(made)
            case "enum":
                made.kind = "int"
            case _ if kind in self._named and kind != tree.get("name"):
                return self._named[kind]
            case _:
                _leaf(made)
        return made

    def _with_bytes(self, made: _Type) -> _Type:
        """Count the values without bytes that a union or a map can have for each of its bytes."""
        self.empty_fields += sum(part.empties for part in made.parts if part.is_empty)
        return made

    def _complete(self, record: _Type, fields: list[_Type]) -> None:
        """Complete a record with its fields.

        The record only counts its fields without bytes. If one field remains and is a record, both
        become one type.
        """
        empty = [it for it in fields if it.is_empty]
        record.parts = [it for it in fields if not it.is_empty]
        record.blind = sum(it.blind for it in record.parts)
        record.is_blind = all(it.is_blind for it in record.parts)
        if all(it.size for it in fields):
            record.size = sum(it.size for it in fields)
        record.levels = 1
        record.empties = sum(it.empties for it in empty)
        record.height = 1 + max((it.height for it in empty), default=0)
        if not record.parts:
            record.empties += 1
            return
        self.empty_fields += record.empties
        inner = record.parts[0]
        if len(record.parts) == 1 and inner.kind == "record" and inner.levels:
            record.parts = inner.parts
            record.levels += inner.levels
            record.empties += inner.empties
            record.height = max(record.height, 1 + inner.height)


def _fixed_size(tree: dict[str, Any]) -> int:
    size = tree.get("size") if tree["type"] == "fixed" else 0
    if type(size) is not int or size < 0:  # fastavro does not check it
        raise ValueError(f"a fixed type has the size {size!r}")
    return size


def _leaf(made: _Type) -> _Type:
    made.size = _FIXED_SIZES.get(made.kind, made.size)
    if made.kind == "null" or (made.kind == "fixed" and not made.size):
        made.empties = 1
    elif made.size:
        made.blind, made.is_blind = 1, True
    return made


def _is_bounded(root: _Type, *, may_skip: bool) -> bool:
    """Return whether no check is necessary: no value is a decimal, each value takes a byte that
    fastavro reads, and the schema bounds the depth to DEPTH_MAX."""
    depths: dict[int, int] = {}  # id of a type -> depth; 0: needs a check, or not known yet

    def depth_of(found: _Type) -> int:
        known = depths.get(id(found))
        if known is None:
            depths[id(found)] = 0
            inner = [depth_of(part) for part in found.parts]
            care = 0 in inner or _takes_care(found) or (may_skip and _skips_blindly(found))
            known = 0 if care else found.levels + max(inner, default=0)
            depths[id(found)] = known
        return known

    return 0 < depth_of(root) <= DEPTH_MAX


def _takes_care(found: _Type) -> bool:
    """Return whether a value of this type is a decimal or contains values without bytes."""
    if found.is_decimal:
        return True
    if found.kind in ("array", "map"):
        return found.parts[0].is_empty
    return found.empties > (1 if found.is_empty else 0)


def _skips_blindly(found: _Type) -> bool:
    """Return whether fastavro may skip very many values after the end of the payload."""
    return found.blind > BLIND_MAX or (found.kind == "array" and found.parts[0].is_blind)


def _check(data: bytes, root: _Type, empties: int) -> None:
    try:
        _read(data, root, empties)
    except IndexError:
        raise ValueError("the payload ends within a value") from None


def _read(data: bytes, root: _Type, empties: int) -> None:
    at = 0
    stack = [(root, 1, 0)]  # the type, its depth, and the number of items left in its block
    while stack:
        found, depth, left = stack.pop()
        empties -= found.empties
        if empties < 0:
            raise ValueError("the payload has too many values without bytes")
        if depth + found.height - 1 > DEPTH_MAX:
            raise ValueError(f"the payload has values deeper than {DEPTH_MAX}")
        match found.kind:
            case "record":
                inside = depth + found.levels
                stack += [(part, inside, 0) for part in reversed(found.parts)]
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
                item = found.parts[0]
                if found.kind == "map":
                    at = _skip_bytes(data, at)
                elif item.is_empty:
                    empties -= (left - 1) * item.empties
                    left = 1
                elif item.size and not item.is_decimal:
                    at += (left - 1) * item.size  # the last item finds the end of the payload
                    left = 1
                stack += [(found, depth, left - 1), (item, depth + 1, 0)]
            case _:
                end = _skip_leaf(data, at, found)
                if end > len(data):
                    raise ValueError("the payload ends within a value")
                if found.is_decimal and end - at > DECIMAL_BYTES_MAX:
                    raise ValueError(f"a decimal has {end - at} bytes")
                at = end


def _skip_leaf(data: bytes, at: int, found: _Type) -> int:
    match found.kind:
        case "null":
            return at
        case "boolean" | "float" | "double" | "fixed":
            return at + found.size
        case "int" | "long":
            return _long(data, at)[1]
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
