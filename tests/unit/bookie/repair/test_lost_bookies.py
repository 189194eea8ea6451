"""The conditions under which bookies are declared lost, and the times of the declarations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie.repair.lost_bookies import LostBookies, Presence
from magnetar.metadata.model import BookieId, Member


def member(number: int, incarnation: int = 1) -> Member:
    return Member(BookieId(f"b{number}"), f"{incarnation:032x}")


def cluster(size: int) -> dict[BookieId, str]:
    return {member(n).bookie: member(n).incarnation for n in range(size)}


def all_but(size: int, *missing: int) -> list[Member]:
    return [member(n) for n in range(size) if n not in missing]


def test_t29_a_missing_member_is_awaited_and_then_lost() -> None:
    lost_bookies = LostBookies(delay_s=600, at_once_max=1)
    lost_bookies.on_bookies(cluster(4), all_but(4, 2), (), now=1000)
    assert lost_bookies.presence(member(2)) is Presence.AWAITED
    assert lost_bookies.presence(member(1)) is Presence.PRESENT
    assert lost_bookies.timer_at() == 1600
    lost_bookies.on_bookies(cluster(4), all_but(4, 2), (), now=1599.9)
    assert lost_bookies.presence(member(2)) is Presence.AWAITED
    lost_bookies.on_bookies(cluster(4), all_but(4, 2), (), now=1600)
    assert lost_bookies.presence(member(2)) is Presence.LOST
    assert lost_bookies.timer_at() is None
    lost_bookies.on_bookies(cluster(4), all_but(4), (), now=1700)
    assert lost_bookies.presence(member(2)) is Presence.PRESENT
    lost_bookies.on_bookies(cluster(4), all_but(4, 2), (), now=1800)
    assert lost_bookies.presence(member(2)) is Presence.AWAITED, "the delay starts again"


def test_t29_when_many_are_missing_at_once_none_is_declared_lost() -> None:
    lost_bookies = LostBookies(delay_s=600, at_once_max=1)
    for now in (0, 10_000):
        lost_bookies.on_bookies(cluster(10), all_but(10, 1, 2), (), now)
        assert lost_bookies.held
        assert lost_bookies.timer_at() is None
        assert lost_bookies.presence(member(1)) is Presence.AWAITED
    # One bookie is back, and the other may return, too: the delay starts again.
    lost_bookies.on_bookies(cluster(10), all_but(10, 1), (), now=10_001)
    assert not lost_bookies.held
    assert lost_bookies.presence(member(1)) is Presence.AWAITED
    assert lost_bookies.timer_at() == 10_601
    lost_bookies.on_bookies(cluster(10), all_but(10, 1), (), now=10_601)
    assert lost_bookies.presence(member(1)) is Presence.LOST
    # A bookie that is lost already does not count: the next one may be lost too.
    lost_bookies.on_bookies(cluster(10), all_but(10, 1, 2), (), now=10_602)
    assert not lost_bookies.held
    lost_bookies.on_bookies(cluster(10), all_but(10, 1, 2), (), now=11_202)
    assert lost_bookies.given_up == {member(1), member(2)}


def test_more_than_a_third_is_too_many_whatever_the_limit() -> None:
    lost_bookies = LostBookies(delay_s=0, at_once_max=5)
    lost_bookies.on_bookies(cluster(6), all_but(6, 0, 1), (), now=0)
    assert not lost_bookies.held
    lost_bookies.on_bookies(cluster(8), all_but(8, 0, 1, 2, 3, 4), (), now=1)
    assert lost_bookies.held, "three more of eight"
    lost_bookies.on_bookies(cluster(2), all_but(2, 0), (), now=2)
    assert not lost_bookies.held, "the bookie was lost before"
    lost_bookies = LostBookies(delay_s=0, at_once_max=5)
    lost_bookies.on_bookies(cluster(2), all_but(2, 0), (), now=0)
    assert lost_bookies.held


def test_a_decommission_declares_only_the_named_bookies_lost() -> None:
    lost_bookies = LostBookies(delay_s=600, at_once_max=1)
    lost_bookies.on_bookies(cluster(9), all_but(9, 1, 2), (), now=0)
    assert lost_bookies.held
    lost_bookies.on_bookies(cluster(9), all_but(9, 1, 2), {member(1).bookie}, now=600)
    assert not lost_bookies.held
    assert lost_bookies.presence(member(2)) is Presence.AWAITED, (
        "the delay for bookie 2 alone has not begun"
    )
    lost_bookies.on_bookies(cluster(9), all_but(9, 1, 2), {member(1).bookie}, now=1200)
    assert lost_bookies.presence(member(2)) is Presence.LOST
    # The auditor moves the ledgers in any case.
    assert lost_bookies.presence(member(1)) is Presence.AWAITED


def test_a_former_incarnation_is_lost_at_once_and_an_unknown_bookie_is_not() -> None:
    lost_bookies = LostBookies(delay_s=600, at_once_max=1)
    known = {**cluster(3), member(1).bookie: member(1, 2).incarnation}
    listed = [member(0), member(1, 2), member(2)]
    lost_bookies.on_bookies(known, listed, (), now=0)
    assert lost_bookies.presence(member(1)) is Presence.LOST
    assert lost_bookies.presence(member(1, 2)) is Presence.PRESENT
    assert lost_bookies.presence(member(7)) is Presence.UNKNOWN
    assert not lost_bookies.held


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.floats(0, 400)),
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_no_bookie_is_declared_lost_early_or_when_too_many_are_missing(
    looks: list[tuple[set[int], set[int], float]], at_once_max: int
) -> None:
    """Compare with a simple model. For each bookie, the model keeps the time since which the bookie
    has been missing without a break and not too many other bookies were missing."""
    lost_bookies, now, since = LostBookies(delay_s=300, at_once_max=at_once_max), 0.0, {}
    in_crowd = False
    for missing, leaving, pause in looks:
        now += pause
        since = {n: since.get(n, now) for n in missing}
        before = lost_bookies.given_up
        lost_bookies.on_bookies(
            cluster(6), all_but(6, *missing), {member(n).bookie for n in leaving}, now
        )
        lost_bookies.check()
        fresh = lost_bookies.given_up - before
        assert all(now >= since[int(each.bookie[1:])] + 300 for each in fresh)
        crowd = {n for n in missing if member(n) not in before and n not in leaving}
        if len(crowd) > at_once_max or len(crowd) > 2:
            assert lost_bookies.held
            assert not fresh
            in_crowd = True
        elif in_crowd:
            assert not fresh
            since |= dict.fromkeys(crowd, now)
            in_crowd = False
        timer_at = lost_bookies.timer_at()
        assert timer_at is None or timer_at > now
