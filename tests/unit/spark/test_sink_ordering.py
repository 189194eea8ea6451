from __future__ import annotations

import itertools
import random

import pyarrow as pa
import pytest

from magnetar.spark.errors import InvalidOption
from magnetar.spark.sink.ordering import BATCH_ROWS, sorted_rows

KIND = pa.schema(
    [
        ("value", pa.struct([("a", pa.int64())])),
        ("__key", pa.binary()),
        ("__eventTime", pa.timestamp("us", "UTC")),
        ("__messageProperties", pa.map_(pa.string(), pa.string())),
    ]
)


def test_rows_have_one_order_however_they_arrive() -> None:
    draw = random.Random(1)
    rows = [
        {
            "value": draw.choice([None, {"a": draw.randrange(3)}]),
            "__key": draw.choice([None, b"", b"a", b"\xff"]),
            "__eventTime": draw.choice([None, 5, 6]),
            "__messageProperties": draw.choice([None, [], [("x", "1")], [("x", "2")]]),
        }
        for _ in range(BATCH_ROWS + 500)
    ]
    orders = []
    for _ in range(3):
        draw.shuffle(rows)
        cuts = [0, *sorted(draw.randrange(len(rows)) for _ in range(4)), len(rows)]
        batches = [
            pa.RecordBatch.from_pylist(rows[first:end], KIND)
            for first, end in itertools.pairwise(cuts)
        ]
        found = list(sorted_rows(batches))
        assert all(batch.num_rows <= BATCH_ROWS and batch.schema == KIND for batch in found)
        orders.append([row for batch in found for row in batch.to_pylist()])
    assert orders[0] == orders[1] == orders[2]
    assert sorted(map(repr, orders[0])) == sorted(
        map(repr, pa.RecordBatch.from_pylist(rows, KIND).to_pylist())
    )
    assert list(sorted_rows([])) == []


def test_too_many_bytes_are_refused() -> None:
    batch = pa.record_batch({"value": pa.array([b"x" * 100] * 10)})
    with pytest.raises(InvalidOption, match="more than 1000 bytes"):
        list(sorted_rows([batch], bytes_max=1_000))
