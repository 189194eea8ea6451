"""Lists of a namespace's topics as clients see them: filtered and hashed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import google_crc32c

from magnetar.broker.catalog.reserved import is_system

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from magnetar.broker.catalog.pattern import TopicPattern
    from magnetar.protos.names import TopicName


NAMES_PER_TURN: Final = 500
"""Some 20 us each for a pattern with many states: 10 ms."""


def visible(names: Iterable[TopicName]) -> list[TopicName]:
    """Without the topics that Pulsar uses itself."""
    return [name for name in names if not is_system(name)]


async def matching(pattern: TopicPattern, names: Sequence[TopicName]) -> list[TopicName]:
    """Those that match, in the same order. Gives the loop a turn after every NAMES_PER_TURN."""
    found = []
    for number, name in enumerate(names, 1):
        if matches(pattern, name):
            found.append(name)
        if number % NAMES_PER_TURN == 0:
            await asyncio.sleep(0)
    return found


def matches(pattern: TopicPattern, name: TopicName) -> bool:
    """As in Pulsar: the pattern covers `tenant/namespace/topic`, of a partition that of its
    topic."""
    return pattern.matches(str(name.base).partition("://")[2])


def hash_of(names: Iterable[str]) -> str:
    """Pulsar's: CRC32C over the sorted names joined with commas, lowest byte first, as hex."""
    joined = ",".join(sorted(names)).encode()
    found: int = google_crc32c.value(joined)
    return found.to_bytes(4, "little").hex()
