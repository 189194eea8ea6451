"""Records survive storage whole, with what a newer version added; the rest is a typed error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata import codec, model
from magnetar.metadata.errors import (
    CorruptRecord,
    InvalidLedgerMetadata,
    InvalidRecord,
    UnsupportedFormat,
)
from magnetar.metadata.under_replication import (
    BadCopy,
    BookieDrain,
    CheckProgress,
    RepairPause,
    UnderReplication,
    joined,
)
from magnetar.protos import metadata_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

counts = st.integers(0, 2**63 - 1)
u64s = st.integers(0, 2**64 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
incarnations = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
ledger_ids = counts.map(model.LedgerId)
properties = st.dictionaries(names, names, max_size=3)


@st.composite
def ledgers(draw: st.DrawFn) -> model.LedgerMetadata:
    ensemble = draw(st.integers(1, 4))
    write = draw(st.integers(1, ensemble))
    starts = sorted({0, *draw(st.lists(st.integers(1, 2**40), max_size=4))})
    segments = tuple(
        model.Segment(
            model.EntryId(start),
            tuple(
                model.Member(model.BookieId(bookie), draw(incarnations))
                for bookie in draw(
                    st.lists(names, min_size=ensemble, max_size=ensemble, unique=True)
                )
            ),
        )
        for start in starts
    )
    state = draw(st.sampled_from(model.LedgerState))
    last, length = None, None
    if state is model.LedgerState.CLOSED:
        last = model.EntryId(draw(st.integers(starts[-1] - 1, 2**62)))
        length = 0 if last == -1 else draw(counts)
    return model.LedgerMetadata(
        ledger=draw(ledger_ids),
        state=state,
        ensemble_size=ensemble,
        write_quorum=write,
        ack_quorum=draw(st.integers(1, write)),
        segments=segments,
        master_key=draw(u64s),
        creator_token=draw(u64s),
        created_ms=draw(counts),
        last_entry=last,
        length=length,
        under_replicated=draw(st.booleans()),
        custom=draw(st.dictionaries(names, st.binary(max_size=8), max_size=3)),
    )


@st.composite
def topics(draw: st.DrawFn) -> model.TopicRecord:
    ids = sorted(draw(st.sets(ledger_ids, max_size=6)))
    indexes = sorted(draw(st.lists(counts, min_size=len(ids), max_size=len(ids))))
    parts = [
        model.TopicLedger(ledger, index, draw(counts), draw(counts), draw(counts))
        for ledger, index in zip(ids, indexes, strict=True)
    ]
    cut = draw(st.integers(0, len(parts)))
    return model.TopicRecord(
        epoch=draw(counts),
        ledgers=tuple(parts[:cut]),
        cursor_ledgers=tuple(draw(st.lists(st.sampled_from(ids[:cut]), max_size=2)) if cut else ()),
        subscriptions=draw(
            st.dictionaries(
                names,
                st.builds(model.SubscriptionRecord, properties, st.binary(max_size=8)),
                max_size=3,
            )
        ),
        deleting=tuple(part.ledger for part in parts[cut:]),
        properties=draw(properties),
        dropped=draw(heads) if cut == 0 else None,
    )


heads = st.none() | st.builds(model.DroppedHead, ledger_ids, counts.map(model.EntryId), counts)


@st.composite
def bundles(draw: st.DrawFn) -> model.NamespaceBundles:
    inner = draw(st.sets(st.integers(1, model.HASH_SPACE - 1), max_size=5))
    return model.NamespaceBundles((0, *sorted(inner), model.HASH_SPACE))


members = st.builds(model.Member, names.map(model.BookieId), incarnations)


@st.composite
def marks(draw: st.DrawFn) -> UnderReplication:
    bad = []
    for member in draw(st.lists(members, max_size=3)):
        first = draw(st.integers(0, 2**40))
        last = model.EntryId(first + draw(st.integers(0, 9)))
        bad.append(BadCopy(member, model.EntryId(first), last))
    return UnderReplication(
        created_ms=draw(counts),
        lost=frozenset(draw(st.lists(members, max_size=3))),
        bad=joined(bad),
        narrow=draw(st.booleans()),
        failure=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        failed_ms=draw(counts),
    )


RECORDS: dict[
    str, tuple[Callable[[Any], bytes], Callable[[bytes], Any], st.SearchStrategy[Any]]
] = {
    "ledger": (codec.encode_ledger, codec.decode_ledger, ledgers()),
    "counter": (codec.encode_ledger_counter, codec.decode_ledger_counter, ledger_ids),
    "cluster": (codec.encode_cluster, codec.decode_cluster, incarnations),
    "registration": (
        codec.encode_bookie_registration,
        codec.decode_bookie_registration,
        st.builds(
            model.BookieRegistration,
            bookie=names.map(model.BookieId),
            incarnation=incarnations,
            boot_epoch=counts,
            address=names,
            http_address=st.text(max_size=5),
            zone=st.text(max_size=5),
            read_only=st.booleans(),
            unknown=st.just(b""),
        ),
    ),
    "cookie": (
        codec.encode_bookie_cookie,
        codec.decode_bookie_cookie,
        st.builds(
            model.BookieCookie,
            names.map(model.BookieId),
            incarnations,
            counts,
            names,
            incarnations | st.just(""),
        ),
    ),
    "broker": (
        codec.encode_broker_registration,
        codec.decode_broker_registration,
        st.builds(
            model.BrokerRegistration,
            names.map(model.BrokerId),
            incarnations,
            names,
            st.text(max_size=5),
            st.text(max_size=5),
        ),
    ),
    "mark": (codec.encode_under_replication, codec.decode_under_replication, marks()),
    "progress": (
        codec.encode_check_progress,
        codec.decode_check_progress,
        st.builds(CheckProgress, counts, st.integers(-1, 2**63 - 1), counts),
    ),
    "drain": (
        codec.encode_bookie_drain,
        codec.decode_bookie_drain,
        st.builds(BookieDrain, names.map(model.BookieId), counts, st.booleans()),
    ),
    "pause": (
        codec.encode_repair_pause,
        codec.decode_repair_pause,
        st.builds(RepairPause, counts, st.text(max_size=50)),
    ),
    "ownership": (
        codec.encode_ownership,
        codec.decode_ownership,
        st.builds(model.Ownership, names.map(model.BrokerId), incarnations, counts),
    ),
    "bundles": (codec.encode_bundles, codec.decode_bundles, bundles()),
    "topic": (codec.encode_topic, codec.decode_topic, topics()),
}


@pytest.mark.parametrize("kind", RECORDS)
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_decoded_is_what_was_encoded(kind: str, data: st.DataObject) -> None:
    encode, decode, records = RECORDS[kind]
    record = data.draw(records)
    stored = encode(record)
    assert decode(stored) == record
    assert encode(decode(stored)) == stored


@pytest.mark.parametrize("kind", RECORDS)
@settings(max_examples=40)
@given(data=st.data())
def test_other_bytes_are_a_typed_error_or_a_valid_record(kind: str, data: st.DataObject) -> None:
    encode, decode, records = RECORDS[kind]
    stored = bytearray(encode(data.draw(records)))
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(stored[: data.draw(st.integers(0, len(stored)))])
    try:
        decoded = decode(cut)
    except InvalidRecord:
        return
    assert decode(encode(decoded)) == decoded


def test_equal_records_are_equal_bytes_whatever_the_order_of_their_maps() -> None:
    one = model.TopicRecord(1, properties={"a": "1", "b": "2", "c": "3"})
    two = model.TopicRecord(1, properties={"c": "3", "a": "1", "b": "2"})
    assert codec.encode_topic(one) == codec.encode_topic(two)


# ---- formats and damage --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECORDS)
def test_a_later_format_is_refused_by_its_number(kind: str) -> None:
    _, decode, _ = RECORDS[kind]
    with pytest.raises(UnsupportedFormat) as error:
        decode(pb.LedgerCounter(format=2).SerializeToString())
    assert error.value.version == 2
    with pytest.raises(CorruptRecord, match="format"):
        decode(b"")
    with pytest.raises(CorruptRecord):
        decode(b"\xff\xff\xff")


def _ledger_message() -> pb.LedgerMetadata:
    metadata = model.LedgerMetadata(
        ledger=model.LedgerId(7),
        state=model.LedgerState.OPEN,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(model.Segment(model.EntryId(0), (member("b1"),)),),
        master_key=1,
        creator_token=2,
        created_ms=3,
    )
    message = pb.LedgerMetadata()
    message.ParseFromString(codec.encode_ledger(metadata))
    return message


def member(name: str) -> model.Member:
    return model.Member(model.BookieId(name), "0" * 32)


def test_an_unspecified_or_unknown_state_is_corrupt() -> None:
    message = _ledger_message()
    for state in (0, 9):
        message.state = state  # type: ignore[assignment]
        with pytest.raises(CorruptRecord, match=f"state {state}"):
            codec.decode_ledger(message.SerializeToString())


def test_invariants_are_checked_on_decoding() -> None:
    message = _ledger_message()
    message.segments[0].members.append(message.segments[0].members[0])
    with pytest.raises(InvalidLedgerMetadata):
        codec.decode_ledger(message.SerializeToString())
    message = _ledger_message()
    message.last_entry = 4
    with pytest.raises(InvalidLedgerMetadata):
        codec.decode_ledger(message.SerializeToString())


# ---- fields of a newer version -------------------------------------------------------------------


def _newer(message_name: str, additions: list[str]) -> type[Message]:
    """The class of a message as a newer version may define it: the messages named in `additions`
    have a text field number 99."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "newer.proto", "newer"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_as_newer(file, additions))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"newer.{message_name}"))


