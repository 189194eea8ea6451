"""Hashes of message keys, which decide the partition of a message. Pure.

Each function returns a number from 0 to 2^31-1, the same number as Pulsar's clients compute.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from magnetar.client.options import HashingScheme

if TYPE_CHECKING:
    from collections.abc import Callable

_U32: Final = 0xFFFFFFFF
_U64: Final = 0xFFFFFFFFFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF


def java_string_hash(key: str) -> int:
    """Return `String.hashCode` of Java with the sign bit cleared, as Pulsar's Java client does."""
    units = key.encode("utf-16-le", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack("<H", units):
        value = (31 * value + unit) & _U32
    return value & _POSITIVE


def murmur3_32_hash(key: str) -> int:
    """Return MurmurHash3 (32 bits, seed 0) of the key in UTF-8, with the sign bit cleared."""
    data = key.encode("utf-8", "surrogatepass")
    value = 0
    whole = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        value = (_rotated(value ^ _murmur_mixed(word), 13) * 5 + 0xE6546B64) & _U32
    if len(data) > whole:
        value ^= _murmur_mixed(int.from_bytes(data[whole:], "little"))
    value ^= len(data)
    value = ((value ^ value >> 16) * 0x85EBCA6B) & _U32
    value = ((value ^ value >> 13) * 0xC2B2AE35) & _U32
    return (value ^ value >> 16) & _POSITIVE


def boost_hash(key: str) -> int:
    """Return `boost::hash<std::string>` of Boost 1.81 and later on 64 bits, for the key in UTF-8.

    Apache's C++ and Python clients that are built with such a version use this hash.
    """
    data = key.encode("utf-8", "surrogatepass")
    size = len(data)
    whole = size & ~7
    place = _folded(_BOOST_STEP)
    value = place ^ size
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        place = (place + _BOOST_STEP) & _U64
        value ^= _folded((word + place) & _U64)
    rest, left = data[whole:], size - whole
    word = 0
    if left >= 4:
        word = int.from_bytes(rest[-4:], "little") << (left - 4) * 8
        word |= int.from_bytes(rest[:4], "little")
    elif left:
        middle, last = (left - 1) & 2, left >> 1
        word = rest[middle] << middle * 8 | rest[last] << last * 8 | rest[0]
    place = (place + _BOOST_STEP) & _U64
    value ^= _folded((word + place) & _U64)
    return _folded((value + place) & _U64) & _POSITIVE


_BOOST_STEP: Final = 0x9E3779B97F4A7C15
_BOOST_FACTOR: Final = 0xDF442D22CE4859B9


def _folded(word: int) -> int:
    product = word * _BOOST_FACTOR
    return (product & _U64) ^ (product >> 64)


def _murmur_mixed(word: int) -> int:
    return (_rotated((word * 0xCC9E2D51) & _U32, 15) * 0x1B873593) & _U32


def _rotated(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _U32


HASHES: Final[dict[HashingScheme, Callable[[str], int]]] = {
    HashingScheme.BoostHash: boost_hash,
    HashingScheme.JavaStringHash: java_string_hash,
    HashingScheme.Murmur3_32Hash: murmur3_32_hash,
}
