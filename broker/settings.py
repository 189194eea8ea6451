"""The settings that a broker of a cluster and a standalone server share.

A setting that Pulsar has keeps Pulsar's name, in snake case. Flags, the environment and the file
know a setting as soon as it is a field here; `broker/main.py` passes its value on.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from magnetar.broker.policy_settings import PolicySettings
from magnetar.metadata.model import BUNDLES_DEFAULT
from magnetar.protos.entry import MESSAGE_BYTES_MAX
from magnetar.runtime.listener import is_wildcard


class BrokerSettings(PolicySettings):
    # ---- ports ----
    host: str = Field(default="127.0.0.1", description="address to listen on")
    advertised_host: str = Field(default="", description="address that clients use; empty: host")
    grpc_port: int = Field(default=6660, ge=0, le=65535, description="for Magnetar's clients")
    pulsar_port: int = Field(
        default=6650, ge=0, le=65535, description="for Apache Pulsar's clients"
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="/health, /metrics, admin calls"
    )

    # ---- memory ----
    cache_bytes: int = Field(
        default=256 << 20, ge=1 << 20, description="entries kept in memory for tailing consumers"
    )
    max_message_publish_buffer_size_in_mb: int = Field(
        default=256,
        ge=1,
        description="bytes held for producers of all topics; connections stop reading at this",
    )

    # ---- messages ----
    max_message_size: int = Field(
        default=MESSAGE_BYTES_MAX,
        ge=1 << 10,
        le=MESSAGE_BYTES_MAX,
        description="bytes of a message, batch or chunk after compression",
    )

    message_expiry_check_interval_in_minutes: float = Field(
        default=5.0, gt=0, description="how often messages are checked against their time to live"
    )

    # ---- namespaces ----
    default_number_of_namespace_bundles: int = Field(
        default=BUNDLES_DEFAULT,
        ge=1,
        le=128,
        description="bundles of a namespace that this broker creates",
    )

    # ---- metrics ----
    expose_topic_level_metrics_in_prometheus: bool = Field(
        default=True, description="metrics of each topic; otherwise sums of each namespace"
    )

    @model_validator(mode="after")
    def advertised_is_reachable(self) -> Self:
        if is_wildcard(self.host) and not self.advertised_host:
            raise ValueError(
                f"host {self.host} is every address of this machine: set advertised_host to the "
                "one that clients use"
            )
        return self

    @property
    def advertised(self) -> str:
        return self.advertised_host or self.host

    @property
    def shared(self) -> dict[str, Any]:
        """The values of the settings of this class, by name."""
        return {name: getattr(self, name) for name in BrokerSettings.model_fields}

    @property
    def shown(self) -> dict[str, str]:
        """The values of all settings by Pulsar's names, for administrators."""
        values = self.model_dump(mode="json")
        return {to_camel(name): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(sorted(map(str, value))) if isinstance(value, list) else str(value)
