"""The rule for ledgers that belong to no topic any more. Pure.

A broker creates a ledger, and then lists it in its topic's record. If the broker dies in between,
no record names the ledger: the ledger is an *orphan*. The rule must never treat a ledger as an
orphan while a living broker may still list it. So each ledger's own metadata names its topic and
the *epoch* under which its creator owned the topic. A change of the record under an epoch succeeds
only while the record has that epoch.

Hence a ledger is an orphan in two cases. The topic has no record. Or the topic's record, read after
the ledger's metadata, does not list the ledger and has a later epoch. While the record has the
ledger's epoch, the ledger is kept, because its creator may still own the topic. The next owner of
the topic raises the record's epoch. The epochs of a topic that is created again begin above the
last epoch of the deleted topic.

The rule always keeps a ledger that is younger than the grace period, and a ledger whose metadata
does not name its topic, kind and epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from magnetar.protos.errors import InvalidTopicName
from magnetar.protos.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magnetar.metadata.model import LedgerMetadata, TopicRecord

KINDS: Final = frozenset({"data", "cursor", "delayed"})
"""The kinds of ledgers that a topic's record lists. Ledgers of other kinds are kept."""


class Verdict(Enum):
    """ORPHAN, or the reason why a ledger is kept."""

    ORPHAN = "no record lists it, and its creator cannot list it any more"
    LISTED = "its topic lists it"
    MAY_BE_LISTED = "its creator may still own the topic"
    YOUNG = "it is younger than the grace period"
    UNKNOWN = "its metadata does not name its topic, kind and epoch"


@dataclass(frozen=True, slots=True)
class Origin:
    """The creator of a ledger, from the ledger's metadata."""

    topic: TopicName
    kind: str
    epoch: int


def custom_of(topic: str, *, kind: str, epoch: int) -> dict[str, bytes]:
    """The custom metadata of a new ledger."""
    return {"topic": topic.encode(), "kind": kind.encode(), "epoch": str(epoch).encode()}


def origin_of(custom: Mapping[str, bytes]) -> Origin | None:
    """Parse a ledger's custom metadata. None: the topic, the kind or the epoch is missing or
    invalid, or the kind is not in KINDS."""
    try:
        kind, epoch = custom["kind"].decode(), int(custom["epoch"])
        topic = TopicName.parse(custom["topic"].decode())
    except (KeyError, ValueError, InvalidTopicName):
        return None
    return Origin(topic, kind, epoch) if kind in KINDS and epoch >= 0 else None


def judge(
    metadata: LedgerMetadata,
    origin: Origin | None,
    record: TopicRecord | None,
    *,
    now_ms: int,
    grace_ms: int,
) -> Verdict:
    """Decide whether a ledger is an orphan. `record`: the topic's record, read after `metadata`;
    None: the topic does not exist."""
    if origin is None:
        return Verdict.UNKNOWN
    if now_ms - metadata.created_ms < grace_ms:
        return Verdict.YOUNG
    if record is None:
        return Verdict.ORPHAN
    ledger = metadata.ledger
    if ledger in (*record.cursor_ledgers, *record.delayed_ledgers, *record.deleting):
        return Verdict.LISTED
    if any(part.ledger == ledger for part in record.ledgers):
        return Verdict.LISTED
    return Verdict.ORPHAN if record.epoch > origin.epoch else Verdict.MAY_BE_LISTED
