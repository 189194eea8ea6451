"""The questions about the schemas of topics, without brokers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from magnetar.client.asyncio import Client
from magnetar.client.errors import AuthorizationError, ConnectError, PulsarException, Timeout
from magnetar.client.schema.schema import SchemaInfo, SchemaType
from magnetar.spark.errors import ReadRefused, ReadStalled, SparkError
from magnetar.spark.source import topic_schemas
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.topic_schemas import SCHEMAS_MAX, Versions, _asked

TOPIC = "persistent://public/default/t"
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


class Broker:
    """Answers with one schema for each version, and counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(topic_schemas, "_asked", self._answer)
        for state in ("_answers", "_writers"):
            monkeypatch.setattr(topic_schemas, state, OrderedDict())

    def _answer(self, options: object, wanted: list[tuple[str, bytes]]) -> list[SchemaInfo]:
        self.asked += len(wanted)
        fields = '[{"name": "v%d", "type": "int"}]'
        record = f'{{"type": "record", "name": "r", "fields": {fields}}}'
        return [
            SchemaInfo(SchemaType.AVRO, "t", record % int.from_bytes(version, "big"))
            for _, version in wanted
        ]


def decode(ledger: int, version: int = 0, **options: Any) -> None:
    """A task of its own decodes a message."""
    versions = Versions(replace(OPTIONS, **options), pa.struct({"v0": pa.int32()}))
    versions.decoder(TOPIC, ledger, version.to_bytes(8, "big"))


def test_a_version_is_asked_for_once_in_each_ledger_and_kept_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(monkeypatch)
    for _ in range(2):
        for ledger in range(SCHEMAS_MAX + 1):
            decode(ledger)
    assert broker.asked == SCHEMAS_MAX + 1
    assert len(topic_schemas._writers) == 1
    decode(0, read_id="another")
    assert broker.asked == SCHEMAS_MAX + 2


@pytest.mark.parametrize(("limit", "step"), [("ANSWERS_MAX", (1, 0)), ("SCHEMAS_MAX", (0, 1))])
def test_the_answer_unused_for_longest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, limit: str, step: tuple[int, int]
) -> None:
    broker = Broker(monkeypatch)
    monkeypatch.setattr(topic_schemas, limit, 2)
    asked = []
    for number in (0, 1, 0, 2, 0, 1):
        decode(number * step[0], number * step[1])
        asked.append(broker.asked)
    assert asked == [1, 2, 2, 3, 3, 4]
