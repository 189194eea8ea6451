"""ByteBudget: the memory that all ledgers of a process may use for entries in flight.

Each ledger reports its use (`account`): in total, and for bookies that answer later than the
others. At `retained_bytes_max`, callers wait in `wait_room`. Above `lag_bytes_max` for one bookie,
the ledgers that notice this fail its seat, if their other seats are enough to confirm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.bookie.ledger.add_stream import AddStream


@dataclass(slots=True)
class Account:
    """The last report of one ledger."""

    retained: int = 0
    lag: int = 0
    laggards: Sequence[AddStream] = ()


class ByteBudget:
    def __init__(self, *, retained_bytes_max: int, lag_bytes_max: int) -> None:
        self.retained = 0
        self.lagging = 0  # the part of `retained` that only late bookies need
        self._retained_bytes_max = retained_bytes_max
        self._lag_bytes_max = lag_bytes_max
        self._lag: dict[AddStream, int] = {}
        self._waiting: dict[object, Callable[[], None]] = {}

    @property
    def exhausted(self) -> bool:
        return self.retained >= self._retained_bytes_max

    def lags(self, stream: AddStream) -> bool:
        """Return whether the entries that are kept for this late bookie exceed the limit."""
        return self._lag.get(stream, 0) > self._lag_bytes_max

    def account(
        self, account: Account, *, retained: int, lag: int, laggards: Sequence[AddStream]
    ) -> None:
        """Record that one ledger keeps `retained` bytes, `lag` of them only for `laggards`."""
        if account.lag:
            for stream in account.laggards:
                self._lag[stream] -= account.lag
        if lag:
            for stream in laggards:
                self._lag[stream] = self._lag.get(stream, 0) + lag
        was_exhausted = self.exhausted
        self.retained += retained - account.retained
        self.lagging += lag - account.lag
        account.retained, account.lag, account.laggards = retained, lag, laggards
        if was_exhausted and not self.exhausted:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting.values():
                wake()

    def when_room(self, key: object, wake: Callable[[], None]) -> None:
        """Call `wake` once, when the budget next ceases to be exhausted."""
        self._waiting[key] = wake

    def check(self) -> None:
        assert self.retained >= 0
        assert all(lag >= 0 for lag in self._lag.values())
