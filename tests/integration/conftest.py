"""Fixtures of many test modules: a client's API, and Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakes.client_api import CLIENTS, client_api

from magnetar.spark.session import JavaMissing, spark_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.client_api import Api
    from fakes.standalone_process import StandaloneProcess
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for all tests of a worker: a start of Java costs ten seconds of CPU."""
    try:
        session = spark_session("tests", master="local[2,3]")
    except JavaMissing as missing:
        pytest.skip(str(missing))
    yield session
    session.stop()


@pytest.fixture(scope="module", params=CLIENTS)
def api(request: pytest.FixtureRequest, server: StandaloneProcess) -> Iterator[Api]:
    """Apache's client, then ours, at the `server` of the test's module."""
    with client_api(server, request.param) as found:
        yield found
