"""REACHED_END_OF_TOPIC: the clients that get this command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from magnetar.broker.session.events import SessionConsumerEvents
from magnetar.protos import framing
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.names import TopicName

TOPIC = TopicName.parse("persistent://public/default/t")


@pytest.mark.parametrize(
    ("client", "protocol", "told"),
    [
        ("Pulsar-Java-v4.0.0", 21, True),
        ("magnetar 0.1.0", 21, True),
        ("Pulsar-Java-v4.0.0", 8, False),
        ("Pulsar-CPP-v3.5.1", 20, False),
        ("Pulsar-CPP-v3.5.1-python-v3.5.0", 20, False),
    ],
)
def test_a_client_without_the_command_gets_no_notice_of_the_end(
    client: str, protocol: int, told: bool
) -> None:
    sent: list[bytes] = []
    session = SimpleNamespace(client_version=client, protocol_version=protocol)
    context: Any = SimpleNamespace(session=session, put_control=sent.append)
    SessionConsumerEvents(cast("Any", context), 7, TOPIC).reached_end()
    assert len(sent) == told
    if told:
        [frame] = framing.split_frames(sent[0])
        command = framing.parse_command(frame)
        assert command.type == pb.BaseCommand.REACHED_END_OF_TOPIC
        assert command.body.consumer_id == 7
