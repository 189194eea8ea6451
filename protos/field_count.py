"""The number of fields of an encoded message, counted without parsing the message.

protobuf needs up to 0.1 us for a field of two bytes and holds the interpreter lock meanwhile: 5 MB
of two-byte fields stop the event loop for 250 ms. So the fields of a large message are counted
first, up to a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def has_more_fields(data: bytes | memoryview, kind: Descriptor, limit: int) -> bool:
    """Return whether `data`, a message of this kind, has more than `limit` fields, including the
    fields of nested messages. Of malformed data, the number has no meaning: such data is refused in
    any case, here or by the parser."""
    return _count(data, 0, len(data), kind, limit) > limit


def _count(data: bytes | memoryview, at: int, end: int, kind: Descriptor, limit: int) -> int:
    count = 0
    while at < end and count <= limit:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(data, at - 1, end)
        count += 1
        wire = tag & 7
        if wire == _BYTES:
            size = data[at] if at < end else 0
            at += 1
            if size >= 0x80:
                size, at = _varint(data, at - 1, end)
            field = kind.fields_by_number.get(tag >> 3)
            inner = None if field is None else field.message_type
            if inner is not None:
                count += _count(data, at, min(at + size, end), inner, limit - count)
            at += size
        elif wire == _VARINT:
            _, at = _varint(data, at, end)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        else:  # groups are not in the protocol: each of their tags counts
            continue
    return count


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Like `read_varint` of entry.py, but within a part of the data. Malformed bytes end the part
    without an error, because the parser refuses them."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:  # longer than any number
            return 0, end
    return 0, end