def _as_newer(
    file: descriptor_pb2.FileDescriptorProto, additions: list[str]
) -> descriptor_pb2.FileDescriptorProto:
    for kind in file.message_type:
        for part in (
            *kind.field,
            *(field for nested in kind.nested_type for field in nested.field),
        ):
            if part.type_name:
                part.type_name = part.type_name.replace(".magnetar.metadata.", ".newer.")
        if kind.name in additions:
            kind.field.add(
                name="from_the_future", number=99, label="LABEL_OPTIONAL", type="TYPE_STRING"
            )
    return file


def test_fields_of_a_newer_version_survive_a_rewrite_at_every_level_of_a_ledger() -> None:
    newer = _newer("LedgerMetadata", ["LedgerMetadata", "Segment", "Member"])
    stored: Any = newer()
    stored.ParseFromString(_ledger_message().SerializeToString())
    stored.from_the_future = "top"
    stored.segments[0].from_the_future = "segment"
    stored.segments[0].members[0].from_the_future = "member"

    decoded = codec.decode_ledger(stored.SerializeToString())
    assert decoded == codec.decode_ledger(_ledger_message().SerializeToString())
    rewritten = replace(
        decoded.with_ensemble(model.EntryId(5), [member("b2")]), under_replicated=True
    )

    again: Any = newer()
    again.ParseFromString(codec.encode_ledger(rewritten))
    assert again.from_the_future == "top"
    assert [segment.from_the_future for segment in again.segments] == ["segment", ""]
    assert again.segments[0].members[0].from_the_future == "member"
    assert again.under_replicated
    assert again.segments[1].members[0].bookie == "b2"


