"""The register of callbacks calls them in order and independently. It calls no callback after its
removal."""

from __future__ import annotations

from magnetar.metadata.store import SessionState
from magnetar.metadata.watches import Watches


def test_the_same_function_twice_is_two_registrations() -> None:
    watches = Watches()
    calls: list[str] = []

    def call() -> None:
        calls.append("called")

    remove = watches.add("/a", call)
    watches.add("/a", call)
    watches.fire(["/a"])
    assert len(calls) == 2
    remove()
    remove()
    watches.fire(["/a"])
    assert len(calls) == 3
    assert watches.paths == ["/a"]


def test_a_callback_may_add_and_remove_while_all_are_called() -> None:
    watches = Watches()
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        remove_second()
        watches.add("/a", lambda: calls.append("late"))

    watches.add("/a", first)
    remove_second = watches.add("/a", lambda: calls.append("second"))
    watches.fire(["/a", "/b"])
    assert calls == ["first"]
    assert "/a" in watches
    assert "/b" not in watches


def test_clear_removes_session_callbacks() -> None:
    watches = Watches()
    states: list[SessionState] = []
    remove = watches.add_session(states.append)
    watches.fire_session(SessionState.LOST)
    remove()
    watches.fire_session(SessionState.CONNECTED)
    watches.add_session(states.append)
    watches.add("/a", lambda: states.append(SessionState.CLOSED))
    watches.clear()
    watches.fire(["/a"])
    watches.fire_session(SessionState.CLOSED)
    assert states == [SessionState.LOST]
