"""Departure delays by carrier and hour: a streaming query of Spark, from a topic into a topic.

The query groups flights by carrier and by the hour of their event time. When Spark's watermark has
passed an hour, the query writes each group of the hour as one message in JSON. The sink writes each
message exactly once, because its topic is in a namespace with deduplication. The query never writes
the last hours: no later flight moves the watermark past them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.request import Request, urlopen
from zoneinfo import ZoneInfo

from magnetar.demo.delays import Delays

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NAMESPACE: Final = "public/exact"
TOPIC: Final = f"persistent://{NAMESPACE}/delays-by-hour"
TIME_ZONE: Final = "America/New_York"  # the time zone of the airports
BATCHES: Final = 3
# The delay of the watermark is the number of days that this many flights span. A batch of the
# producer holds 1,000 flights, sorted by carrier and not by time. 3,000 flights are about three
# days of the year. If the demo publishes only a part of the flights, 3,000 flights span more days.
WATERMARK_FLIGHTS: Final = 3_000
YEAR_DAYS: Final = 365
ADMIN_S: Final = 30.0

Hours = dict[tuple[str, int], Delays]
"""Delays by carrier and hour. The hour is given by its beginning, in seconds since 1970. The result
of `by_hour_of_day` has the hour of the day instead, 0 to 23."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """The content of the topic into which the query writes."""

    messages: int
    hours: Hours

    def equals(self, file: Hours) -> bool:
        """Return whether the topic holds each group of the file once, up to the last hour in the
        topic."""
        last = max((begin_s for _, begin_s in self.hours), default=0)
        closed = {group: delays for group, delays in file.items() if group[1] <= last}
        return bool(self.hours) and self.messages == len(closed) and self.hours == closed


def create_namespace(admin_url: str) -> None:
    """Create the namespace with deduplication. Raises OSError."""
    namespace = f"{admin_url}/admin/v2/namespaces/{NAMESPACE}"
    for method, path, body in (("PUT", "", b"{}"), ("POST", "/deduplication", b"true")):
        request = Request(
            namespace + path, body, {"Content-Type": "application/json"}, method=method
        )
        with urlopen(request, timeout=ADMIN_S):
            pass


def stream_delays(
    spark: SparkSession, service_url: str, topic: str, folder: Path, *, messages: int
) -> Streamed:
    """Run the query over `topic`, which has about `messages` messages, and return its results. Its
    checkpoint goes into `folder`. Raises Spark's exceptions."""
    from pyspark.sql import functions as F

    from magnetar.spark.pipelines.reading import run_to_end

    watermark_days = YEAR_DAYS * WATERMARK_FLIGHTS // messages + 1
    options = {"service.url": service_url, "topic": topic, "startingOffsets": "earliest"}
    stream = (
        spark.readStream.format("magnetar")
        .options(**options, maxRowsPerTrigger=str(messages // BATCHES + 1))
        .schema("value binary, __eventTime timestamp, __messageProperties map<string,string>")
        .load()
    )
    value = F.from_json(F.col("value").cast("string"), "carrier string, dep_delay bigint")
    flights = stream.select(
        "__eventTime", F.col("__messageProperties")["row"].alias("row"), value.alias("flight")
    ).select("__eventTime", "row", "flight.*")
    grouped = (
        flights.withWatermark("__eventTime", f"{watermark_days} days")
        # The demo kills the server; then the producer sends some flights again.
        .dropDuplicatesWithinWatermark(["row"])
        .groupBy(F.window("__eventTime", "1 hour"), "carrier")
        .agg(F.count("*"), F.count("dep_delay"), F.coalesce(F.sum("dep_delay"), F.lit(0)))
        .toDF("window", "carrier", "flights", "departed", "minutes")
    )
    begin = F.col("window.start").cast("bigint").alias("begin_s")
    writer = (
        grouped.select(
            F.concat_ws("/", "carrier", F.col("window.start").cast("bigint")).alias("__key"),
            F.struct("carrier", begin, "flights", "departed", "minutes").alias("value"),
        )
        .writeStream.format("magnetar")
        .outputMode("append")
        .option("service.url", service_url)
        .option("topic", TOPIC)
        .option("deliveryGuarantee", "dedup")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
    )
    run_to_end(writer.start)
    return _results(spark, service_url)


def _results(spark: SparkSession, service_url: str) -> Streamed:
    from pyspark.sql import functions as F

    reader = spark.read.format("magnetar").option("service.url", service_url)
    found: DataFrame = reader.option("topic", TOPIC).schema("value binary").load()
    schema = "carrier string, begin_s bigint, flights bigint, departed bigint, minutes bigint"
    groups = found.select(F.from_json(F.col("value").cast("string"), schema).alias("g"))
    rows = groups.select("g.*").collect()
    return Streamed(len(rows), {(row[0], row[1]): Delays(*row[2:]) for row in rows})


def hours_in_file(flights: pa.Table) -> Hours:
    """Return the delays by carrier and scheduled hour, computed directly from the table."""
    grouped = flights.group_by(["carrier", "time_hour"]).aggregate(
        [([], "count_all"), ("dep_delay", "count"), ("dep_delay", "sum")]
    )
    return {
        (row["carrier"], int(datetime.fromisoformat(row["time_hour"]).timestamp())): Delays(
            row["count_all"], row["dep_delay_count"], row["dep_delay_sum"] or 0
        )
        for row in grouped.to_pylist()
    }


def by_hour_of_day(hours: Hours) -> Hours:
    """Sum up the delays by carrier and hour of the day (0 to 23, local time of the airports)."""
    zone = ZoneInfo(TIME_ZONE)
    sums: Hours = {}
    for (carrier, begin_s), delays in hours.items():
        place = carrier, datetime.fromtimestamp(begin_s, zone).hour
        before = sums.get(place, Delays(0, 0, 0))
        sums[place] = Delays(
            before.flights + delays.flights,
            before.departed + delays.departed,
            before.minutes + delays.minutes,
        )
    return sums


def draw(hours: Hours, path: Path) -> None:
    """Draw the mean delay by carrier and hour as a PNG. Raises PlotMissing, OSError."""
    from magnetar.spark.pipelines.stats import require_plot

    require_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    hours = by_hour_of_day(hours)
    carriers = sorted({carrier for carrier, _ in hours})
    days = range(24)
    means = [
        [_mean(hours.get((carrier, hour), Delays(0, 0, 0))) for hour in days]
        for carrier in carriers
    ]
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(means, aspect="auto", cmap="magma_r")
    axes.set(
        title="mean departure delay, flights from New York in 2013",
        xlabel="scheduled hour of departure",
        xticks=list(days),
        yticks=range(len(carriers)),
        yticklabels=carriers,
    )
    figure.colorbar(image, label="minutes")
    figure.savefig(path, dpi=100, format="png")


def _mean(delays: Delays) -> float:
    return float("nan") if delays.mean is None else delays.mean
