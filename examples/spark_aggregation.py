"""A Spark aggregation over a topic of JSON messages: revenue by customer, as a batch and a stream.

    PYSPARK_PYTHON=$(which python) python examples/spark_aggregation.py

Needs Java 17 and `pip install 'magnetar[spark]'`.
"""

from __future__ import annotations

import json
import os

# PySpark forks to start Java, and gRPC must not interfere. Set this before you import either one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import magnetar

SERVICE_URL = os.environ.get("MAGNETAR_SERVICE_URL", "grpc://localhost:6660")
TOPIC = os.environ.get("TOPIC", "sales")


def publish() -> None:
    with magnetar.Client(SERVICE_URL) as client:
        producer = client.create_producer(TOPIC)
        for number in range(1_000):
            sale = {"customer": f"c-{number % 3}", "price": number % 10}
            producer.send_async(json.dumps(sale).encode(), None)
        producer.flush()


def revenue(topic: DataFrame) -> DataFrame:
    sales = topic.select("value.*")
    return sales.groupBy("customer").agg(
        F.count("*").alias("sales"), F.sum("price").alias("revenue")
    )


def main() -> None:
    publish()
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("sales")
        .config("spark.sql.shuffle.partitions", "2")  # the default, 200, is for large clusters
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    options = {
        "service.url": SERVICE_URL,
        "topic": TOPIC,
        "startingOffsets": "earliest",
        "valueFormat": "json",
        "valueSchema": "customer string, price int",
    }
    topic = spark.read.format("magnetar").options(**options).load()
    for row in revenue(topic).orderBy("customer").collect():
        print(row.customer, row.sales, row.revenue)

    # The same aggregation as a stream. This trigger ends the query when the whole topic is read.
    # Without a trigger, the query would follow the topic.
    stream = spark.readStream.format("magnetar").options(**options, maxRowsPerTrigger="600").load()
    query = revenue(stream).writeStream.format("memory").outputMode("complete")
    query.queryName("revenue").trigger(availableNow=True).start().awaitTermination()
    for row in spark.table("revenue").orderBy("customer").collect():
        print("stream:", row.customer, row.sales, row.revenue)
    spark.stop()


if __name__ == "__main__":
    main()
