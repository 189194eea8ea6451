"""Filters on metadata columns that Spark pushes down to a batch read.

The filters save work. The driver does not plan topics, partitions and ranges of `__index` that they
exclude. The executors do not uncompress entries whose publish time the filters exclude. They do not
decode the values of rows that a filter excludes, and do not pass these rows to Spark. Publish times
come from the clocks of producers and are in no order. So a filter on them excludes no part of a
topic from reading. Spark evaluates all filters again.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.protos.names import TopicName

COLUMNS: Final[dict[str, tuple[type, ...]]] = {
    "__topic": (str,),
    "__partition": (int,),
    "__index": (int,),
    "__publishTime": (datetime,),
    "__eventTime": (datetime,),
    "__key": (bytes, bytearray),
}
VALUES_MAX: Final = 10_000  # the values of one IN
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COMPARE: Final[dict[type[Filter], Callable[[pa.Array, pa.Scalar], pa.Array]]] = {
    EqualTo: pc.equal,
    LessThan: pc.less,
    LessThanOrEqual: pc.less_equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """Conditions that a row must meet, all of them."""

    filters: tuple[Filter, ...] = ()

    def keeps_topic(self, topic: TopicName) -> bool:
        """Return whether rows of a topic or partition can meet the conditions."""
        partition = -1 if topic.partition is None else topic.partition
        values: dict[str, object] = {"__topic": str(topic), "__partition": partition}
        return all(
            _holds(one, values[_column(one)]) for one in self.filters if _column(one) in values
        )

    def index_bounds(self) -> tuple[int, int | None]:
        """The index of the first message that can meet the conditions, and the index after the last
        such message. None: there is no last one."""
        first, last = _bounds([_range(one) for one in self._of("__index")])
        return max(first or 0, 0), None if last is None else max(last + 1, 0)

    def publish_ms_bounds(self) -> tuple[int, int] | None:
        """The first and the last publish time, in ms, of an entry that can meet the conditions.
        None: every entry can."""
        found = self._of("__publishTime")
        if not found:
            return None
        first, last = _bounds([_range(one) for one in found])
        # Rounded outwards: `mask` compares the exact times of the rows.
        return (0 if first is None else first // 1_000), (
            1 << 63 if last is None else -(-last // 1_000)
        )

    def mask(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The rows that meet the conditions. None: all rows."""
        mask: pa.Array | None = None
        for one in self.filters:
            column = batch.column(_column(one))
            if isinstance(one, In):
                found = pc.is_in(column, value_set=pa.array(_plain(one.value), column.type))
            else:
                value = pa.scalar(one.value, column.type)  # type: ignore[attr-defined]
                found = _COMPARE[type(one)](column, value)
            found = pc.fill_null(found, fill_value=False)
            mask = found if mask is None else pc.and_(mask, found)
        if mask is None or pc.all(mask).as_py() is not False:
            return None
        return mask

    def _of(self, column: str) -> list[Filter]:
        return [one for one in self.filters if _column(one) == column]


def pushed(filters: Sequence[Filter]) -> Pushed:
    """The conditions among the filters that a read can use."""
    return Pushed(tuple(one for one in filters if _is_usable(one)))


def _is_usable(one: Filter) -> bool:
    if not isinstance(one, (In, *_COMPARE)) or len(one.attribute) != 1:  # type: ignore[attr-defined]
        return False
    kinds = COLUMNS.get(_column(one))
    values = _plain(one.value) if isinstance(one, In) else [one.value]  # type: ignore[attr-defined]
    if kinds is None or not 0 < len(values) <= VALUES_MAX:
        return False
    return all(
        type(it) in kinds and (not isinstance(it, datetime) or it.tzinfo is not None)
        for it in values
    )


def _column(one: Filter) -> str:
    name: str = one.attribute[0]  # type: ignore[attr-defined]
    return name


def _plain(values: Any) -> list[Any]:
    """The values of IN without null, which no value equals."""
    return [it for it in values if it is not None]


def _holds(one: Filter, value: Any) -> bool:
    match one:
        case EqualTo(_, wanted):
            return bool(value == wanted)
        case In(_, values):
            return value in _plain(values)
        case LessThan(_, wanted):
            return bool(value < wanted)
        case LessThanOrEqual(_, wanted):
            return bool(value <= wanted)
        case GreaterThan(_, wanted):
            return bool(value > wanted)
        case GreaterThanOrEqual(_, wanted):
            return bool(value >= wanted)
    raise AssertionError(one)


def _range(one: Filter) -> tuple[int | None, int | None]:
    """The least and the greatest number that meet a condition. None: there is no limit. A time is a
    number of microseconds: there may be no datetime beyond a limit."""
    match one:
        case EqualTo(_, wanted):
            return _number(wanted), _number(wanted)
        case In(_, values):
            numbers = [_number(it) for it in _plain(values)]
            return min(numbers), max(numbers)
        case LessThan(_, wanted):
            return None, _number(wanted) - 1
        case LessThanOrEqual(_, wanted):
            return None, _number(wanted)
        case GreaterThan(_, wanted):
            return _number(wanted) + 1, None
        case GreaterThanOrEqual(_, wanted):
            return _number(wanted), None
    raise AssertionError(one)


def _number(value: int | datetime) -> int:
    if isinstance(value, datetime):
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value


def _bounds(ranges: Sequence[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """The intersection of all ranges."""
    firsts = [first for first, _ in ranges if first is not None]
    lasts = [last for _, last in ranges if last is not None]
    return max(firsts, default=None), min(lasts, default=None)
