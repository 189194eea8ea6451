"""Why a repair did not succeed. None of these has changed the ledger's metadata; copies that were
made are harmless, and are not made again."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from magnetar.protos.envelope import BookieCode


class RepairError(Exception):
    """Base of every operating error of this package."""

    definite: ClassVar[bool] = True


class NoTarget(RepairError):
    """No writable bookie that does not hold the segment already answers."""

    def __init__(self, ledger: int, first: int) -> None:
        super().__init__(f"no other bookie can take the entries of ledger {ledger} from {first} on")
        self.ledger = ledger
        self.first = first


class CopyFailed(RepairError):
    """The bookie that was to get copies did not store all of them."""

    def __init__(self, ledger: int, bookie: str, code: BookieCode) -> None:
        super().__init__(f"bookie {bookie} does not take copies of ledger {ledger}: {code.name}")
        self.ledger = ledger
        self.bookie = bookie
        self.code = code


class StillWritten(RepairError):
    """A bookie of the segment that is being written is lost: its writer is to replace it, and is
    given time to."""

    def __init__(self, ledger: int, members: str) -> None:
        super().__init__(f"ledger {ledger} is not closed, and waits for its writer: lost {members}")
        self.ledger = ledger


class Overtaken(RepairError):
    """Somebody else changed the ledger meanwhile; it is looked at again."""

    def __init__(self, ledger: int) -> None:
        super().__init__(f"somebody else changed ledger {ledger} meanwhile")
        self.ledger = ledger


class NoSuchCluster(RepairError):
    """The metadata store holds no cluster, at this address and below this folder."""

    def __init__(self) -> None:
        super().__init__(
            "there is no cluster in this metadata store: is the folder at the end of its URL right?"
        )


class NoSuchBookie(RepairError):
    """The cluster does not know a bookie of this name."""

    def __init__(self, bookie: str, known: Iterable[str]) -> None:
        names = ", ".join(sorted(known))
        super().__init__(f"no bookie is called {bookie}; there are: {names or 'none'}")
        self.bookie = bookie


class StillNeeded(RepairError):
    """The bookie could not be removed in time: these ledgers are on it still. What was moved stays
    moved; decommission it again to go on."""

    definite = False

    def __init__(self, bookie: str, blockers: Mapping[int, str]) -> None:
        super().__init__(
            f"bookie {bookie} was not removed"
            + (f": {len(blockers)} ledgers are on it still" if blockers else ": it still serves")
        )
        self.bookie = bookie
        self.blockers = dict(blockers)
