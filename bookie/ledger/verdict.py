"""The meaning of a bookie's refusal of an add: a table, complete over all codes."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from magnetar.protos.envelope import BookieCode

if TYPE_CHECKING:
    from collections.abc import Mapping


class AddVerdict(Enum):
    LEDGER_LOST = "another process owns or deleted the ledger: fail all pending adds"
    LEDGER_REFUSED = "no bookie will accept this: fail all pending adds"
    BOOKIE_FAILED = "this bookie cannot serve this ledger: replace it"


ADD_VERDICTS: Final[Mapping[BookieCode, AddVerdict]] = MappingProxyType(
    {
        BookieCode.FENCED: AddVerdict.LEDGER_LOST,
        BookieCode.UNAUTHORIZED: AddVerdict.LEDGER_LOST,
        BookieCode.CONFLICT: AddVerdict.LEDGER_LOST,  # another writer used our entry id
        BookieCode.DELETED: AddVerdict.LEDGER_LOST,
        # a bookie asks the metadata store before it gives this answer
        BookieCode.NO_SUCH_LEDGER: AddVerdict.LEDGER_LOST,
        BookieCode.BAD_REQUEST: AddVerdict.LEDGER_REFUSED,
        BookieCode.TOO_LARGE: AddVerdict.LEDGER_REFUSED,
        BookieCode.NO_SUCH_ENTRY: AddVerdict.LEDGER_REFUSED,  # not a valid answer to an add
        BookieCode.READ_ONLY: AddVerdict.BOOKIE_FAILED,
        BookieCode.WRONG_INCARNATION: AddVerdict.BOOKIE_FAILED,
        BookieCode.OVERLOADED: AddVerdict.BOOKIE_FAILED,
        BookieCode.IO_ERROR: AddVerdict.BOOKIE_FAILED,
        BookieCode.DAMAGED_STORE: AddVerdict.BOOKIE_FAILED,
        BookieCode.STARTING: AddVerdict.BOOKIE_FAILED,
        BookieCode.STOPPING: AddVerdict.BOOKIE_FAILED,
        BookieCode.TIMEOUT: AddVerdict.BOOKIE_FAILED,
        BookieCode.CONNECTION_LOST: AddVerdict.BOOKIE_FAILED,
        BookieCode.CORRUPT: AddVerdict.BOOKIE_FAILED,  # damaged on the way to the bookie
    }
)
