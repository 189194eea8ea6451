"""Schemas of a key and a value, as Pulsar's Java client encodes them. Pure.

The definition consists of four parts: the length of the key's definition (4 bytes, big-endian), the
key's definition, and the same two for the value. The properties name the types of key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_TYPE: Final = "key.schema.type"
VALUE_TYPE: Final = "value.schema.type"
_LENGTH_BYTES: Final = 4
_TYPE_CHARS_MAX: Final = 40  # the longest name of a type has 15


class NotKeyValue(ValueError):
    """The bytes are no schema of a key and a value."""


@dataclass(frozen=True, slots=True)
class Part:
    type: str  # the text of the property, unchecked: a name of SchemaType, or "BYTES" for NONE
    data: bytes


def parse(data: bytes, properties: Mapping[str, str]) -> tuple[Part, Part]:
    """The key's part and the value's part. Raises NotKeyValue."""
    key, rest = _take(data)
    value, rest = _take(rest)
    if rest:
        raise NotKeyValue(f"{len(rest)} bytes after the value's definition")
    missing = [name for name in (KEY_TYPE, VALUE_TYPE) if name not in properties]
    if missing:
        raise NotKeyValue(f"property {missing[0]} is missing")
    types = properties[KEY_TYPE], properties[VALUE_TYPE]
    if max(map(len, types)) > _TYPE_CHARS_MAX:
        raise NotKeyValue(f"a type's name has more than {_TYPE_CHARS_MAX} characters")
    return Part(types[0], key), Part(types[1], value)


def _take(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:_LENGTH_BYTES], signed=True)
    end = _LENGTH_BYTES + max(length, 0)
    if len(data) < max(end, _LENGTH_BYTES):
        raise NotKeyValue("the definition ends early")
    return data[_LENGTH_BYTES:end], data[end:]
