"""A bookie's knowledge of brokers, and the cases in which the bookie answers "unknown"."""

from __future__ import annotations

from magnetar.bookie.contract import BEAT_S, LastHeard
from magnetar.bookie.witness import BROKERS_MAX, DEAF_S, Witness

A, B = ("a", "1" * 32), ("b", "2" * 32)


def beating(witness: Witness, *brokers: tuple[str, str], since: float, until: float) -> None:
    """Let the brokers send beats from `since` to `until`, both included."""
    for number in range(int((until - since) / BEAT_S) + 1):
        for broker in brokers:
            witness.on_beat(*broker, since + number * BEAT_S)
            witness.check()


def test_a_broker_that_was_never_heard_is_unknown() -> None:
    witness = Witness()
    assert witness.last_heard(*A, 100.0) is None
    witness.on_beat(*B, 100.0)
    assert witness.last_heard(*A, 101.0) is None


def test_another_run_of_a_broker_is_unknown() -> None:
    witness = Witness()
    witness.on_beat(*A, 0.0)
    assert witness.last_heard("a", "3" * 32, 0.1) is None


def test_a_broker_that_falls_silent_while_another_beats_is_silent_since_its_last_beat() -> None:
    witness = Witness()
    beating(witness, A, B, since=0.0, until=10.0)
    beating(witness, B, since=10.5, until=13.0)
    assert witness.last_heard(*A, 13.0) == LastHeard(heard_s=3.0, listening_s=13.0)
    assert witness.last_heard(*B, 13.0) == LastHeard(heard_s=0.0, listening_s=13.0)


def test_a_bookie_that_hears_no_broker_answers_unknown() -> None:
    """The bookie itself may have stood still."""
    witness = Witness()
    beating(witness, A, B, since=0.0, until=10.0)
    last = witness.last_heard(*A, 10.0 + DEAF_S + 0.1)
    assert last is not None
    assert last.silent_s == 0.0


def test_after_a_time_without_beats_the_bookie_answers_only_about_later_silence() -> None:
    witness = Witness()
    beating(witness, A, B, since=0.0, until=10.0)
    beating(witness, B, since=30.0, until=31.0)
    last = witness.last_heard(*A, 31.0)
    assert last == LastHeard(heard_s=21.0, listening_s=1.0)
    assert last.silent_s == 1.0


def test_beyond_the_limit_the_longest_silent_broker_is_forgotten() -> None:
    witness = Witness()
    witness.on_beat(*A, 0.0)
    witness.on_beat(*B, 0.1)
    witness.on_beat(*A, 0.2)
    for number in range(BROKERS_MAX - 1):
        witness.on_beat(f"c{number}", "4" * 32, 0.3)
        witness.check()
    assert witness.last_heard(*B, 0.3) is None
    assert witness.last_heard(*A, 0.3) is not None
