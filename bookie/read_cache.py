"""A bookie's read cache: entries that were read recently.

Theory. RocksDB verifies each value at every read, in software and under the interpreter's lock.
This takes about 1 ms per MB, half of the cost of a read. Readers come in groups (subscriptions that
catch up, bookies that are rebuilt, Spark). So the cache keeps runs of entries in the form of the
bookie's answers, and evicts the least recently used run.

The cache never says no. The service asks the cache only for ledgers that the client may read, and
asks the store for entries that the cache does not hold. Code that deletes or replaces stored
entries calls `forget`, and the cache refuses a run whose read began before that (`epoch`). A scrub
and a recovery need the disk's contents and do not use the cache.

Invariants (see `check`):

1. No run of a ledger lies within another, so their ends ascend like their beginnings. If any run
   holds an entry, the last run that begins at or before the entry holds it.
2. `bytes` is the sum of the runs' costs, and at most `bytes_max`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from magnetar.protos.envelope import encode_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.runtime.frames import Buffer

# Python's memory besides the bytes of the entries. An entry has two objects and two list slots. A
# run has an object, a list, a key and three slots.
ENTRY_OVERHEAD_BYTES: Final = 160
RUN_OVERHEAD_BYTES: Final = 600


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive entries in the form of an answer; may be empty."""

    first: int
    count: int
    size: int  # bytes of the envelopes
    parts: Sequence[Buffer]  # two for each entry (`encode_run`)

    @classmethod
    def of(cls, first: int, envelopes: Sequence[bytes]) -> Run:
        return cls(first, len(envelopes), sum(map(len, envelopes)), encode_run(first, envelopes))

    @property
    def following(self) -> int:
        return self.first + self.count

    @property
    def cost(self) -> int:
        return self.size + self.count * ENTRY_OVERHEAD_BYTES + RUN_OVERHEAD_BYTES

    def cut(self, first: int, last: int, *, bytes_max: int, entries_max: int) -> Run:
        """Return the part from `first` on; the run must hold `first`. Limits as in
        `Storage.run`."""
        skipped = first - self.first
        count = min(self.count - skipped, last - first + 1, entries_max)
        if count == self.count and self.size - len(self.parts[-1]) < bytes_max:
            return self
        size = 0
        for number, envelope in enumerate(self.parts[2 * skipped + 1 :: 2], start=1):
            size += len(envelope)
            if number == count or size >= bytes_max:
                count = number
                break
        return Run(first, count, size, self.parts[2 * skipped : 2 * (skipped + count)])

    @classmethod
    def joined(cls, runs: Sequence[Run]) -> Run:
        """Return all runs as one run; each begins where the previous one ends."""
        assert all(run.following == other.first for run, other in pairwise(runs))
        parts = [part for run in runs for part in run.parts]
        count, size = sum(run.count for run in runs), sum(run.size for run in runs)
        return cls(runs[0].first, count, size, parts)


class ReadCache:
    """Used by the loop only. Holds nothing if `bytes_max` is 0."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.epoch = 0  # grows with each `forget`
        self.hits = 0  # calls of `get` that returned entries
        self.misses = 0  # calls of `get` that returned None
        self._bytes_max = bytes_max
        self._runs: OrderedDict[tuple[int, int], Run] = OrderedDict()  # keyed by (ledger, first)
        self._firsts: dict[int, list[int]] = {}  # of each ledger's runs, ascending

    def get(
        self, ledger: int, first: int, last: int, *, bytes_max: int, entries_max: int
    ) -> Run | None:
        """Return the entries from `first` on that the cache holds without a gap; None: it lacks
        `first`. Limits as in `Storage.run`. The caller asks the store for the other entries."""
        found: list[Run] = []
        while (run := self._run_with(ledger, first)) is not None:
            part = run.cut(first, last, bytes_max=bytes_max, entries_max=entries_max)
            found.append(part)
            first = part.following
            bytes_max -= part.size
            entries_max -= part.count
            if first > last or bytes_max <= 0 or entries_max <= 0:
                break
        if not found:
            self.misses += 1
            return None
        self.hits += 1
        return found[0] if len(found) == 1 else Run.joined(found)

    def put(self, ledger: int, run: Run, epoch: int) -> None:
        """Keep a run from the store, whose read began in `epoch`. Drop the run if that epoch is
        over, if another run holds all its entries, or if it is larger than the cache."""
        if epoch != self.epoch or run.count == 0 or run.cost > self._bytes_max:
            return
        firsts = self._firsts.get(ledger, [])
        before = bisect_right(firsts, run.first) - 1
        if before >= 0 and self._runs[ledger, firsts[before]].following >= run.following:
            return
        begin = end = bisect_left(firsts, run.first)
        while end < len(firsts) and self._runs[ledger, firsts[end]].following <= run.following:
            self.bytes -= self._runs.pop((ledger, firsts[end])).cost
            end += 1
        del firsts[begin:end]  # all at once: the list may have 80,000 elements
        if not firsts:
            self._firsts.pop(ledger, None)
        while self.bytes + run.cost > self._bytes_max:
            self._remove(*next(iter(self._runs)))
        firsts = self._firsts.setdefault(ledger, [])  # a list is removed with its last run
        firsts.insert(bisect_left(firsts, run.first), run.first)
        self._runs[ledger, run.first] = run
        self.bytes += run.cost

    def forget(self, ledger: int) -> None:
        """Drop all runs of the ledger, because entries of it were deleted or replaced."""
        self.epoch += 1
        for first in self._firsts.pop(ledger, ()):
            self.bytes -= self._runs.pop((ledger, first)).cost

    def check(self) -> None:
        assert self.bytes == sum(run.cost for run in self._runs.values()) <= self._bytes_max
        held = sorted((ledger, run.first, run.following) for (ledger, _), run in self._runs.items())
        assert [(ledger, first) for ledger, first, _ in held] == [
            (ledger, first) for ledger in sorted(self._firsts) for first in self._firsts[ledger]
        ]
        for (ledger, first, following), (other, next_first, end) in pairwise(held):
            assert ledger != other or (first < next_first and following < end)

    def _run_with(self, ledger: int, entry: int) -> Run | None:
        firsts = self._firsts.get(ledger)
        if firsts is None or firsts[0] > entry:
            return None
        key = ledger, firsts[bisect_right(firsts, entry) - 1]
        run = self._runs[key]
        if run.following <= entry:
            return None
        self._runs.move_to_end(key)
        return run

    def _remove(self, ledger: int, first: int) -> None:
        self.bytes -= self._runs.pop((ledger, first)).cost
        firsts = self._firsts[ledger]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[ledger]
