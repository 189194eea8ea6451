"""Lists of topics: Pulsar's hash, hidden topics, and the match of a pattern with a partition."""

from __future__ import annotations

import pytest

from magnetar.broker.catalog.listing import hash_of, matching, visible
from magnetar.broker.catalog.pattern import TopicPattern
from magnetar.broker.catalog.reserved import is_heartbeat, is_system
from magnetar.protos.names import TopicName
from magnetar.runtime.steps import STEP_CPU_S_MAX, StepMeter
from magnetar.runtime.turns import Turns

name = TopicName.parse


def test_the_hash_is_that_of_pulsar() -> None:
    """Guava's `Hashing.crc32c()`: CRC32C("123456789") is e3069283, printed lowest byte first."""
    assert hash_of(["123456789"]) == "839206e3"
    assert hash_of(["b", "a"]) == hash_of(["a", "b"]) == hash_of(["a,b"])
    assert hash_of([]) == "00000000"


SYSTEM = [
    "persistent://pulsar/system/transaction_coordinator_assign",
    "persistent://pulsar/system/transaction_coordinator_assign-partition-3",
    "non-persistent://pulsar/system/resource-usage",
    "persistent://public/default/__change_events",
    "persistent://public/default/__change_events-partition-1",
    "persistent://public/default/__transaction_buffer_snapshot",
    "persistent://public/default/__transaction_log_3",
    "persistent://public/default/orders-s__transaction_pending_ack",
    "non-persistent://pulsar/localhost:8080/heartbeat",
]


@pytest.mark.parametrize("topic", SYSTEM)
def test_system_and_heartbeat_names_are_recognised(topic: str) -> None:
    assert is_system(name(topic))
    assert is_heartbeat(name(topic)) == topic.endswith("/heartbeat")


async def test_lists_hide_system_topics_and_a_pattern_matches_the_topic_of_a_partition() -> None:
    mine = [name(topic) for topic in ("a-partition-0", "a-partition-1", "ab")]
    assert visible([*mine, *map(name, SYSTEM)]) == mine
    assert await matching(TopicPattern("public/default/a"), mine, Turns()) == mine[:2]


@pytest.mark.usefixtures("no_collection")
async def test_a_pattern_with_many_states_is_matched_in_short_steps() -> None:
    names = [name(f"{number}" + "a1b2" * 50) for number in range(20)]
    meter, turns = StepMeter(), Turns()
    began = meter.begin()

    class Measured(Turns):
        async def take(self) -> None:
            nonlocal began
            meter.end("matching", began)
            await turns.take()
            began = meter.begin()

    assert await matching(TopicPattern("public/default/[0-9a-z]{1,200}x"), names, Measured()) == []
    assert sum(meter.kinds["matching"].cpu.counts) > 20
    assert meter.cpu_s_max < STEP_CPU_S_MAX
