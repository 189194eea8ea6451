"""Every machine checks itself after every event, as long as a world runs: a wrong state is found
at its birth."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from magnetar.bookie.ledger.recovery import LedgerRecovery
from magnetar.bookie.ledger.writer import LedgerWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MACHINES: Final = (LedgerWriter, LedgerRecovery)


@contextmanager
def checked() -> Iterator[None]:
    """Failed checks are bugs of the process in which they fail."""
    right = [
        (machine, name, method)
        for machine in MACHINES
        for name, method in list(vars(machine).items())
        if name.startswith("on_")
    ]
    for machine, name, method in right:
        setattr(machine, name, _checking(method))
    try:
        yield
    finally:
        for machine, name, method in right:
            setattr(machine, name, method)


def _checking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checking(self: LedgerWriter | LedgerRecovery, *positional: Any, **named: Any) -> Any:
        actions = method(self, *positional, **named)
        self.check()
        return actions

    return checking
