"""The events of a run, in order: always as a hash, and as text when an engineer asks for it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

TOLD_MAX = 4_000  # the last lines of a story; earlier lines are rarely the reason


class Trace:
    """`note` takes plain values whose text is the same in every run: no ids, no sets."""

    def __init__(self, now_s: Callable[[], float], *, tell: bool = False) -> None:
        self.bitten: Counter[str] = Counter()  # effective faults by kind
        self.events = 0
        self._now_s = now_s
        self._hash = 0
        self._told: list[str] | None = [] if tell else None

    @property
    def telling(self) -> bool:
        return self._told is not None

    @property
    def digest(self) -> str:
        return f"{self.events}-{self._hash:08x}"

    def note(self, who: str, what: str, *facts: object) -> None:
        self.events += 1
        now_s = self._now_s()
        self._hash = crc32(f"{now_s!r} {who} {what} {facts}".encode(), self._hash)
        if self._told is not None:
            self.tell(who, what, *facts)

    def fault(self, who: str, what: str, *facts: object) -> None:
        """A fault that had an effect."""
        self.bitten[what] += 1
        self.note(who, "* " + what, *facts)

    def tell(self, who: str, what: str, *facts: object) -> None:
        """A line for the story only, not for the hash."""
        if self._told is not None:
            text = " ".join([what, *map(str, facts)])
            self._told.append(f"{self._now_s():11.6f}  {who:<12} {text}")
            del self._told[:-TOLD_MAX]

    def story(self) -> list[str]:
        return list(self._told or [])
