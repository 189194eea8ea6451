"""The places of the copies of sealed ledgers, for clients that read them from the bookies.

A client that may consume from a topic (caller.py) gets, for each ledger it asks for, the bookies of
its segments and the ledger's read key. The key allows neither adds nor fences. The key is valid as
long as the bookies have the ledger, even after the client has lost its permission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.contract import read_key
from magnetar.metadata.model import LedgerId, LedgerState
from magnetar.protos import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.broker import Broker
    from magnetar.broker.log.log import Log
    from magnetar.metadata.model import Member


class LedgerPlaces:
    """The places of the ledgers in one answer, and their bookies."""

    def __init__(self, broker: Broker) -> None:
        self._find_bookie = broker.find_bookie
        self._bookies: dict[Member, int] = {}  # -> index in `bookies`

    @property
    def bookies(self) -> Sequence[pb.BookieData]:
        """The bookies. The results of `of` refer to them by index."""
        return [self._data_of(member) for member in self._bookies]

    async def of(self, log: Log, ledger: int) -> pb.LedgerCopies | None:
        """Return the places of the ledger's copies. None: the client must read the ledger from the
        topic's owner. Raises MetadataError."""
        if self._find_bookie is None or not log.chain.is_closed(ledger):
            return None
        metadata = await log.ledgers.metadata(LedgerId(ledger))
        if metadata is None or metadata.state is not LedgerState.CLOSED:
            return None
        assert metadata.last_entry is not None
        assert metadata.length is not None
        return pb.LedgerCopies(
            ledger=ledger,
            last_entry=metadata.last_entry,
            length=metadata.length,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            read_key=read_key(metadata.master_key, ledger),
            segments=[
                pb.LedgerSegment(
                    first_entry=segment.first_entry, members=map(self._place_of, segment.members)
                )
                for segment in metadata.segments
            ],
        )

    def _place_of(self, member: Member) -> int:
        return self._bookies.setdefault(member, len(self._bookies))

    def _data_of(self, member: Member) -> pb.BookieData:
        assert self._find_bookie is not None
        registration = self._find_bookie(member)
        address = "" if registration is None else registration.address.data
        return pb.BookieData(bookie=member.bookie, incarnation=member.incarnation, address=address)
