"""A copy of one stored value, and whether the stored value may have changed since. Pure.

    unknown   no read has returned a value: there is no answer, and no default replaces it
    stale     a read returned a value, and the stored value may have changed since: the view still
              answers with the value that was read last
    fresh     the last read returned a value, and no change was reported since it began

A read of bytes that are not a valid record returns no value.

1. A fresh part is known. 2. A part that is being read is not fresh. 3. A change that is reported
during a read leaves the part stale after it: the read may have missed the change.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Part(Generic[T]):
    """Events come from the one shell that reads the stored value."""

    __slots__ = ("_changed", "_reading", "trouble", "value")

    def __init__(self, value: T | None = None) -> None:
        self.value = value  # None: unknown
        # The reason why the stored bytes cannot be used; "": they are usable, or none were read.
        self.trouble = ""
        # True: a read is needed. No read was made, the last read failed, or a change was reported
        # since the last read began.
        self._changed = True
        self._reading = False

    @property
    def is_known(self) -> bool:
        return self.value is not None

    @property
    def is_fresh(self) -> bool:
        return self.is_known and not self._changed and not self._reading and not self.trouble

    @property
    def wants_read(self) -> bool:
        return self._changed and not self._reading

    @property
    def is_unusable(self) -> bool:
        """True when the stored bytes cannot be used, and no newer bytes are expected."""
        return bool(self.trouble) and not self._changed and not self._reading

    def on_changed(self) -> None:
        self._changed = True

    def begin_read(self) -> None:
        assert self.wants_read
        self._reading, self._changed = True, False

    def on_read(self, value: T) -> T | None:
        """The read returned `value`. Returns the previous value; None: it was unknown."""
        assert self._reading
        before, self.value = self.value, value
        self._reading, self.trouble = False, ""
        return before

    def on_unusable(self, why: str) -> None:
        """The read returned bytes that are not a valid record. The last value stays."""
        assert self._reading
        assert why
        self._reading, self.trouble = False, why

    def on_failed(self) -> None:
        """The read failed: the part needs another read."""
        assert self._reading
        self._reading, self._changed = False, True

    def check(self) -> None:
        """Assert the invariants above."""
        assert not (self.is_fresh and not self.is_known), "1"
        assert not (self.is_fresh and self._reading), "2"
        assert not (self.is_fresh and self._changed), "3"
