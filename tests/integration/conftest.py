"""One Spark session for all tests of a worker: a start of Java costs ten seconds of CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from magnetar.spark.session import JavaMissing, spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    try:
        session = spark_session("tests", master="local[2,3]")
    except JavaMissing as missing:
        pytest.skip(str(missing))
    yield session
    session.stop()
