"""Lists of a namespace's topics as clients see them: filtered and hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import google_crc32c

from magnetar.broker.catalog.pattern import TopicPattern
from magnetar.broker.catalog.reserved import is_system

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from magnetar.protos.names import TopicName
    from magnetar.runtime.turns import Turns


WORK_PER_TURN: Final = 5_000
"""The steps of the pattern's automaton in one turn of the loop: up to 2 us each."""

WORK_PER_NAME: Final = 20
"""The cost of one name besides the steps of the automaton, counted in such steps."""


NAMES_PER_TURN: Final = 5_000
"""The names that are filtered, or converted to text, in one turn of the loop: about 12 ms."""


async def texts_of(names: Sequence[TopicName], turns: Turns) -> list[str]:
    """Return the full names. Waits for a turn before every NAMES_PER_TURN names."""
    texts: list[str] = []
    for start in range(0, len(names), NAMES_PER_TURN):
        await turns.take()
        texts += [str(name) for name in names[start : start + NAMES_PER_TURN]]
    return texts


async def visible_of(names: Sequence[TopicName], turns: Turns) -> list[TopicName]:
    """Like `visible`. Waits for a turn before every NAMES_PER_TURN names."""
    found: list[TopicName] = []
    for start in range(0, len(names), NAMES_PER_TURN):
        await turns.take()
        found += visible(names[start : start + NAMES_PER_TURN])
    return found


def visible(names: Iterable[TopicName]) -> list[TopicName]:
    """Return the names without Pulsar's system topics."""
    return [name for name in names if not is_system(name)]


async def compiled(pattern: str, turns: Turns) -> TopicPattern:
    """Compile a pattern. Raises UnsupportedPattern."""
    await turns.take()
    return TopicPattern(pattern)


async def matching(
    pattern: TopicPattern, names: Iterable[TopicName], turns: Turns
) -> list[TopicName]:
    """Return the names that match, in the same order. As in Pulsar, the pattern covers
    `tenant/namespace/topic`, and for a partition the name of its partitioned topic. Waits for a
    turn after every WORK_PER_TURN steps, even within a name."""
    found = []
    left = 0
    for name in names:
        text = str(name.base).partition("://")[2]
        states, at = pattern.first, 0
        while True:
            if left <= 0:
                await turns.take()
                left = WORK_PER_TURN
            states, at, work = pattern.advance(states, text, at, work_max=left)
            left -= work + WORK_PER_NAME
            if at == len(text) or not states:
                break
        if pattern.is_final(states):
            found.append(name)
    return found


def hash_of(names: Iterable[str]) -> str:
    """Return Pulsar's hash: CRC32C of the sorted names joined with commas, lowest byte first, as
    hex."""
    joined = ",".join(sorted(names)).encode()
    found: int = google_crc32c.value(joined)
    return found.to_bytes(4, "little").hex()
