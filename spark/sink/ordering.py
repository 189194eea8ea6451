"""Puts the rows of a task into an order that depends on the rows alone.

After a shuffle, the rows of a repeated task can have another order. A streaming query cannot sort
rows before the sink. Rows that are equal in all columns may change places.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from magnetar.spark.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SORTED_BYTES_MAX: Final = 512 << 20  # the rows of one task, which are in memory together
BATCH_ROWS: Final = 10_000


def sorted_rows(
    batches: Iterable[pa.RecordBatch], *, bytes_max: int = SORTED_BYTES_MAX
) -> Iterator[pa.RecordBatch]:
    """Yield all rows, sorted by all columns. Raises InvalidOption if they are too large."""
    found: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        found.append(batch)
        size += batch.nbytes
        if size > bytes_max:
            reason = f"sorted: a task has more than {bytes_max} bytes of rows; use more partitions"
            raise InvalidOption("rowOrder", reason)
    if not found:
        return
    table = pa.Table.from_batches(found)
    keys = {f"c{number}": _sortable(column) for number, column in enumerate(table.columns)}
    order = pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys])
    yield from table.take(order).combine_chunks().to_batches(max_chunksize=BATCH_ROWS)


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_nested(column.type):
        return column
    return pa.chunked_array([[None if it is None else repr(it) for it in column.to_pylist()]])
