"""Decorators that copy the parameters of a method from the one place that declares them: an options
class, or the function that makes a message."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.runtime.clock import Clock

P = ParamSpec("P")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")


def takes_parameters_of(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Convert a method that takes one options object to a method that takes the parameters of
    `options` and makes the object from them."""

    def decorate(
        method: Callable[[Owner, Options], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        @functools.wraps(method)
        def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return method(self, options(*args, **kwargs))

        _show(call, list(inspect.signature(options).parameters.values()))
        return call

    return decorate


def sending(
    make: Callable[Concatenate[Clock, P], object],
) -> Callable[[Callable[Concatenate[Owner, ...], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Declare that a method passes its arguments on to `make`, which takes a clock before them.

    The method is not wrapped: only type checkers and `inspect.signature` see the difference.
    """

    def decorate(
        method: Callable[Concatenate[Owner, ...], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        _show(method, list(inspect.signature(make).parameters.values())[1:])
        return method

    return decorate


def _show(call: Callable[..., object], parameters: list[inspect.Parameter]) -> None:
    """Let `inspect.signature` report these parameters."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    setattr(call, "__signature__", inspect.Signature([own, *parameters]))  # noqa: B010
