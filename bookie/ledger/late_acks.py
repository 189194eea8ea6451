"""LateAcks: collects a bookie's outstanding acks for a ledger that its writer or a recovery has
ended.

An ack quorum is enough to end a ledger; the other bookies may still be receiving its last entries.
A bookie never stores these entries if its connection breaks now, or if it gets its first add of the
ledger only after the metadata says that the ledger is closed (`first_add_check.py`). If the process
did not wait for these acks, only a comparison of all replicas would find the gap. So it waits for
them as long as for any ack, and notes the entries without an ack for repair.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.bookie.ledger.add_stream import AddStream
    from magnetar.bookie.ledger.bad_copies import BadCopies
    from magnetar.metadata.model import LedgerId
    from magnetar.protos.envelope import BookieCode


class LateAcks:
    """An AddSink that stays attached until all acks arrived, an add failed, the stream was lost, or
    `timeout_s` has passed. Then it notes the range of the entries without an ack."""

    def __init__(
        self,
        ledger: LedgerId,
        stream: AddStream,
        owed: Iterable[int],
        bad_copies: BadCopies,
        *,
        timeout_s: float,
    ) -> None:
        """`owed`: entries of the ledger that were sent over the stream and are not acknowledged."""
        self._ledger = ledger
        self._stream = stream
        self._owed = set(owed)
        self._bad_copies = bad_copies
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end)
        stream.attach(ledger, self)
        if stream.put is None:  # lost, before the writer learned of it
            self._end()

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        self._owed.difference_update(entries)
        if not self._owed:
            self._end()

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        if entry in self._owed:
            self._end()

    def on_stream(self, stream: AddStream) -> None:
        self._end()  # entries in flight may be lost

    def _end(self) -> None:
        self._timer.cancel()
        self._stream.detach(self._ledger)
        if self._owed:
            first, last = min(self._owed), max(self._owed)
            self._bad_copies.note(self._ledger, self._stream.member, first, last)
