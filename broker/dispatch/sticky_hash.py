"""The key by which Key_Shared assigns an entry to a consumer, and its hash.

The broker reads the key from the metadata of the entry, and does not look into a batch. So all
messages of a batch go to one consumer, and producers must send batches of one key (key-based
batching).

A hash has 31 bits. Each selector maps it to a slot, 1..65535. Slot 0 is never used: Pulsar reserves
it for "not set".
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NotBase64
from typing import TYPE_CHECKING, Final

import mmh3

if TYPE_CHECKING:
    from magnetar.protos.entry import EntryView

SLOTS: Final = 65_536
"""The number of slots, with the unused slot 0. It bounds the state that PIP-379 needs, which has a
part for each slot."""

NONE_KEY: Final = b"NONE_KEY"
"""The key of messages without a key, if they are not spread. Pulsar's documentation also spells it
NON_KEY."""


def sticky_key(view: EntryView, *, spread_keyless: bool) -> bytes:
    """The key of an entry. `spread_keyless` is about entries without a key. True: each of them gets
    a key of its own (the chunks of one message share a key), so they spread over all consumers.
    False: they share NONE_KEY, so one consumer gets them, in order."""
    if view.ordering_key is not None:
        return view.ordering_key
    if view.partition_key is not None:
        key = view.partition_key.encode()
        if view.partition_key_b64:
            try:
                return b64decode(key, validate=True)
            except NotBase64:  # the flag is wrong; any stable key will do
                return key
        return key
    if not spread_keyless:
        return NONE_KEY
    if view.chunk is not None:
        return view.chunk.uuid.encode()
    return f"{view.producer_name}-{view.sequence_id}".encode()


def hash_of(key: bytes | str) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) without its highest bit, as Pulsar's brokers use it."""
    return mmh3.hash(key, 0, signed=False) & 0x7FFFFFFF


def ring_slot(hashed: int) -> int:
    """The slot of a hash for consistent hashing: 1..65535."""
    return hashed % (SLOTS - 1) + 1


def range_slot(hashed: int) -> int:
    """The slot of a hash for auto-split and sticky ranges: 1..65535. Remainder 0 becomes slot 1."""
    return hashed % SLOTS or 1
