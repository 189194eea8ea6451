"""The ledgers that are read from bookies, and the driver's use of a broker's answer."""

from __future__ import annotations

import pickle

import grpc
from fakes.range_server import RangeServer, Topic, serving

from magnetar.metadata.model import BookieId, Member
from magnetar.protos import broker_pb2 as pb
from magnetar.spark.planner import Span
from magnetar.spark.sealed import DIRECT_BYTES_MIN, Sealed, worth_reading_directly
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.tasks import Task
from magnetar.spark.source.topic_view import TopicView, sealed_of
from magnetar.spark.topic_state import Ledger, TopicState

ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
MIB = 1 << 20


def copies(ledger: int, *members: int, **changed: int) -> pb.LedgerCopies:
    fields = {"last_entry": 9, "length": 90, "write_quorum": 2, "ack_quorum": 1, "read_key": 7}
    segment = pb.LedgerSegment(first_entry=0, members=members)
    return pb.LedgerCopies(ledger=ledger, segments=[segment], **(fields | changed))


def reply(*of: pb.LedgerCopies) -> pb.PlanTopicsReply:
    bookies = [
        pb.BookieData(bookie=name, incarnation=incarnation, address=address)
        for name, incarnation, address in (
            ("a", ONE, "a:1"),
            ("b", TWO, "b:1"),
            ("c", THREE, ""),
        )
    ]
    return pb.PlanTopicsReply(topics=[pb.TopicPlan(exists=True, copies=of)], bookies=bookies)


def test_an_answer_gives_ledgers_with_the_read_key_and_addresses() -> None:
    sealed = sealed_of(reply(copies(4, 0, 1), copies(5, 1, 2)))
    assert set(sealed.ledgers) == {4, 5}
    assert sealed.ledgers[4].master_key == 7
    assert [it.bookie for it in sealed.ledgers[5].last_segment.members] == ["b", "c"]
    assert sorted(sealed.addresses.values()) == ["", "a:1", "b:1"]


def test_an_answer_without_sense_is_left_out() -> None:
    bad = [
        copies(4, 0, 0),  # a bookie twice
        copies(5, 0, 9),  # there is no such bookie
        copies(6, 0, 1, write_quorum=3),
        copies(7, 0, 1, last_entry=-2),
        pb.LedgerCopies(ledger=8),
    ]
    assert set(sealed_of(reply(*bad, copies(9, 0, 1))).ledgers) == {9}


def test_a_task_carries_only_its_own_ledgers_and_is_small() -> None:
    sealed = sealed_of(reply(copies(4, 0, 1), copies(5, 1, 2)))
    own = sealed.only([5, 77])
    assert set(own.ledgers) == {5}
    assert set(own.addresses) == {Member(BookieId("b"), TWO), Member(BookieId("c"), THREE)}
    task = Task((), {}, {})
    task.sealed = own
    again = pickle.loads(pickle.dumps(task))
    assert again.sealed == own
    assert len(pickle.dumps(task)) < 1_500


def test_small_parts_and_open_ledgers_are_left_to_the_owner() -> None:
    ledgers = [Ledger(1, 9, 0, MIB, sealed=True), Ledger(2, 9, 10, MIB)]
    states = {"t": TopicState("", tuple(ledgers), 0, 20)}

    def spans(*parts: tuple[int, int]) -> list[Span]:
        return [Span(ledger, 0, 9, size, "t") for ledger, size in parts]

    assert worth_reading_directly([spans((1, DIRECT_BYTES_MIN))], states) == {"t": [1]}
    assert worth_reading_directly([spans((1, MIB // 2), (1, MIB // 2))], states) == {"t": [1]}
    assert worth_reading_directly([spans((1, MIB // 2))] * 2, states) == {}
    assert worth_reading_directly([spans((2, 50 * MIB), (3, 50 * MIB))], states) == {}


def test_the_ledgers_of_a_large_topic_are_asked_for_in_parts() -> None:
    server = RangeServer(Topic(), bookies=list(reply().bookies), copies=lambda it: copies(it, 0, 1))
    with serving(server):
        view = TopicView(parse_options({"service.url": server.url, "topic": "t"}))
        assert set(view.copies({"t": range(1_500), "u": range(2_000, 3_000)}).ledgers) == {
            *range(1_500),
            *range(2_000, 3_000),
        }
    assert server.copies_asked == [1_000, 1_000, 500]
    with serving(RangeServer(None)) as gone:
        lost = TopicView(parse_options({"service.url": gone.url, "topic": "t"}))
        gone.before_plan = lambda call: call.abort(grpc.StatusCode.UNAVAILABLE, "away")
        assert lost.copies({"t": [1]}) == Sealed()  # so the task reads from brokers


def test_the_ledgers_of_two_answers_are_one_plan() -> None:
    whole = sealed_of(reply(copies(4, 0, 1))).merged(sealed_of(reply(copies(5, 1, 2))))
    assert whole == sealed_of(reply(copies(4, 0, 1), copies(5, 1, 2)))
    assert Sealed().merged(whole) == whole
