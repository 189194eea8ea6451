"""A pytest plugin: an async test runs on the virtual loop, or on a real one if it is marked
`real_loop`.

A test that needs sockets, threads or processes carries the marker, alone or for its module
(`pytestmark`). Both markers take the test's deadline, in the time of its loop:
`real_loop(deadline_s=240)`, `virtual_loop(deadline_s=60)`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest
from fakes.virtual_loop import run_virtual
from support import run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Replace an async test function by a plain one. pytest calls it with the test's arguments."""
    test = pyfuncitem.obj
    given = getattr(test, "hypothesis", None)  # Hypothesis calls the test once for each example
    if given is not None and inspect.iscoroutinefunction(given.inner_test):
        given.inner_test = _on_a_loop(given.inner_test, pyfuncitem)
    elif inspect.iscoroutinefunction(test):
        pyfuncitem.obj = _on_a_loop(test, pyfuncitem)


def _on_a_loop(
    test: Callable[..., Coroutine[Any, Any, None]], item: pytest.Function
) -> Callable[..., None]:
    real = item.get_closest_marker("real_loop")
    runner = run_virtual if real is None else run
    marker = real or item.get_closest_marker("virtual_loop") or pytest.mark.virtual_loop.mark
    if marker.args:
        raise TypeError(f"{marker.name} takes deadline_s by name, not {marker.args}")

    @functools.wraps(test)
    def call(*args: Any, **kwargs: Any) -> None:
        runner(test(*args, **kwargs), **marker.kwargs)

    return call
