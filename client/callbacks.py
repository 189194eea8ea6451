"""Calls the user's callbacks. The client logs an exception of a callback and continues."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from threading import current_thread, main_thread
from typing import ParamSpec

from magnetar.client.errors import PulsarException, Result
from magnetar.client.message import MessageId
from magnetar.runtime.log import get_logger

log = get_logger(__name__)

P = ParamSpec("P")

SendCallback = Callable[["Result", "MessageId"], object]
"""Called as `callback(result, message_id)`. If the result is not Ok, `message_id` names no message:
its ledger and entry ids are -1."""


def report(
    callback: SendCallback | None, error: PulsarException | None, message_id: MessageId | None
) -> None:
    """Call the user's callback with the outcome of a send."""
    if callback is None:
        return
    try:
        callback(_OK if error is None else error.result, message_id or _NO_MESSAGE)
    except _FAILURES as failure:
        _go_on_after(failure, callback)


def call(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function of the user."""
    try:
        function(*args, **kwargs)
    except _FAILURES as failure:
        _go_on_after(failure, function)


def _go_on_after(failure: BaseException, callback: object) -> None:
    """Log the failure, or raise it if it is a SystemExit in the main thread.

    In a thread of the client, a SystemExit would end this thread silently, and callers that wait
    for the thread would hang.
    """
    if isinstance(failure, SystemExit) and current_thread() is main_thread():
        raise failure
    log.error("a callback failed", exc_info=failure, callback=repr(callback))


# CancelledError: a callback that asks a cancelled future for its result must not look like the
# cancellation of the client's own task, which would end the session.
_FAILURES = (Exception, SystemExit, CancelledError)
_NO_MESSAGE = MessageId()
_OK = Result.Ok  # the attribute lookup on the enum costs as much as a call
