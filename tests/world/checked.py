"""While a world runs, every machine checks itself after every event: the event that causes a wrong
state fails."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from magnetar.bookie.ledger.recovery import LedgerRecovery
from magnetar.bookie.ledger.writer import LedgerWriter
from magnetar.broker.dispatch.exclusive import Exclusive
from magnetar.broker.dispatch.failover import Failover
from magnetar.broker.dispatch.key_shared import KeyShared
from magnetar.broker.dispatch.shared import Shared
from magnetar.broker.dispatch.single_active import SingleActive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MACHINES: Final = (
    LedgerWriter,
    LedgerRecovery,
    SingleActive,
    Exclusive,
    Failover,
    Shared,
    KeyShared,
)
EVENTS: Final = ("add_consumer", "remove_consumer", "advance")
"""Methods that are events, besides those whose names begin with `on_`."""


@contextmanager
def checked() -> Iterator[None]:
    """Check the machines in this block. A failed check is a bug of the process where it fails."""
    right = [
        (machine, name, method)
        for machine in MACHINES
        for name, method in list(vars(machine).items())
        if name.startswith("on_") or name in EVENTS
    ]
    for machine, name, method in right:
        setattr(machine, name, _checking(method))
    try:
        yield
    finally:
        for machine, name, method in right:
            setattr(machine, name, method)


_busy: set[int] = set()  # machines within an event


def _checking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checking(self: Any, *positional: Any, **named: Any) -> Any:
        if id(self) in _busy:  # the event was called by another event
            return method(self, *positional, **named)
        _busy.add(id(self))
        try:
            actions = method(self, *positional, **named)
        finally:
            _busy.discard(id(self))
        self.check()
        return actions

    return checking
