"""Names of topics that users cannot create, because Pulsar uses them itself. Pure.

docs/topics.md has the table of each name, its use in Pulsar, and what Magnetar does instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from magnetar.protos.names import TopicName

SYSTEM_TENANT: Final = "pulsar"
SYSTEM_NAMESPACE: Final = NamespaceName(SYSTEM_TENANT, "system")
HEARTBEAT: Final = "heartbeat"

_NAMES: Final = frozenset({"__change_events", "__transaction_buffer_snapshot"})
_PREFIXES: Final = ("__transaction_log_", "__transaction_buffer_snapshot_")
_SUFFIX: Final = "__transaction_pending_ack"


def is_system(name: TopicName) -> bool:
    """Return True if Pulsar reserves the name for itself. This includes the heartbeat topics."""
    topic = name.base.topic
    return (
        name.tenant == SYSTEM_TENANT
        or topic in _NAMES
        or topic.startswith(_PREFIXES)
        or topic.endswith(_SUFFIX)
    )


def is_heartbeat(name: TopicName) -> bool:
    """Return True if a broker's health check uses the topic: `pulsar/<host:port>/heartbeat`."""
    return (
        name.tenant == SYSTEM_TENANT
        and name.namespace_name != SYSTEM_NAMESPACE
        and name.topic == HEARTBEAT
    )