def test_fields_of_a_newer_version_survive_a_rewrite_of_a_topic() -> None:
    newer = _newer("TopicRecord", ["TopicRecord", "TopicLedger", "SubscriptionRecord"])
    stored: Any = newer()
    record = model.TopicRecord(
        3,
        ledgers=(model.TopicLedger(model.LedgerId(1), 0), model.TopicLedger(model.LedgerId(2), 9)),
        subscriptions={"s": model.SubscriptionRecord({"k": "v"}, b"inline")},
    )
    stored.ParseFromString(codec.encode_topic(record))
    stored.from_the_future = "top"
    stored.ledgers[1].from_the_future = "ledger"
    stored.subscriptions["s"].from_the_future = "subscription"

    decoded = codec.decode_topic(stored.SerializeToString())
    assert decoded == record
    rewritten = replace(decoded, epoch=4, ledgers=decoded.ledgers[1:])

    again: Any = newer()
    again.ParseFromString(codec.encode_topic(rewritten))
    assert (again.epoch, again.from_the_future) == (4, "top")
    assert again.ledgers[0].from_the_future == "ledger"
    assert again.subscriptions["s"].from_the_future == "subscription"
    assert again.subscriptions["s"].inline == b"inline"


def test_fields_of_a_newer_version_survive_in_every_other_record() -> None:
    extra = b"\x9a\x06\x03abc"  # field 99, text "abc"
    for kind in ("registration", "cookie", "broker", "ownership", "bundles"):
        encode, decode, _ = RECORDS[kind]
        stored = encode(EXAMPLES[kind]) + extra
        assert decode(stored) == EXAMPLES[kind]
        assert encode(decode(stored)) == stored, kind


EXAMPLES = {
    "registration": model.BookieRegistration(
        model.BookieId("b"), "a" * 32, 1, "h:1", "h:2", "z", read_only=True
    ),
    "cookie": model.BookieCookie(model.BookieId("b"), "a" * 32, 1, "c", "d" * 32),
    "broker": model.BrokerRegistration(model.BrokerId("b"), "a" * 32, "grpc://h:1", "", ""),
    "ownership": model.Ownership(model.BrokerId("b"), "a" * 32, 5),
    "bundles": model.NamespaceBundles(),
}


def test_stored_bytes_stay_readable() -> None:
    """Golden bytes: what is in someone's store today must be read tomorrow."""
    stored = bytes.fromhex(
        "080110071801200128013001"
        "3a281226"
        "0a02623112203030303030303030303030303030303030303030303030303030303030303030"
        "410100000000000000490200000000000000" + "5003"
    )
    assert stored == _ledger_message().SerializeToString(deterministic=True)
    assert codec.decode_ledger(stored).ledger == 7
