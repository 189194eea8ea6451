from __future__ import annotations

from magnetar.broker.dispatch.permits import Consumer, Limits
from magnetar.broker.dispatch.rotation import Rotation


def consumer(name: str, priority: int = 0) -> Consumer:
    it = Consumer(name, priority, lambda: True, Limits())
    it.permits = 1
    return it


def order(rotation: Rotation, turns: int) -> str:
    names = []
    for _ in range(turns):
        it = rotation.next_available()
        names.append(it.name if it else "-")
        rotation.check()
    return "".join(names)


def test_turns_rotate_within_the_best_available_priority() -> None:
    rotation = Rotation()
    members = {name: consumer(name, priority=int(name == "d")) for name in "dabc"}
    for it in members.values():
        rotation.add(it)
    assert [it.name for it in rotation] == list("abcd")
    assert order(rotation, 5) == "abcab"
    members["c"].permits = members["a"].permits = 0
    assert order(rotation, 2) == "bb"
    members["b"].permits = 0
    assert order(rotation, 2) == "dd"
    members["d"].permits = 0
    assert order(rotation, 1) == "-"


def test_leaving_consumer_skips_no_turn() -> None:
    rotation = Rotation()
    members = {name: consumer(name) for name in "abcd"}
    for it in members.values():
        rotation.add(it)
    assert order(rotation, 2) == "ab"
    rotation.remove(members["a"])
    assert order(rotation, 2) == "cd"
    rotation.remove(members["d"])
    assert order(rotation, 2) == "bc"
    rotation.remove(members["b"])
    rotation.remove(members["c"])
    assert not rotation
    assert order(rotation, 1) == "-"
