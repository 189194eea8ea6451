"""The mean departure delay by carrier, computed from the file and from the topic.

Both computations give integers for each carrier, which can be compared exactly: the number of
flights, the number of flights that departed, and the sum of the departed flights' delays in
minutes. A cancelled flight has no delay, and does not count in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays of one carrier."""

    flights: int  # cancelled flights included
    departed: int
    minutes: int  # the sum of the delays of the departed flights

    @property
    def mean(self) -> float | None:
        """The mean delay in minutes. None: none of the carrier's flights departed."""
        return self.minutes / self.departed if self.departed else None


def delays_in_file(flights: pa.Table) -> dict[str, Delays]:
    """Return the delays by carrier, computed directly from the table, without a topic and Spark."""
    grouped = flights.group_by("carrier").aggregate(
        [([], "count_all"), ("dep_delay", "count"), ("dep_delay", "sum")]
    )
    return {
        row["carrier"]: Delays(row["count_all"], row["dep_delay_count"], row["dep_delay_sum"] or 0)
        for row in grouped.to_pylist()
    }


def delays_in_topic(
    spark: SparkSession, service_url: str, topic: str
) -> tuple[int, dict[str, Delays]]:
    """Return the number of messages, and the delays by carrier with each flight counted once.

    The topic may hold a flight twice: after the loss of its server, a producer sends every
    unacknowledged message again. Raises Spark's exceptions.
    """
    from pyspark.sql import functions as F

    def messages(schema: str) -> DataFrame:
        reader = spark.read.format("magnetar").schema(schema)
        return reader.option("service.url", service_url).option("topic", topic).load()

    value = F.from_json(F.col("value").cast("string"), "carrier string, dep_delay bigint")
    row = F.col("__messageProperties")["row"].cast("int")
    flights = (
        messages("value binary, __messageProperties map<string,string>")
        .select(row.alias("row"), value.alias("flight"))
        .select("row", "flight.carrier", "flight.dep_delay")
    )
    found = (
        flights.dropDuplicates(["row"])
        .groupBy("carrier")
        .agg(F.count("*"), F.count("dep_delay"), F.coalesce(F.sum("dep_delay"), F.lit(0)))
        .collect()
    )
    count = messages("__index bigint").count()
    return count, {carrier: Delays(*numbers) for carrier, *numbers in found}
