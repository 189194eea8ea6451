"""Gives a method the parameters of an options class, so that they are declared once."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")


def takes_parameters_of(
    options: Callable[P, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Convert a method of one options value to a method with the parameters of `options`."""

    def decorate(
        method: Callable[[Owner, Options], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        @functools.wraps(method)
        def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return method(self, options(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        theirs = inspect.signature(options).parameters.values()
        setattr(call, "__signature__", inspect.Signature([own, *theirs]))  # noqa: B010
        return call

    return decorate
