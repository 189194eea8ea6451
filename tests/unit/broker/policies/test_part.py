"""A copy of a stored value is unknown, stale or fresh, and never claims more than it knows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policies.part import Part


def test_a_new_part_is_unknown_and_needs_a_read() -> None:
    part: Part[int] = Part()
    assert not part.is_known
    assert not part.is_fresh
    assert part.wants_read


def test_a_change_during_a_read_leaves_the_part_stale() -> None:
    part: Part[int] = Part()
    part.begin_read()
    part.on_changed()
    assert part.on_read(1) is None
    assert part.is_known
    assert not part.is_fresh
    assert part.wants_read
    part.begin_read()
    assert part.on_read(2) == 1
    assert part.is_fresh


def test_a_failed_read_keeps_the_last_value_and_needs_another_read() -> None:
    part = Part(1)
    part.begin_read()
    part.on_failed()
    assert part.value == 1
    assert part.wants_read
    assert not part.is_fresh


def test_unusable_bytes_keep_the_last_value_until_the_stored_value_changes() -> None:
    part = Part(1)
    part.begin_read()
    part.on_unusable("not parsable")
    assert part.value == 1
    assert part.is_unusable
    assert not part.is_fresh
    assert not part.wants_read
    part.on_changed()
    assert not part.is_unusable
    part.begin_read()
    part.on_read(2)
    assert (part.is_fresh, part.trouble) == (True, "")


@given(st.lists(st.sampled_from(["change", "read", "fail", "unusable", "store"]), max_size=30))
def test_a_fresh_part_equals_the_stored_value(events: list[str]) -> None:
    """The stored number grows; each growth is reported by a change."""
    part: Part[int] = Part()
    stored, seen = 0, None  # seen: what the read under way has found; None: no read is under way
    for event in events:
        match event:
            case "change":
                part.on_changed()
            case "store":
                stored += 1
                part.on_changed()
            case "read" if seen is None and part.wants_read:
                part.begin_read()
                seen = stored
            case "read" if seen is not None:
                part.on_read(seen)
                seen = None
            case "fail" if seen is not None:
                part.on_failed()
                seen = None
            case "unusable" if seen is not None:
                part.on_unusable("why")
                seen = None
        part.check()
        assert not part.is_fresh or part.value == stored
