from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protos.message import OutgoingMessage
from magnetar.spark.errors import RowRefused
from magnetar.spark.sink.batches import BYTES_MAX, MESSAGES_MAX, Cutter, Entry
from magnetar.spark.sink.columns import Addressed, Encoder, Target
from magnetar.spark.sink.identity import Identity
from magnetar.spark.sink.options import parse_options

TOPIC = "persistent://public/default/t"


def encoded(rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> list[Addressed]:
    encoder = Encoder(TOPIC if "__topic" not in rows[0] else None, 3)
    return list(encoder.messages(pa.RecordBatch.from_pylist(rows, schema=schema)))


def test_a_row_becomes_a_message_with_all_its_parts() -> None:
    schema = pa.schema(
        {
            "value": pa.binary(),
            "__key": pa.string(),
            "__eventTime": pa.timestamp("us", "UTC"),
            "__messageProperties": pa.map_(pa.string(), pa.string()),
        }
    )
    rows = [
        {"value": b"v", "__key": "", "__eventTime": 1_999, "__messageProperties": [("a", "b")]},
        {"value": None, "__key": None, "__eventTime": None, "__messageProperties": None},
    ]
    first, second = (addressed.message for addressed in encoded(rows, schema))
    assert (first.payload, first.partition_key, first.event_time_ms) == (b"v", "", 1)
    assert first.properties == {"a": "b"}
    assert second.null_value
    assert second.partition_key is None
    assert not second.event_time_ms


def test_a_key_that_is_not_text_is_in_base64() -> None:
    [one, other] = encoded([{"value": b"", "__key": b"\xff"}, {"value": b"", "__key": b"a"}])
    assert (one.message.partition_key, one.message.partition_key_b64) == ("/w==", True)
    assert (other.message.partition_key, other.message.partition_key_b64) == ("a", False)


def test_rows_count_on_over_batches_and_name_what_is_refused() -> None:
    encoder = Encoder(TOPIC, 3)
    good = pa.RecordBatch.from_pylist([{"value": b"v", "__eventTime": 1}] * 5)
    bad = pa.RecordBatch.from_pylist([{"value": b"v", "__eventTime": -1}])
    assert [addressed.row for addressed in encoder.messages(good)] == [0, 1, 2, 3, 4]
    with pytest.raises(RowRefused) as raised:
        list(encoder.messages(bad))
    assert (raised.value.partition, raised.value.row) == (3, 5)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == "row 5 of partition 3, column '__eventTime': is before 1970"


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", "UTC")])
def test_a_time_that_python_does_not_have_is_refused_with_its_row(kind: pa.DataType) -> None:
    """Spark has dates before year 1, and timestamps after year 9999."""
    times = pa.array([0, 0, -800_000 if kind == pa.date32() else 1 << 62]).cast(
        pa.int32() if kind == pa.date32() else pa.int64()
    )
    for name, column in (
        ("at", times.cast(kind)),
        ("value", pa.StructArray.from_arrays([times.cast(kind)], names=["at"])),
    ):
        encoder = Encoder(TOPIC, 3)
        rows = pa.RecordBatch.from_arrays([column], names=[name])
        assert len(list(encoder.messages(rows.slice(0, 2)))) == 2
        with pytest.raises(RowRefused, match="row 4 of partition 3") as raised:
            list(encoder.messages(rows))
        assert "is not JSON" in raised.value.reason


def test_a_property_without_a_value_is_refused_and_times_are_milliseconds() -> None:
    kind = pa.schema(
        [
            ("value", pa.binary()),
            ("__eventTime", pa.timestamp("us", "UTC")),
            ("__messageProperties", pa.map_(pa.string(), pa.string())),
        ]
    )
    row = {"value": b"v", "__eventTime": 1_356_998_400_123_456, "__messageProperties": []}
    encoder = Encoder(TOPIC, 0)
    [addressed] = encoder.messages(pa.RecordBatch.from_pylist([row], kind))
    assert addressed.message.event_time_ms == 1_356_998_400_123
    bad = pa.RecordBatch.from_pylist([row | {"__messageProperties": [("a", None)]}], kind)
    with pytest.raises(RowRefused, match=r"row 1 of .*'__messageProperties': property 'a' is null"):
        list(encoder.messages(bad))


def test_topics_of_rows_are_named_in_full() -> None:
    rows = [{"value": b"", "__topic": name} for name in ("t", TOPIC, "other")]
    one, same, other = (addressed.target for addressed in encoded(rows))
    assert one == same == Target(TOPIC)
    assert other.topic.endswith("/other")
    for bad in (None, "a//b", "non-persistent://a/b/c"):
        with pytest.raises(RowRefused, match="__topic"):
            encoded(
                [{"value": b"", "__topic": bad}],
                pa.schema({"value": pa.binary(), "__topic": pa.string()}),
            )


def test_structs_and_maps_become_json() -> None:
    schema = pa.schema({"value": pa.struct({"pairs": pa.map_(pa.string(), pa.int32())})})
    [one] = encoded([{"value": {"pairs": [("a", 1)]}}], schema)
    assert json.loads(one.message.payload) == {"pairs": {"a": 1}}


# -- Cutting -----------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 200), st.integers(BYTES_MAX - 50, BYTES_MAX + 50))
rows_of_task = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), sizes), max_size=60)


