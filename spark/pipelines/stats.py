"""Statistics of topics by topic and by key, as a table and as a picture.

The picture shows messages over time for each topic, and the keys with the most messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from magnetar.spark.errors import PlotMissing
from magnetar.spark.pipelines.reading import key_column, messages, own_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

KEYS_SHOWN: Final = 20
INTERVALS: Final = 60  # the number of time intervals in the picture
COLUMNS: Final = "value binary, __key binary, __topic string, __publishTime timestamp"


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one topic, or of one key in a topic."""

    topic: str  # short name
    key: str | None  # None: the counts are those of the whole topic
    messages: int
    bytes: int  # the size of the payloads
    first: datetime | None  # publish time, UTC
    last: datetime | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The report of `statistics`."""

    topics: list[Counted]
    keys: list[Counted]  # the keys with the most messages, at most KEYS_SHOWN
    keys_count: dict[str, int]  # the number of keys of each topic
    over_time: dict[str, list[tuple[float, int]]]  # by topic: begin of an interval (s), messages


def statistics(
    spark: SparkSession, *, connection: Mapping[str, str], topics: Sequence[str]
) -> Statistics:
    """Read the topics, and count. Raises Spark's exceptions, which wrap the source's errors."""
    spark = own_session(spark)
    rows = messages(spark, connection, topics, COLUMNS).select(
        F.regexp_replace("__topic", "^persistent://public/default/", "").alias("topic"),
        key_column().alias("key"),
        F.coalesce(F.length("value"), F.lit(0)).alias("bytes"),
        F.col("__publishTime").cast("double").alias("time_s"),
    )
    # Three jobs use the rows. Without the cache, each of them would read the topics. Spark moves
    # cached rows to the disk when memory is short.
    rows.cache()
    try:
        return statistics_of(rows)
    finally:
        rows.unpersist()


def statistics_of(rows: DataFrame) -> Statistics:
    """Count messages. `rows` has a row for each message: topic, key, bytes, time_s."""
    counts = (F.count("*"), F.sum("bytes"), F.min("time_s"), F.max("time_s"))
    by_topic = rows.groupBy("topic").agg(*counts, F.count_distinct("key")).collect()
    by_key = (
        rows.where("key is not null")
        .groupBy("topic", "key")
        .agg(*counts)
        .orderBy(F.desc("count(1)"), "topic", "key")
        .limit(KEYS_SHOWN)
        .collect()
    )
    begin = min((row[3] for row in by_topic), default=0.0)
    step = max((row[4] - begin for row in by_topic), default=0.0) / INTERVALS or 1.0
    # The last interval includes its end, which is the time of the last message.
    interval = F.least(F.floor((F.col("time_s") - begin) / step), F.lit(INTERVALS - 1))
    over_time: dict[str, list[tuple[float, int]]] = {}
    for topic, number, count in sorted(rows.groupBy("topic", interval).count().collect()):
        over_time.setdefault(topic, []).append((begin + number * step, count))
    return Statistics(
        sorted(
            (_counted(row[0], None, row[1:5]) for row in by_topic), key=lambda found: found.topic
        ),
        [_counted(row[0], row[1], row[2:6]) for row in by_key],
        {row[0]: row[5] for row in by_topic},
        over_time,
    )


def _counted(topic: str, key: str | None, numbers: Sequence[float]) -> Counted:
    count, size, first, last = numbers
    return Counted(topic, key, int(count), int(size), _moment(first), _moment(last))


def _moment(time_s: float) -> datetime:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_s, UTC)


def require_plot() -> None:
    """Raise PlotMissing if there is no matplotlib."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise PlotMissing


def picture(found: Statistics, path: Path) -> None:
    """Write the picture, a PNG of 1200 x 800 pixels. Raises PlotMissing, OSError."""
    require_plot()
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # a "$" in a key is not the start of a formula
        _draw(found, path)


def _draw(found: Statistics, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    for topic, points in found.over_time.items():
        times = [_moment(time_s) for time_s, _ in points]
        above.plot(times, [count for _, count in points], marker=".", label=topic)
    above.set(title="messages over time", ylabel="messages", xlabel="published (UTC)")
    above.legend()
    names = [f"{key.topic}: {key.key}" for key in found.keys]
    below.barh(names[::-1], [key.messages for key in found.keys][::-1])
    below.set(title=f"the {len(names)} keys with the most messages", xlabel="messages")
    figure.savefig(path, dpi=100, format="png")
