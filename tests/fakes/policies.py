"""Policies of a topic that a test sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from magnetar.metadata.policies import UNLIMITED, EffectivePolicies, Retention

if TYPE_CHECKING:
    from collections.abc import Callable


class SettablePolicies:
    """`PolicySource` without a metadata store. It has the broker's defaults until `set` is called,
    except for unlimited retention: so a test finds messages that it published before it
    subscribed."""

    def __init__(self, **changed: Any) -> None:
        kept = Retention(UNLIMITED, UNLIMITED)
        self.effective = replace(EffectivePolicies(), **{"retention": kept, **changed})
        self.is_fresh = True
        self._callbacks: dict[Callable[[], None], None] = {}

    def set(self, **changed: Any) -> None:
        """Change some policies and call the subscribers back."""
        self.effective = replace(self.effective, **changed)
        for callback in tuple(self._callbacks):
            callback()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks[callback] = None

        def end() -> None:
            self._callbacks.pop(callback, None)

        return end
