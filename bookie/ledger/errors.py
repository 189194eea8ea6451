"""What can go wrong with a ledger, each with its data and with whether the outcome is known.

`definite` is True when the call that raised certainly changed nothing. The adds that were in flight
when a ledger failed are *unknown* whatever the error: each may turn up after recovery, or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.protos.envelope import BookieCode


class LedgerError(Exception):
    """Base of every operating error of this package."""

    definite = True


class LedgerNotFound(LedgerError):
    """No such ledger in the metadata store: deleted, or never made."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"ledger {ledger} does not exist")
        self.ledger = ledger


class LedgerFenced(LedgerError):
    """Somebody else has taken the ledger over, or removed it: this writer is done."""

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"ledger {ledger} belongs to somebody else now: {why}")
        self.ledger = ledger
        self.why = why


class LedgerRefused(LedgerError):
    """A bookie refused an add as malformed, or the metadata store refused ours: a bug of one side.

    The writer stops: asking other bookies the same would only wear out the ensemble.
    """

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"ledger {ledger} cannot be written: {why}")
        self.ledger = ledger
        self.why = why


class LedgerClosed(LedgerError):
    """The writer itself has closed or abandoned the ledger; nothing was appended."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"ledger {ledger} is closed")
        self.ledger = ledger


class QuorumTimeout(LedgerError):
    """Too few bookies stored an entry in time. The ledger takes no more; it can be closed."""

    definite = False

    def __init__(self, ledger: int, entry: int, waited_s: float) -> None:
        super().__init__(
            f"entry {ledger}:{entry} did not reach its ack quorum within {waited_s:g} s"
        )
        self.ledger = ledger
        self.entry = entry
        self.waited_s = waited_s


class EntryTooLarge(LedgerError):
    """Refused before an entry id was taken; the ledger is as it was."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"an entry of {size} bytes, at most {limit} are allowed")
        self.size = size
        self.limit = limit


class NotEnoughBookies(LedgerError):
    """Too few writable bookies answer for a new ledger. Nothing was created."""

    def __init__(self, needed: int, writable: int) -> None:
        super().__init__(f"a ledger needs {needed} writable bookies, {writable} answer")
        self.needed = needed
        self.writable = writable


class RecoveryIncomplete(LedgerError):
    """The ledger could not be closed yet: too few bookies gave a clear answer. It stays fenced as
    far as it got; recover it again later."""

    definite = False

    def __init__(self, ledger: int, why: str) -> None:
        super().__init__(f"recovery of ledger {ledger} is incomplete: {why}")
        self.ledger = ledger
        self.why = why


class EntryUnreadable(LedgerError):
    """No replica of a confirmed entry could be read, by bookie: why. It may well exist; `missing`
    when every replica said for certain that it does not have it: then the entry is lost. `deleted`
    when its ledger was deleted meanwhile: then nobody is to blame."""

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
        super().__init__(f"entry {ledger}:{entry} cannot be read ({reasons or 'nobody asked'})")
        self.ledger = ledger
        self.entry = entry
        self.answers = dict(answers)
        self.missing = missing
        self.deleted = deleted


class BookieUnavailable(LedgerError):
    """A call to a bookie ended without its answer. `code` is one of the indefinite ones."""

    definite = False

    def __init__(self, bookie: str, code: BookieCode, why: str) -> None:
        super().__init__(f"bookie {bookie}: {code.name}, {why}")
        self.bookie = bookie
        self.code = code
        self.why = why
