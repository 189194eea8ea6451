"""Bookies whose answers about brokers a test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.bookie.contract import LastHeard


class FakeWitnesses:
    """Three bookies that know nothing, until `answers` is set."""

    def __init__(self) -> None:
        self.answers: Sequence[LastHeard | None] = [None, None, None]
        self.asked: list[tuple[str, str]] = []

    async def ask(self, broker: str, incarnation: str) -> Sequence[LastHeard | None]:
        self.asked.append((broker, incarnation))
        return self.answers
