"""A Spark aggregation over a topic of JSON messages: revenue by customer.

    PYSPARK_PYTHON=$(which python) python examples/spark_aggregation.py

Needs Java 17 and `pip install 'magnetar[spark]'`.
"""

from __future__ import annotations

import json
import os

# PySpark forks to start Java; gRPC must not interfere. Set before either is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from pyspark.sql import SparkSession
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


def main() -> None:
    publish()
    spark = SparkSession.builder.master("local[2]").appName("sales").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    topic = (
        spark.read.format("magnetar")
        .option("service.url", SERVICE_URL)
        .option("topic", TOPIC)
        .load()
    )
    sales = topic.select(
        F.from_json(F.col("value").cast("string"), "customer string, price int").alias("sale")
    ).select("sale.*")
    revenue = sales.groupBy("customer").agg(
        F.count("*").alias("sales"), F.sum("price").alias("revenue")
    )
    for row in revenue.orderBy("customer").collect():
        print(row.customer, row.sales, row.revenue)
    spark.stop()


if __name__ == "__main__":
    main()
