"""The hash function of Pulsar's keys, rings and routing: 32-bit MurmurHash3 with seed 0."""

from __future__ import annotations

from typing import Final

_MASK: Final = 0xFFFFFFFF


def murmur3_32(data: bytes) -> int:
    """Return the unsigned hash of 32 bits. Pulsar uses only the lower 31 bits of a hash: a caller
    that needs Pulsar's value must clear the highest bit (`& 0x7fffffff`)."""
    result = 0
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        result ^= _scramble(int.from_bytes(data[start : start + 4], "little"))
        result = (result << 13 | result >> 19) & _MASK
        result = (result * 5 + 0xE6546B64) & _MASK
    if whole < len(data):
        result ^= _scramble(int.from_bytes(data[whole:], "little"))
    result ^= len(data)
    result = (result ^ result >> 16) * 0x85EBCA6B & _MASK
    result = (result ^ result >> 13) * 0xC2B2AE35 & _MASK
    return result ^ result >> 16


def _scramble(word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK
    word = (word << 15 | word >> 17) & _MASK
    return word * 0x1B873593 & _MASK
