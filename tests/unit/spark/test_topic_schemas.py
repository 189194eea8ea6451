"""The questions about the schemas of topics, without brokers."""

from __future__ import annotations

import pytest

from magnetar.client.asyncio import Client
from magnetar.client.errors import AuthorizationError, ConnectError, PulsarException, Timeout
from magnetar.spark.errors import ReadRefused, ReadStalled, SparkError
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.topic_schemas import _asked

OPTIONS = parse_options({"service.url": "grpc://a:6660", "topic": "t"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Timeout("gave up"), ReadStalled),
        (ConnectError("gave up"), ReadStalled),
        (AuthorizationError("no"), ReadRefused),
    ],
    ids=repr,
)
def test_only_a_refusal_is_reported_as_a_refusal(
    monkeypatch: pytest.MonkeyPatch, error: PulsarException, expected: type[SparkError]
) -> None:
    async def schema_of(*_: object) -> None:
        raise error

    monkeypatch.setattr(Client, "schema_of", schema_of)
    with pytest.raises(expected):
        _asked(OPTIONS, [("persistent://public/default/t", b"")])
