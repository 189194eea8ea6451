"""Departure delays by carrier and hour, as a stream: from the topic, through Spark, into a topic.

The query groups flights by carrier and by hour of their event time, with a watermark, and writes
each change of a group as a message in JSON. The sink writes exactly once: the topic is in a
namespace with deduplication. The newest message of a group is its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.request import Request, urlopen

from magnetar.demo.delays import Delays

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NAMESPACE: Final = "public/exact"
TOPIC: Final = f"persistent://{NAMESPACE}/delays-by-hour"
TIME_ZONE: Final = "America/New_York"  # of the airports
ROWS_PER_BATCH: Final = 120_000
# Flights are in the order of their departure; a day's last ones may have been due on the next day.
WATERMARK: Final = "3 days"
ADMIN_S: Final = 30.0

Hours = dict[tuple[str, int], Delays]
"""By carrier and hour of the day."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What the query did."""

    batches: int
    rows: int  # messages that Spark wrote
    messages: int  # messages that the topic has
    hours: Hours


def create_namespace(admin_url: str) -> None:
    """Create the namespace with deduplication. Raises OSError."""
    namespace = f"{admin_url}/admin/v2/namespaces/{NAMESPACE}"
    for method, path, body in (("PUT", "", b"{}"), ("POST", "/deduplication", b"true")):
        request = Request(
            namespace + path, body, {"Content-Type": "application/json"}, method=method
        )
        with urlopen(request, timeout=ADMIN_S):
            pass


def stream_delays(spark: SparkSession, service_url: str, topic: str, folder: Path) -> Streamed:
    """Run the query over all messages of the topic; `folder` gets its checkpoint. Raises Spark's
    exceptions."""
    from pyspark.sql import functions as F

    from magnetar.spark.pipelines.reading import run_to_end

    options = {"service.url": service_url, "topic": topic, "startingOffsets": "earliest"}
    stream = (
        spark.readStream.format("magnetar")
        .options(**options, maxRowsPerTrigger=str(ROWS_PER_BATCH))
        .schema("value binary, __eventTime timestamp, __messageProperties map<string,string>")
        .load()
    )
    value = F.from_json(F.col("value").cast("string"), "carrier string, dep_delay bigint")
    flights = stream.select(
        "__eventTime", F.col("__messageProperties")["row"].alias("row"), value.alias("flight")
    ).select("__eventTime", "row", "flight.*")
    grouped = (
        flights.withWatermark("__eventTime", WATERMARK)
        .dropDuplicatesWithinWatermark(["row"])  # sent again after the kill
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
        .outputMode("update")
        .option("service.url", service_url)
        .option("topic", TOPIC)
        .option("deliveryGuarantee", "dedup")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
    )
    query = run_to_end(writer.start)
    # In the mode update, what the aggregation changes is what the sink gets.
    changed = [
        int(operator["numRowsUpdated"])
        for progress in query.recentProgress
        for operator in progress["stateOperators"]
        if operator["operatorName"] == "stateStoreSave"
    ]
    messages, hours = _results(spark, service_url)
    return Streamed(len(changed), sum(changed), messages, hours)


def _results(spark: SparkSession, service_url: str) -> tuple[int, Hours]:
    """Return the number of messages, and the sums of the newest message of each group."""
    from pyspark.sql import functions as F

    reader = spark.read.format("magnetar").option("service.url", service_url)
    found: DataFrame = reader.option("topic", TOPIC).schema("value binary, __index bigint").load()
    schema = "carrier string, begin_s bigint, flights bigint, departed bigint, minutes bigint"
    groups = found.select("__index", F.from_json(F.col("value").cast("string"), schema).alias("g"))
    newest = groups.groupBy("g.carrier", "g.begin_s").agg(F.max_by("g", "__index").alias("g"))
    local = F.from_utc_timestamp(F.timestamp_seconds("g.begin_s"), TIME_ZONE)
    sums = newest.groupBy("g.carrier", F.hour(local)).agg(
        F.sum("g.flights"), F.sum("g.departed"), F.sum("g.minutes")
    )
    hours = {(row[0], row[1]): Delays(*row[2:]) for row in sums.collect()}
    return found.count(), hours


def hours_in_file(flights: pa.Table) -> Hours:
    """By carrier and scheduled hour, directly from the table."""
    grouped = flights.group_by(["carrier", "hour"]).aggregate(
        [([], "count_all"), ("dep_delay", "count"), ("dep_delay", "sum")]
    )
    return {
        (row["carrier"], row["hour"]): Delays(
            row["count_all"], row["dep_delay_count"], row["dep_delay_sum"] or 0
        )
        for row in grouped.to_pylist()
    }


def draw(hours: Hours, path: Path) -> None:
    """Draw the mean delay by carrier and hour as a PNG. Raises PlotMissing, OSError."""
    from magnetar.spark.pipelines.stats import require_plot

    require_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
