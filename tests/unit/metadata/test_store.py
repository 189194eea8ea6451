"""`update` on a store that loses requests and replies, and with concurrent writers."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata.errors import (
    Contended,
    NotEmpty,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.memory import Fault, MemoryStore, MemoryTree
from magnetar.metadata.store import (
    ABSENT,
    DELETE,
    KEEP,
    UPDATE_ATTEMPTS_MAX,
    Verdict,
    Versioned,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def script(*faults: Fault | None, on: str = "put") -> Callable[[str, str], Fault | None]:
    """Faults for the first requests of this kind, in order. Later requests succeed."""
    left = list(faults)
    return lambda operation, path: left.pop(0) if operation == on and left else None


def adding(token: str) -> Callable[[bytes | None], bytes | Verdict]:
    """A change that adds a word to the value, unless the value has the word already."""

    def change(stored: bytes | None) -> bytes | Verdict:
        words = (stored or b"").decode().split()
        return KEEP if token in words else " ".join([*words, token]).encode()

    return change


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("operation", ["put", "get", "sync"])
async def test_update_succeeds_after_any_fault_of_any_step(fault: Fault, operation: str) -> None:
    faults = script(fault, on=operation)
    first = script(Fault.REPLY_LOST) if operation == "sync" else script()
    store = MemoryStore(faults=lambda *call: faults(*call) or first(*call))
    assert await update(store, "/a", adding("x"), deadline=later(10)) == Versioned(b"x", 0)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
async def test_each_change_takes_effect_once_when_requests_or_replies_are_lost(seed: int) -> None:
    chance = random.Random(seed)
    rate = chance.choice([0.0, 0.2, 0.6])

    def faults(operation: str, path: str) -> Fault | None:
        return chance.choice(list(Fault)) if chance.random() < rate else None

    tree = MemoryTree()
    stores = [
        MemoryStore(tree, delay_s=lambda: chance.expovariate(100), faults=faults) for _ in range(3)
    ]

    async def worker(number: int) -> None:
        for step in range(4):
            store = stores[number]
            if chance.random() < 0.3:
                store.fall_behind()
            await update(store, "/a", adding(f"{number}-{step}"), deadline=later(600))

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(worker(number))
    stored = tree.tree.get("/a")
    assert stored is not None
    words = stored.value.decode().split()
    assert sorted(words) == [f"{number}-{step}" for number in range(3) for step in range(4)]
    for number in range(3):
        assert [word for word in words if word.startswith(f"{number}-")] == [
            f"{number}-{step}" for step in range(4)
        ]


async def test_the_change_is_called_again_with_the_value_of_the_winner() -> None:
    tree = MemoryTree()
    store, rival = MemoryStore(tree), MemoryStore(tree)
    await store.put("/a", b"0", expected=ABSENT)
    asked: list[bytes | None] = []

    def change(stored: bytes | None) -> bytes:
        asked.append(stored)
        if len(asked) == 1:
            tree.tree.put("/a", b"rival", 0)
        return b"mine"

    assert await update(store, "/a", change, deadline=later(1)) == Versioned(b"mine", 2)
    assert asked == [b"0", b"rival"]
    await rival.close()


async def test_an_applied_delete_whose_reply_was_lost_is_done() -> None:
    store = MemoryStore(faults=script(Fault.REPLY_LOST, on="delete"))
    await store.put("/a", b"", expected=ABSENT)
    assert await update(store, "/a", lambda stored: DELETE, deadline=later(1)) is None
    assert await store.get("/a") is None


async def test_update_deletes_a_node_that_a_lagging_follower_does_not_show() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree, faults=script(Fault.REQUEST_LOST, on="sync"))
    store.fall_behind()
    tree.tree.put("/a", b"", ABSENT)
    assert await update(store, "/a", lambda stored: DELETE, deadline=later(1)) is None
    assert tree.tree.get("/a") is None


async def test_after_a_lost_reply_an_old_value_of_a_lagging_follower_is_not_used() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree, faults=script(Fault.REQUEST_LOST))
    asked: list[bytes | None] = []

    def change(stored: bytes | None) -> bytes | Verdict:
        asked.append(stored)
        return KEEP if stored == b"mine" else b"mine"

    def change_on_the_old_server(stored: bytes | None) -> bytes | Verdict:
        answer = change(stored)
        if len(asked) == 1:  # the reply and the server are lost; the next server lags behind
            tree.tree.put("/a", b"mine", ABSENT)
        return answer

    store.fall_behind()
    assert await update(store, "/a", change_on_the_old_server, deadline=later(5)) == Versioned(
        b"mine", 0
    )
    assert asked == [None, b"mine"]


async def test_the_timeout_error_says_whether_the_change_may_have_happened() -> None:
    async def attempt(faults: Callable[[str, str], Fault | None]) -> None:
        await update(MemoryStore(faults=faults), "/a", adding("x"), deadline=later(1))

    with pytest.raises(Unavailable):
        await attempt(lambda operation, path: Fault.NOT_SENT)
    with pytest.raises(Unavailable):
        await attempt(lambda operation, path: Fault.NOT_SENT if operation == "put" else None)
    with pytest.raises(Unavailable):
        await attempt(lambda operation, path: Fault.REPLY_LOST if operation == "get" else None)
    lost = script(Fault.REPLY_LOST)
    away = script(*[Fault.NOT_SENT] * 1000, on="sync")
    with pytest.raises(OutcomeUnknown):
        await attempt(lambda *request: lost(*request) or away(*request))


async def test_a_change_under_way_at_the_deadline_raises_outcome_unknown() -> None:
    store = MemoryStore(delay_s=lambda: 0.4)
    with pytest.raises(OutcomeUnknown):
        await update(store, "/a", adding("x"), deadline=later(0.6))
    await asyncio.sleep(1)
    assert await store.get("/a") == Versioned(b"x", 0)  # the change took effect


async def test_update_that_loses_every_race_raises_contended() -> None:
    tree = MemoryTree()
    store = MemoryStore(tree)
    await store.put("/a", b"", expected=ABSENT)

    def change(stored: bytes | None) -> bytes:
        node = tree.tree.get("/a")
        assert node is not None
        tree.tree.put("/a", b"rival", node.version)
        return b"mine"

    with pytest.raises(Contended) as error:
        await update(store, "/a", change, deadline=later(10**6))
    assert error.value.attempts == UPDATE_ATTEMPTS_MAX
    assert error.value.definite


async def test_the_callers_own_error_and_other_refusals_pass_through() -> None:
    class NotMine(Exception):
        pass

    def give_up(stored: bytes | None) -> bytes:
        raise NotMine

    store = MemoryStore()
    with pytest.raises(NotMine):
        await update(store, "/a", give_up, deadline=later(1))
    await store.put("/a/b", b"", expected=ABSENT)
    with pytest.raises(NotEmpty):
        await update(store, "/a", lambda stored: DELETE, deadline=later(1))


async def test_an_ephemeral_value_keeps_its_session() -> None:
    store = MemoryStore()
    await store.create_ephemeral("/a", b"1")
    result = await update(store, "/a", lambda stored: b"2", deadline=later(1))
    assert result == Versioned(b"2", 1, store.session_id)
