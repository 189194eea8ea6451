"""The operating errors of repair. A failed step of a repair leaves the ledger's metadata unchanged.
The copies that the step made are harmless; a repeated repair may send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from magnetar.protos.envelope import BookieCode


class RepairError(Exception):
    """The base of all operating errors of this package."""

    definite: ClassVar[bool] = True


class NoTarget(RepairError):
    """No writable bookie answers, except those that hold the segment already."""

    def __init__(self, ledger: int, first: int) -> None:
        super().__init__(f"no other bookie accepts the entries of ledger {ledger} from {first} on")
        self.ledger = ledger
        self.first = first


class CopyFailed(RepairError):
    """The target bookie did not store all copies."""

    def __init__(self, ledger: int, bookie: str, code: BookieCode) -> None:
        super().__init__(f"bookie {bookie} did not store copies of ledger {ledger}: {code.name}")
        self.ledger = ledger
        self.bookie = bookie
        self.code = code


class StillWritten(RepairError):
    """A bookie of the segment being written is lost, or has bad copies there. The ledger's writer
    should replace a lost bookie, and gets time to do so. Bad copies are written again after the
    segment has ended."""

    def __init__(self, ledger: int, members: str) -> None:
        super().__init__(
            f"ledger {ledger} is open and waits for its writer; bookies that are lost or have bad"
            f" copies: {members}"
        )
        self.ledger = ledger


class Overtaken(RepairError):
    """Another process changed the ledger during the repair, or this process lost the ledger's lock.
    A retry plans the repair again."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"another process changed ledger {ledger} during the repair")
        self.ledger = ledger


class NoSuchCluster(RepairError):
    """The metadata store at this address has no cluster below this folder."""

    def __init__(self) -> None:
        super().__init__(
            "no cluster in this metadata store; check the folder at the end of its URL"
        )


class NoSuchBookie(RepairError):
    """The cluster has no bookie of this name."""

    def __init__(self, bookie: str, known: Iterable[str]) -> None:
        names = ", ".join(sorted(known))
        super().__init__(f"no bookie is named {bookie}; known bookies: {names or 'none'}")
        self.bookie = bookie


class StillNeeded(RepairError):
    """The bookie could not be removed in time: it still holds ledgers (`blockers`), or for another
    reason. Moved ledgers stay moved. Decommission the bookie again to continue."""

    definite = False

    def __init__(self, bookie: str, blockers: Mapping[int, str], reason: str) -> None:
        """`reason`: why the bookie was not removed if there are no `blockers`."""
        why = f"it still holds {len(blockers)} ledgers" if blockers else reason
        super().__init__(f"bookie {bookie} was not removed in time: {why}")
        self.bookie = bookie
        self.blockers = dict(blockers)
