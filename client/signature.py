"""Methods whose parameters are written once: in an options class, or in the function that makes a
message of them."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.runtime.clock import Clock

P = ParamSpec("P")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")


def taking(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Make a method of one options value into one that takes the parameters of `options`."""

    def decorate(
        method: Callable[[Owner, Options], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        @functools.wraps(method)
        def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return method(self, options(*args, **kwargs))

        _show(call, list(inspect.signature(options).parameters.values()))
        return call

    return decorate


class Sender(Protocol):
    _clock: Clock


Face = TypeVar("Face", bound=Sender)


def sending(
    make: Callable[Concatenate[Clock, P], Options],
) -> Callable[[Callable[[Face, Options], Result]], Callable[Concatenate[Face, P], Result]]:
    """Make a method of what `make` returns into one that takes the parameters of `make`, without
    the clock. A coroutine function stays one, and raises the errors of `make` when it is awaited.
    """

    def decorate(
        method: Callable[[Face, Options], Any],
    ) -> Callable[Concatenate[Face, P], Any]:
        @functools.wraps(method)
        async def call_later(self: Face, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            return await method(self, make(self._clock, *args, **kwargs))

        @functools.wraps(method)
        def call(self: Face, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            return method(self, make(self._clock, *args, **kwargs))

        made = call_later if inspect.iscoroutinefunction(method) else call
        _show(made, list(inspect.signature(make).parameters.values())[1:])
        return made

    return decorate


def _show(call: Callable[..., object], parameters: list[inspect.Parameter]) -> None:
    """Let `inspect.signature` report these parameters."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    setattr(call, "__signature__", inspect.Signature([own, *parameters]))  # noqa: B010
