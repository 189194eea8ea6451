"""The delayed entries of a subscription: their delivery times and positions, in flat arrays.

Theory of operation. The index puts new entries into a *buffer*. When the buffer has RUN_ENTRIES
entries, the index *seals* the buffer: it makes a *run* of the entries. A run has the positions in
ascending order, the delivery time of each position, and the order of the delivery times. No entry
is added to a run later. A byte for each entry says whether the entry is removed. A heap has the
next due entry of each run. If the removal of a single entry leaves at most a quarter of its run,
the index moves the remaining entries back into the buffer.

The entries arrive in the order of the log, so most entries of a run are neighbours. Acknowledging
the log up to a position drops whole runs. With random delays, the remaining entries of an old run
are sealed together with later entries. So the positions of a new run may span many other runs. To
look up a position without a search in the runs, the index has a bitmap for each ledger. A set bit
says that the entry is in a run. Only the removal of a single entry searches the runs.

An entry's delivery time never changes, so the index may keep entries over a seek and a change of
the subscription type. An entry takes 19 bytes in a run, and about 250 bytes in the buffer. A ledger
with entries in runs also takes a bit for each of its entries.

Invariants (`check`):
    1. An entry is in the index at most once.
    2. `len` is the number of entries that are not removed.
    3. The heap of runs has an item for each run: the run's next due entry, or an entry that was due
       earlier and is removed.
    4. The set bits are those of the entries of all runs, without the removed entries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from magnetar.broker.log.bitmap import Bitmap
from magnetar.broker.log.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RUN_ENTRIES: Final = 1_024
"""The number of entries of the buffer at which the index makes a run of them, in about 0.5 ms. The
buffer takes up to 250 KB. A million entries make about 1,000 runs."""

DUE_MS_MAX: Final = 253_402_300_799_999
"""The end of the year 9999, in milliseconds since 1970. The index replaces later delivery times by
this value."""

_ENTRY_BITS: Final = 32  # a ledger has fewer than 2^32 entries
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1

_Due = tuple[int, int, int]  # delivery time, ledger, entry


class DelayedIndex:
    """The delayed entries of one subscription. The index calls `on_sealed` with each run that it
    makes of the buffer, and `on_dropped` with each run that it no longer uses. The remaining
    entries of a dropped run go back into the buffer, except in `clear`."""

    def __init__(self, run_entries: int = RUN_ENTRIES) -> None:
        self.on_sealed: Callable[[Run], None] = _ignore
        self.on_dropped: Callable[[Run], None] = _ignore
        self._run_entries = run_entries
        self._buffer: dict[Position, int] = {}  # delivery times
        self._buffer_heap: list[_Due] = []  # every entry of the buffer, and removed entries
        self._runs: list[Run] = []  # sorted by first position; none is empty
        # For each run: the last position of this and all earlier runs.
        self._lasts: list[Position] = []
        # An item for each run, and old items.
        self._heads: list[tuple[int, int, int, int, Run]] = []
        self._bits: dict[int, Bitmap] = {}  # entries of runs, by ledger; none is empty
        self._in_runs = 0  # entries of runs, without the removed ones
        self._serial = 0  # makes the tuples of `_heads` comparable

    def __len__(self) -> int:
        return self._in_runs + len(self._buffer)

    def __contains__(self, position: Position) -> bool:
        if position in self._buffer:
            return True
        bits = self._bits.get(position.ledger)
        return bits is not None and position.entry >= 0 and position.entry in bits

    def __iter__(self) -> Iterator[tuple[Position, int]]:
        """Yield the positions and delivery times, in no order."""
        yield from self._buffer.items()
        for run in self._runs:
            yield from run.left()

    @property
    def memory_bytes(self) -> int:
        """An estimate of the memory that the index takes, in bytes."""
        return 19 * sum(len(run.keys) for run in self._runs) + 250 * len(self._buffer_heap)

    @property
    def next_due_ms(self) -> int | None:
        """The earliest delivery time. None: the index is empty."""
        buffered, in_run = self._buffer_head(), self._run_head()
        if buffered is None:
            return None if in_run is None else in_run[0]
        return buffered[0] if in_run is None else min(buffered[0], in_run[0])

    def add(self, position: Position, due_ms: int) -> None:
        """Add an entry. Does nothing if the index already has the entry."""
        assert self._run_entries > 0, "this index takes no entries"
        if position in self:
            return
        due_ms = min(max(due_ms, 0), DUE_MS_MAX)
        self._buffer[position] = due_ms
        heappush(self._buffer_heap, (due_ms, *position))
        if len(self._buffer) >= self._run_entries:
            self._seal()

    def take_due(self, until_ms: int, count: int) -> list[Position]:
        """Remove up to `count` entries that are due at or before `until_ms`, and return their
        positions. The earliest delivery time comes first. Entries with the same delivery time are
        in the order of the log."""
        taken: list[Position] = []
        while len(taken) < count:
            buffered, in_run = self._buffer_head(), self._run_head()
            if in_run is None or (buffered is not None and buffered < in_run[:3]):
                if buffered is None or buffered[0] > until_ms:
                    break
                heappop(self._buffer_heap)
                position = Position(buffered[1], buffered[2])
                del self._buffer[position]
            else:
                if in_run[0] > until_ms:
                    break
                position, run = Position(in_run[1], in_run[2]), in_run[4]
                self._remove_at(run, run.place(position))
            taken.append(position)
        return taken

    def discard(self, position: Position) -> bool:
        """Remove an entry. Returns True when the index had the entry."""
        if self._buffer.pop(position, None) is not None:
            self._tidy_buffer()
            return True
        if position not in self:
            return False
        self._remove_at(*self._find(position))
        return True

    def discard_through(self, position: Position) -> None:
        """Remove every entry up to `position`."""
        if self._buffer:
            gone = [it for it in self._buffer if it <= position]
            for it in gone:
                del self._buffer[it]
            self._tidy_buffer()
        if not self._runs or self._runs[0].first > position:
            return
        for run in [run for run in self._runs if run.first <= position]:
            self._in_runs -= run.remove_through(position)
        for ledger in [ledger for ledger in self._bits if ledger <= position.ledger]:
            bits = self._bits[ledger]
            if ledger == position.ledger:
                bits.discard_through(position.entry)
            if ledger < position.ledger or not bits.count:
                del self._bits[ledger]
        self._tidy_runs()

    @property
    def buffered(self) -> int:
        """The number of entries that are in no run."""
        return len(self._buffer)

    def seal(self) -> None:
        """Make a run of the entries in the buffer. Does nothing if the buffer is empty."""
        if self._buffer:
            self._seal()

    def restore(self, items: Sequence[tuple[Position, int]]) -> Run | None:
        """Add the entries of a stored run that the index does not have. `items` are as in Run.
        Returns the new run, or None if the index had all entries. Does not call `on_sealed`."""
        new = [item for item in items if item[0] not in self]
        if not new:
            return None
        run = Run(new)
        self._add_run(run)
        return run

    def clear(self) -> None:
        self._buffer.clear()
        self._buffer_heap.clear()
        for run in self._runs:
            self.on_dropped(run)
        self._runs.clear()
        self._lasts.clear()
        self._heads.clear()
        self._bits.clear()
        self._in_runs = 0

    def first_absent(self, position: Position) -> Position:
        """Return the first position at or after `position` that the index does not have. The method
        stays in the ledger: the position after an entry has the next entry id."""
        while position in self:
            bits = self._bits.get(position.ledger)
            after = position.entry if bits is None else bits.first_clear(position.entry)
            # If the bit of this entry is clear, the entry is in the buffer.
            position = Position(position.ledger, max(after, position.entry + 1))
        return position

    # ---- mechanics -------------------------------------------------------------------------------

    def _find(self, position: Position) -> tuple[Run, int]:
        """Return the run that has the entry, and the place of the entry in the run. A run must have
        the entry."""
        at = bisect_right(self._runs, position, key=_first_of) - 1
        while at >= 0 and self._lasts[at] >= position:
            run = self._runs[at]
            if position <= run.last:
                place = run.place(position)
                if place >= 0:
                    return run, place
            at -= 1
        raise AssertionError(f"no run has {position}")

    def _remove_at(self, run: Run, place: int) -> None:
        self._clear_bit(run.at(place))
        run.gone[place] = 1
        run.count -= 1
        self._in_runs -= 1
        if run.count * 4 <= len(run.keys):
            self._dissolve(run)

    def _dissolve(self, run: Run) -> None:
        """Move the remaining entries of a run into the buffer."""
        left = list(run.left())
        self._in_runs -= run.count
        run.count = 0
        self._tidy_runs()
        for position, due_ms in left:
            self._clear_bit(position)
            self._buffer[position] = due_ms
            heappush(self._buffer_heap, (due_ms, *position))
            if len(self._buffer) >= self._run_entries:
                self._seal()

    def _seal(self) -> None:
        run = Run(sorted(self._buffer.items()))
        self._buffer.clear()
        self._buffer_heap.clear()
        self._add_run(run)
        self.on_sealed(run)

    def _add_run(self, run: Run) -> None:
        if not self._runs or run.first > self._runs[-1].first:
            self._runs.append(run)
            self._lasts.append(max(run.last, self._lasts[-1]) if self._lasts else run.last)
        else:
            self._runs.insert(bisect_right(self._runs, run.first, key=_first_of), run)
            self._count_lasts()
        bits = [self._bits.setdefault(ledger, Bitmap()) for ledger in run.ledgers]
        for key in run.keys:
            bits[key >> _ENTRY_BITS].add(key & _ENTRY_MASK)
        self._in_runs += run.count
        self._serial += 1
        run.serial = self._serial
        heappush(self._heads, (*run.head(), run.serial, run))

    def _clear_bit(self, position: Position) -> None:
        bits = self._bits[position.ledger]
        bits.discard(position.entry)
        if not bits.count:
            del self._bits[position.ledger]

    def _count_lasts(self) -> None:
        self._lasts = list(accumulate((run.last for run in self._runs), max))

    def _tidy_runs(self) -> None:
        """Drop the empty runs."""
        kept = [run for run in self._runs if run.count]
        if len(kept) < len(self._runs):
            dropped = [run for run in self._runs if not run.count]
            self._runs = kept
            self._count_lasts()
            if len(self._heads) > 2 * len(kept) + 16:  # limits the items of dropped runs
                self._heads = [(*run.head(), run.serial, run) for run in kept]
                heapify(self._heads)
            for run in dropped:
                self.on_dropped(run)

    def _tidy_buffer(self) -> None:
        """Limit the number of removed entries in the heap."""
        if len(self._buffer_heap) > 2 * len(self._buffer) + 64:
            self._buffer_heap = [(due_ms, *at) for at, due_ms in self._buffer.items()]
            heapify(self._buffer_heap)

    def _buffer_head(self) -> _Due | None:
        heap, buffer = self._buffer_heap, self._buffer
        while heap:
            due_ms, ledger, entry = heap[0]
            if buffer.get(Position(ledger, entry)) == due_ms:
                return heap[0]
            heappop(heap)
        return None

    def _run_head(self) -> tuple[int, int, int, int, Run] | None:
        heads = self._heads
        while heads:
            run = heads[0][4]
            if run.count == 0:
                heappop(heads)
                continue
            head = run.head()
            if head == heads[0][:3]:
                return heads[0]
            heapreplace(heads, (*head, run.serial, run))
        return None

    def check(self) -> None:
        """Assert the invariants of the module's docstring."""
        positions = [position for position, _ in self]
        assert len(positions) == len(set(positions)) == len(self)
        assert all(run.count for run in self._runs)
        assert {run.serial for run in self._runs} <= {head[3] for head in self._heads}
        firsts = [run.first for run in self._runs]
        assert firsts == sorted(firsts)
        assert len(self._lasts) == len(self._runs)
        assert len(self._buffer_heap) <= 2 * len(self._buffer) + 64 + self._run_entries
        assert len(self._heads) <= 2 * len(self._runs) + 16
        for run in self._runs:
            assert run.count == run.gone.count(0)
        in_runs = {position for run in self._runs for position, _ in run.left()}
        assert sum(bits.count for bits in self._bits.values()) == len(in_runs) == self._in_runs
        assert all(position.entry in self._bits[position.ledger] for position in in_runs)
        assert all(bits.count for bits in self._bits.values())


