from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from magnetar.protos.names import TopicName
from magnetar.spark.source.filters import Pushed, pushed

INDEX, PARTITION, TOPIC = ("__index",), ("__partition",), ("__topic",)
PUBLISHED, EVENT, KEY = ("__publishTime",), ("__eventTime",), ("__key",)
NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

comparisons = st.one_of(
    st.builds(
        lambda kind, value: kind(INDEX, value),
        st.sampled_from([EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]),
        st.integers(-2, 8),
    ),
    st.builds(
        lambda values: In(INDEX, tuple(values)),
        st.lists(st.none() | st.integers(0, 8), min_size=1).filter(any),
    ),
)


def meets(one: Any, value: int) -> bool:
    match one:
        case In(_, values):
            return value in values
        case EqualTo(_, wanted):
            return bool(value == wanted)
        case GreaterThan(_, wanted):
            return bool(value > wanted)
        case GreaterThanOrEqual(_, wanted):
            return bool(value >= wanted)
        case LessThan(_, wanted):
            return bool(value < wanted)
    return bool(value <= one.value)


@given(st.lists(comparisons, max_size=3))
def test_bounds_and_mask_keep_all_rows_that_meet_the_filters(filters: list[Filter]) -> None:
    found = pushed(filters)
    assert list(found.filters) == filters
    met = [index for index in range(8) if all(meets(one, index) for one in filters)]
    first, end = found.index_bounds()
    assert all(first <= index and (end is None or index < end) for index in met)
    mask = found.mask(pa.record_batch({"__index": pa.array(range(8), pa.int64())}))
    kept = (
        range(8) if mask is None else [it for it, is_kept in enumerate(mask.to_pylist()) if is_kept]
    )
    assert list(kept) == met


def test_filters_of_other_kinds_and_columns_are_not_used() -> None:
    assert not pushed(
        [
            EqualTo(("value",), b"x"),
            EqualTo(("value", "__key"), b"x"),
            EqualTo(INDEX, "5"),
            EqualTo(INDEX, True),
            EqualTo(PUBLISHED, datetime(2013, 1, 1)),  # noqa: DTZ001  (has no time zone)
            In(INDEX, (None,)),
            EqualNullSafe(INDEX, 5),
            IsNull(KEY),
            Not(EqualTo(INDEX, 5)),
        ]
    ).filters


def test_topics_and_partitions_are_kept_if_a_row_of_them_can_meet_the_filters() -> None:
    names = ["a", "b-partition-0", "b-partition-1"]

    def kept(*filters: Filter) -> list[str]:
        found = pushed([EqualTo(INDEX, 5), *filters])
        return [name for name in names if found.keeps_topic(TopicName.parse(name))]

    assert kept() == names
    assert kept(EqualTo(TOPIC, "persistent://public/default/a")) == ["a"]
    assert kept(GreaterThan(PARTITION, 0)) == ["b-partition-1"]
    assert kept(In(PARTITION, (-1, 0))) == ["a", "b-partition-0"]
    assert kept(LessThan(PARTITION, 1), GreaterThanOrEqual(PARTITION, 0)) == ["b-partition-0"]


@pytest.mark.parametrize(
    ("filters", "bounds"),
    [
        ([EqualTo(KEY, b"k")], None),
        ([GreaterThan(PUBLISHED, NOON)], (1_357_041_600_000, 1 << 63)),
        ([LessThan(PUBLISHED, NOON)], (0, 1_357_041_600_000)),
        ([EqualTo(PUBLISHED, NOON)], (1_357_041_600_000, 1_357_041_600_000)),
        (
            [
                GreaterThanOrEqual(PUBLISHED, NOON),
                LessThanOrEqual(PUBLISHED, NOON + timedelta(seconds=1)),
            ],
            (1_357_041_600_000, 1_357_041_601_000),
        ),
        ([GreaterThan(PUBLISHED, LAST)], (253_402_300_800_000, 1 << 63)),
        ([LessThan(PUBLISHED, FIRST)], (0, -62_135_596_800_000)),
    ],
)
def test_publish_times_of_entries_have_bounds(
    filters: list[Filter], bounds: tuple[int, int] | None
) -> None:
    assert pushed(filters).publish_ms_bounds() == bounds


def test_null_keys_and_times_meet_no_filter() -> None:
    times = pa.array([None, NOON, NOON + timedelta(hours=1)], pa.timestamp("us", "UTC"))
    batch = pa.record_batch({"__key": pa.array([b"k", None, b"k"]), "__eventTime": times})
    for one, met in [
        (EqualTo(KEY, b"k"), [True, False, True]),
        (In(KEY, (b"j", b"k")), [True, False, True]),
        (GreaterThan(EVENT, NOON), [False, False, True]),
    ]:
        mask = pushed([one]).mask(batch)
        assert mask is not None
        assert mask.to_pylist() == met
    assert Pushed().mask(batch) is None
