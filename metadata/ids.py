"""Ledger ids: never used twice, and growing within each topic.

Each process takes blocks of ids from one compare-and-set counter and hands them out from memory.
The rest of a block is lost when the process ends. An id is never handed out twice: a process uses a
block only if the reply that granted it arrived. After a lost reply the process does not know
whether it owns the block and does not use it; the next attempt starts with a fresh read.

An id must exceed the topic's newest ledger (`newer_than`), because positions order by ledger id and
topics move between brokers. If the next id of the block does not, the process discards the block.
"""

import asyncio
from typing import Final

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_ledger_counter, encode_ledger_counter
from magnetar.metadata.errors import BadVersion, OutcomeUnknown, Unavailable
from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import ABSENT, UPDATE_PAUSE_S, MetadataStore

BLOCK: Final = 1_000
"""Ids per write to the store. A broker with one new ledger per second makes a write every 17
minutes. 63 bits of ids last for 9 * 10^15 abandoned blocks."""


class LedgerIds:
    """One per process; `next` may be called by several tasks at once."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._block: range = range(0)
        self._fetching = asyncio.Lock()  # one write to the store serves all callers that wait

    async def next(self, newer_than: LedgerId, *, deadline: float) -> LedgerId:
        """An id that was never handed out, greater than `newer_than` (-1: any). Raises Unavailable
        when the deadline (loop time) passes."""
        try:
            async with asyncio.timeout_at(deadline):
                while (ledger := self._take(newer_than)) is None:
                    async with self._fetching:
                        if not self._useful(newer_than):
                            await self._fetch(newer_than)
                return ledger
        except TimeoutError:
            raise Unavailable("no block of ledger ids before the deadline") from None

    def _useful(self, newer_than: LedgerId) -> bool:
        return len(self._block) > 0 and self._block[0] > newer_than

    def _take(self, newer_than: LedgerId) -> LedgerId | None:
        if not self._useful(newer_than):
            return None
        ledger, self._block = LedgerId(self._block[0]), self._block[1:]
        return ledger

    async def _fetch(self, newer_than: LedgerId) -> None:
        """Replace the block by a fresh one that starts beyond `newer_than`."""
        while True:
            try:
                stored = await self._store.get(paths.NEXT_LEDGER_ID)
                first = decode_ledger_counter(stored.value) if stored is not None else 0
                first = max(first, newer_than + 1)
                version = ABSENT if stored is None else stored.version
                before = None if stored is None else stored.value
                value = encode_ledger_counter(LedgerId(first + BLOCK), replaced=before)
                await self._store.put(paths.NEXT_LEDGER_ID, value, expected=version)
            except BadVersion:
                continue  # another process took a block: read the counter again
            except (OutcomeUnknown, Unavailable):
                await asyncio.sleep(UPDATE_PAUSE_S)
            else:
                self._block = range(first, first + BLOCK)
                return
