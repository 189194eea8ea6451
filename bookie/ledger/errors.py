"""The operating errors of ledgers, with their data and whether the outcome is known.

`definite` is True when the failed call certainly changed nothing. After any failure of a ledger,
the outcome of its adds in flight is *unknown*: recovery may or may not keep each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.protos.envelope import BookieCode


class LedgerError(Exception):
    """The base of all operating errors of this package."""

    definite = True


class LedgerNotFound(LedgerError):
    """The metadata store has no such ledger: it was deleted or never created."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"ledger {ledger} does not exist")
        self.ledger = ledger


class LedgerFenced(LedgerError):
    """Another process took over or deleted the ledger; this writer must stop."""

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"ledger {ledger} was taken over by another process: {why}")
        self.ledger = ledger
        self.why = why


class LedgerRefused(LedgerError):
    """A bookie refused an add as malformed, or the metadata store refused the ledger's record: a
    bug in this process, or in the bookie or the store.

    The writer stops. The same request to other bookies would only exhaust the ensemble.
    """

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"ledger {ledger} cannot be written: {why}")
        self.ledger = ledger
        self.why = why


class LedgerClosed(LedgerError):
    """The writer itself closed or abandoned the ledger; the failed call appended nothing."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"ledger {ledger} is closed")
        self.ledger = ledger


class QuorumTimeout(LedgerError):
    """Too few bookies stored an entry in time. The ledger takes no more entries, but can be
    closed."""

    definite = False

    def __init__(self, ledger: int, entry: int, waited_s: float) -> None:
        super().__init__(
            f"entry {ledger}:{entry} did not reach its ack quorum within {waited_s:g} s"
        )
        self.ledger = ledger
        self.entry = entry
        self.waited_s = waited_s


class EntryTooLarge(LedgerError):
    """The entry was refused before it took an id; the ledger is unchanged."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"entry of {size} bytes exceeds the limit of {limit} bytes")
        self.size = size
        self.limit = limit


class NotEnoughBookies(LedgerError):
    """Too few writable bookies answer for a new ledger. Nothing was created."""

    def __init__(self, needed: int, writable: int) -> None:
        super().__init__(f"a ledger needs {needed} writable bookies, {writable} answer")
        self.needed = needed
        self.writable = writable


class RecoveryIncomplete(LedgerError):
    """The ledger could not be closed yet, usually because too few bookies gave a definite answer.
    The ledger stays fenced where it was fenced; recover it again later."""

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"recovery of ledger {ledger} is incomplete: {why}")
        self.ledger = ledger
        self.why = why


class EntryUnreadable(LedgerError):
    """No replica of a confirmed entry could be read; `answers` holds each bookie's reason. The
    entry may still exist. `missing`: every replica answered definitely that it does not have the
    entry, so the entry is lost. `deleted`: the ledger was deleted during the read, so nothing is
    lost."""

    definite = False

    def __init__(
        self,
        ledger: int,
        entry: int,
        answers: Mapping[str, BookieCode],
        *,
        missing: bool = False,
        deleted: bool = False,
    ) -> None:
        reasons = ", ".join(f"{bookie}: {code.name}" for bookie, code in answers.items())
        if deleted:
            reasons = f"the ledger was deleted; {reasons}"
        super().__init__(f"entry {ledger}:{entry} cannot be read ({reasons or 'no bookie asked'})")
        self.ledger = ledger
        self.entry = entry
        self.answers = dict(answers)
        self.missing = missing
        self.deleted = deleted


class BookieUnavailable(LedgerError):
    """A call to a bookie failed, and its outcome is unknown. `code` says how it failed."""

    definite = False

    def __init__(self, bookie: str, code: BookieCode, why: str) -> None:
        super().__init__(f"bookie {bookie}: {code.name}, {why}")
        self.bookie = bookie
        self.code = code
        self.why = why