def cut(rows: list[tuple[int, int, int]], *, by_key: bool, first: int) -> list[Entry]:
    cutter = Cutter(first_sequence_id=first, by_key=by_key, open_bytes_max=2 * BYTES_MAX)
    entries: list[Entry] = []
    for row, (target, key, size) in enumerate(rows):
        message = OutgoingMessage(b"%d" % row, -1, partition_key=str(key))
        entries += cutter.add(Target(str(target)), message, size, row)
        cutter.check()
    return [*entries, *cutter.cut_all()]


def rows_in(entry: Entry) -> list[int]:
    rows = [int(message.payload) for message in entry.messages]
    assert (entry.first_row, entry.last_row) == (rows[0], rows[-1])
    return rows


@given(rows_of_task, st.booleans())
def test_every_message_is_in_one_entry_in_order_of_its_key(
    rows: list[tuple[int, int, int]], by_key: bool
) -> None:
    entries = cut(rows, by_key=by_key, first=10)
    numbers = [message.sequence_id for entry in entries for message in entry.messages]
    assert numbers == list(range(10, 10 + len(rows)))
    assert sorted(row for entry in entries for row in rows_in(entry)) == list(range(len(rows)))
    for entry in entries:
        assert entry.bytes <= BYTES_MAX or len(entry.messages) == 1
        if by_key:
            assert len({message.partition_key for message in entry.messages}) == 1
    for target in range(3):
        for key in range(4):
            placed = [
                row
                for entry in entries
                if entry.target.topic == str(target)
                for row in rows_in(entry)
                if rows[row][1] == key
            ]
            assert placed == sorted(placed)


@given(rows_of_task, st.booleans())
def test_the_same_rows_are_cut_into_the_same_entries(
    rows: list[tuple[int, int, int]], by_key: bool
) -> None:
    one, other = (cut(rows, by_key=by_key, first=0) for _ in range(2))
    assert list(map(rows_in, one)) == list(map(rows_in, other))


def test_an_entry_is_cut_when_it_holds_enough_messages() -> None:
    entries = cut([(0, 0, 10)] * (MESSAGES_MAX + 1), by_key=False, first=0)
    assert [len(entry.messages) for entry in entries] == [MESSAGES_MAX, 1]


def test_sequence_ids_rise_from_batch_to_batch() -> None:
    one, next_one = Identity("q", 4, 7), Identity("q", 5, 7)
    assert one.producer_name() == next_one.producer_name() == "spark/q/7"
    assert next_one.first_sequence_id == one.first_sequence_id + (1 << 31)
    assert Identity("q", (1 << 32) - 1, 0).first_sequence_id + (1 << 31) - 1 == (1 << 63) - 1


def test_options_that_divide_rows_into_entries_are_part_of_the_producer_name() -> None:
    needed = {"service.url": "grpc://h:1", "topic": "t"}
    plain, other = parse_options(needed), {"batching": "key", "pendingBytes": "2000000"}
    assert Identity("q", 0, 7, plain.division).producer_name() == "spark/q/7"
    changed = Identity("q", 0, 7, parse_options(needed | other).division)
    assert changed.producer_name(4) == "spark/q/7/by-key/pending-2000000/of-4"


def test_the_size_of_a_message_counts_bytes_not_characters() -> None:
    text = "日" * 1_000
    row = {"value": ["v"], "__key": [text], "__messageProperties": [[(text, text)]]}
    kinds = {"__messageProperties": pa.map_(pa.string(), pa.string())}
    arrays = [pa.array(column, kinds.get(name)) for name, column in row.items()]
    (addressed,) = Encoder("t", 0).messages(pa.RecordBatch.from_arrays(arrays, list(row)))
    assert addressed.size > 9_000
