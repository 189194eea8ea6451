"""First adds: they wait until the metadata confirms that this bookie belongs to their ledger.

Theory. The bookie admits a ledger's first ordinary add only after a check (`FirstAddCheck`). The
ledger must exist, be open, and name this incarnation of this bookie in its last ensemble. The check
reads the metadata store, which may be slow or unreachable. Other ledgers and other streams must not
wait for it. So the adds of an unchecked ledger wait here, in the order of their arrival. After the
check the service offers them to `Admission` again, in steps of SETTLED_BYTES. The first step
follows the check at once. Each later turn of the loop has at most STEPS_PER_TURN of the other
steps, all of one ledger. Each step is synchronous. A fence that arrived before the step was
recorded first, so it stops the adds of the step. A refusal is the result for all steps. An OK is
used for the first step only: before a later step, the collector may have deleted the ledger. Until
the last step, the service takes no further frame of the streams that sent these adds. So the adds
of a ledger keep their order, unless the ledger was deleted between two steps and is checked again.
Admission and recovery do not need the order.

The bytes of the waiting adds and the number of their ledgers have limits. An add beyond a limit is
answered OVERLOADED, which means "unknown".
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.records import LedgerRecords
from magnetar.metadata import paths
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.model import LedgerId, LedgerState
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.log import get_logger
from magnetar.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from magnetar.metadata.model import LedgerMetadata, Member
    from magnetar.metadata.store import MetadataStore
    from magnetar.protos.envelope import Add
    from magnetar.runtime.frames import Outbox

log = get_logger(__name__)

# 128 frames of FRAME_BYTES_MAX. A ledger's first adds wait for one round trip to the metadata.
WAITING_BYTES_MAX: Final = 32 << 20
# Adds of this size, overhead included, are settled in one step, which takes a millisecond. All
# waiting adds in one step could take half a second.
SETTLED_BYTES: Final = 64 << 10
# About 5 ms. All steps of WAITING_BYTES_MAX take 103 turns of the loop, about 0.5 s. That is short
# compared with the 5 s for which a writer waits for an add.
STEPS_PER_TURN: Final = 5
# Memory of each add besides its envelope (measured: 297). So at most 100,000 adds wait. If all are
# refused, their acks of 21 bytes each fit into one frame of FRAME_LIMIT_BYTES.
ADD_OVERHEAD_BYTES: Final = 300
# After a restart of a large broker, each of its topics begins a ledger.
WAITING_LEDGERS_MAX: Final = 20_000
# The limit of concurrent checks. At 2 ms each, 32 checks allow 16,000 new ledgers a second.
LOOKS_MAX: Final = 32
# Less than the 5 s after which a writer gives up an add, so that the writer gets the reason.
LOOK_TIMEOUT_S: Final = 3.0


@dataclass(slots=True)
class _Waiting:
    bytes: int = 0
    adds: list[tuple[Outbox, Add]] = field(default_factory=list)


class FirstAdds:
    """The adds that wait for a check. Belongs to the loop. Adds wait until `run` is running."""

    def __init__(
        self,
        check: Callable[[int], Awaitable[BookieCode]],
        settle: Callable[[BookieCode | None, Sequence[Add], Outbox], None],
        *,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        waiting_ledgers_max: int = WAITING_LEDGERS_MAX,
    ) -> None:
        """`check` returns OK or the reason to refuse a ledger's ordinary adds; it raises nothing.
        `settle` gets the code with adds of one ledger and one stream, in their order. The code is
        None if the check was OK and is no longer valid."""
        self._check = check
        self._settle = settle
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting_ledgers_max = waiting_ledgers_max
        self._waiting: dict[int, _Waiting] = {}
        self._unseen: deque[int] = deque()  # ledgers whose check has not begun
        self._wake = asyncio.Event()
        self._settling: dict[Outbox, set[asyncio.Event]] = {}  # set when all adds are settled
        self._turns = Turns()  # the turns of the later steps
        self.waiting_bytes = 0

    def take(self, adds: Sequence[Add], outbox: Outbox) -> list[Add]:
        """Let the adds wait. Returns the adds that exceed a limit."""
        beyond: list[Add] = []
        for add in adds:
            size = len(add.envelope) + ADD_OVERHEAD_BYTES
            waiting = self._waiting.get(add.ledger)
            if self.waiting_bytes + size > self._waiting_bytes_max or (
                waiting is None and len(self._waiting) >= self._waiting_ledgers_max
            ):
                beyond.append(add)
                continue
            if waiting is None:
                waiting = self._waiting[add.ledger] = _Waiting()
                self._unseen.append(add.ledger)
                self._wake.set()
            waiting.adds.append((outbox, add))
            waiting.bytes += size
            self.waiting_bytes += size
        return beyond

    async def run(self) -> None:
        """Run the checks, until cancelled."""
        free = asyncio.Semaphore(LOOKS_MAX)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unseen:
                    await free.acquire()
                    looking = group.create_task(self._decide(self._unseen.popleft()))
                    looking.add_done_callback(lambda _: free.release())

    async def wait_settled(self, outbox: Outbox) -> None:
        """Wait while adds of this stream are being settled in several steps."""
        while settling := self._settling.get(outbox):
            await next(iter(settling)).wait()

    async def _decide(self, ledger: int) -> None:
        code: BookieCode | None = await self._check(ledger)
        waiting = self._waiting.pop(ledger)
        streams = {outbox for outbox, _ in waiting.adds}
        done = asyncio.Event()
        for outbox in streams:
            self._settling.setdefault(outbox, set()).add(done)
        try:
            steps = _steps(waiting.adds)
            self._settle_step(code, next(steps))
            code = None if code is BookieCode.OK else code
            for number, step in enumerate(steps):
                if number % STEPS_PER_TURN == 0:
                    await self._turns.take()
                self._settle_step(code, step)
        finally:
            self.waiting_bytes -= waiting.bytes
            for outbox in streams:
                self._settling[outbox].discard(done)
                if not self._settling[outbox]:
                    del self._settling[outbox]
            done.set()

    def _settle_step(self, code: BookieCode | None, step: Sequence[tuple[Outbox, Add]]) -> None:
        by_stream: dict[Outbox, list[Add]] = {}
        for outbox, add in step:
            by_stream.setdefault(outbox, []).append(add)
        for outbox, adds in by_stream.items():
            self._settle(code, adds, outbox)


def _steps(waiting: Sequence[tuple[Outbox, Add]]) -> Iterator[Sequence[tuple[Outbox, Add]]]:
    """Divide waiting adds into steps of SETTLED_BYTES. A larger add is a step of its own."""
    first, size = 0, 0
    for at, (_, add) in enumerate(waiting):
        more = len(add.envelope) + ADD_OVERHEAD_BYTES
        if size + more > SETTLED_BYTES and at > first:
            yield waiting[first:at]
            first, size = at, 0
        size += more
    yield waiting[first:]


class FirstAddCheck:
    """Checks the metadata for a ledger's ordinary adds to `member`."""

    def __init__(
        self, store: MetadataStore, member: Member, *, timeout_s: float = LOOK_TIMEOUT_S
    ) -> None:
        self._store = store
        self._records = LedgerRecords(store, timeout_s=timeout_s)
        self._member = member
        self._timeout_s = timeout_s

    async def __call__(self, ledger: int) -> BookieCode:
        """Return the verdict on the ledger's ordinary adds. OK: admit. FENCED, NO_SUCH_LEDGER:
        refuse permanently. OVERLOADED: the check failed, or the writer has replaced this bookie.
        IO_ERROR: the ledger's metadata cannot be decoded."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._look(LedgerId(ledger))
        except (MetadataError, TimeoutError) as error:
            log.warning("first add not verified", ledger=ledger, error=str(error) or "no answer")
            damaged = isinstance(error, InvalidRecord)
            return BookieCode.IO_ERROR if damaged else BookieCode.OVERLOADED

    async def _look(self, ledger: LedgerId) -> BookieCode:
        """Judge metadata that was read after a sync. When the bookie deletes a left-over copy of a
        closed ledger (see `collector`), it deletes the ledger's fence, too. Then only this check
        refuses the adds of an outdated writer, and stale metadata could show an open ledger."""
        await self._store.sync(paths.ledger(ledger))
        code = self._judge(await self._records.get(ledger))
        if code is not BookieCode.OK:
            log.warning("first add refused", ledger=ledger, code=code.name)
        return code

    def _judge(self, metadata: LedgerMetadata | None) -> BookieCode:
        if metadata is None:
            return BookieCode.NO_SUCH_LEDGER
        if metadata.state is not LedgerState.OPEN:
            return BookieCode.FENCED
        if self._member in metadata.last_segment.members:
            return BookieCode.OK
        # The writer replaced this bookie while the add was in flight, and may choose it again
        # later. So the answer must not make the writer give up the ledger.
        return BookieCode.OVERLOADED
