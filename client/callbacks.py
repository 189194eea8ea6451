"""The edge to the user's own code: what it raises is logged and does not stop the client."""

from __future__ import annotations

from collections.abc import Callable
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, ParamSpec

from magnetar.client.errors import PulsarException, Result
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.client.message import MessageId

log = get_logger(__name__)

P = ParamSpec("P")

SendCallback = Callable[["Result", "MessageId | None"], object]
"""Called as `callback(result, message_id)`; the id is None unless the result is Ok."""


def report(
    callback: SendCallback | None, error: PulsarException | None, message_id: MessageId | None
) -> None:
    """Tell a user's callback the outcome of a send."""
    if callback is None:
        return
    try:
        callback(_OK if error is None else error.result, message_id)
    except (Exception, SystemExit) as failure:
        _go_on_after(failure, callback)


def call(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call what a user gave us to call."""
    try:
        function(*args, **kwargs)
    except (Exception, SystemExit) as failure:
        _go_on_after(failure, function)


def _go_on_after(failure: BaseException, callback: object) -> None:
    """Exiting ends the program only from its main thread: one of ours would end alone and without
    a word, and whoever waits for it would wait for ever."""
    if isinstance(failure, SystemExit) and current_thread() is main_thread():
        raise failure
    log.error("a callback failed", exc_info=failure, callback=repr(callback))


_OK = Result.Ok  # looking it up costs as much as a call