class Run:
    """Entries in the order of the log and in the order of their delivery times. No entry is added
    later; a removed entry is only marked as removed."""

    __slots__ = (
        "count",
        "due_ms",
        "first",
        "gone",
        "keys",
        "last",
        "ledgers",
        "next",
        "order",
        "serial",
    )

    def __init__(self, items: Sequence[tuple[Position, int]]) -> None:
        """`items` are at most 65,536 pairs of a position and its delivery time, in ascending order
        of the positions."""
        self.first, self.last = items[0][0], items[-1][0]
        self.ledgers = sorted({position.ledger for position, _ in items})
        number = {ledger: at << _ENTRY_BITS for at, ledger in enumerate(self.ledgers)}
        self.keys = array("Q", [number[at.ledger] | at.entry for at, _ in items])
        self.due_ms = array("Q", [due_ms for _, due_ms in items])
        self.order = array("H", sorted(range(len(items)), key=self.due_ms.__getitem__))
        self.gone = bytearray(len(items))  # 1: removed
        self.count = len(items)
        self.next = 0  # an index in `order`; all entries before it are removed
        self.serial = 0

    def left(self) -> Iterator[tuple[Position, int]]:
        for place, key in enumerate(self.keys):
            if not self.gone[place]:
                yield self._position(key), self.due_ms[place]

    def at(self, place: int) -> Position:
        return self._position(self.keys[place])

    def head(self) -> _Due:
        """Return the entry that is due first. The run must have an entry that is not removed."""
        while self.gone[place := self.order[self.next]]:
            self.next += 1
        return self.due_ms[place], *self._position(self.keys[place])

    def place(self, position: Position) -> int:
        """Return the place of the entry in the run, or -1 if the run does not have the entry."""
        at = bisect_left(self.ledgers, position.ledger)
        if at == len(self.ledgers) or self.ledgers[at] != position.ledger:
            return -1
        if not 0 <= position.entry <= _ENTRY_MASK:  # a client may send such numbers
            return -1
        key = at << _ENTRY_BITS | position.entry
        place = bisect_left(self.keys, key)
        if place == len(self.keys) or self.keys[place] != key or self.gone[place]:
            return -1
        return place

    def remove_through(self, position: Position) -> int:
        """Remove every entry up to `position`. Returns the number of removed entries."""
        if self.last <= position:
            end = len(self.keys)
        else:
            at = bisect_right(self.ledgers, position.ledger) - 1
            whole = self.ledgers[at] < position.ledger
            entry = _ENTRY_MASK if whole else min(position.entry, _ENTRY_MASK)
            end = bisect_right(self.keys, (at << _ENTRY_BITS) + entry)
        removed = self.gone.count(0, 0, end)
        self.gone[:end] = b"\x01" * end
        self.count -= removed
        return removed

    def _position(self, key: int) -> Position:
        return Position(self.ledgers[key >> _ENTRY_BITS], key & _ENTRY_MASK)


def _ignore(_: Run) -> None:
    """Do nothing: without a listener, the runs are in memory only."""


def _first_of(run: Run) -> Position:
    return run.first
