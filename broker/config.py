"""A broker's settings."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from magnetar.metadata.model import BUNDLES_DEFAULT
from magnetar.runtime.config import RoleConfig
from magnetar.runtime.listener import is_wildcard


class BrokerConfig(RoleConfig):
    """Read from a TOML file, MAGNETAR_BROKER_<KEY> and flags. Ports may be 0: any free one."""

    role: ClassVar[str] = "broker"

    id: str = Field(min_length=1, description="name of this broker, unique in the cluster")
    metadata_url: str = Field(description="zk://host:port[,host:port…][/chroot]")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    advertised_host: str = Field(default="", description="address that clients use; empty: host")
    grpc_port: int = Field(default=6660, ge=0, le=65535, description="for Magnetar's clients")
    pulsar_port: int = Field(
        default=6650, ge=0, le=65535, description="for Apache Pulsar's clients"
    )
    http_port: int = Field(
        default=8080, ge=0, le=65535, description="/health, /metrics, admin calls"
    )
    cluster_name: str = Field(default="magnetar", description="label `cluster` of all metrics")
    expose_topic_level_metrics_in_prometheus: bool = Field(
        default=True, description="metrics of each topic; otherwise sums of each namespace"
    )
    zone: str = Field(
        default="", description="location of this broker; it reads replicas there first"
    )
    session_timeout_s: float = Field(default=10.0, gt=0, description="of the metadata session")
    ensemble_size: int = Field(default=3, ge=1, description="bookies of a ledger (E)")
    write_quorum: int = Field(default=3, ge=1, description="copies of each entry (Qw)")
    ack_quorum: int = Field(
        default=2, ge=1, description="copies on disk before an entry is acknowledged (Qa)"
    )
    ensemble_change_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="how long the broker waits for a bookie that is gone before it replaces it",
    )
    cache_bytes: int = Field(
        default=256 << 20, ge=1 << 20, description="entries kept for tailing consumers"
    )
    message_expiry_check_interval_in_minutes: float = Field(
        default=5.0, gt=0, description="how often messages are checked against their time to live"
    )
    default_number_of_namespace_bundles: int = Field(
        default=BUNDLES_DEFAULT,
        ge=1,
        le=128,
        description="bundles of a namespace that this broker creates",
    )

    @model_validator(mode="after")
    def quorums(self) -> Self:
        """1 <= Qa <= Qw <= E."""
        if self.write_quorum > self.ensemble_size:
            raise ValueError(
                f"write_quorum {self.write_quorum} exceeds ensemble_size {self.ensemble_size}"
            )
        if self.ack_quorum > self.write_quorum:
            raise ValueError(
                f"ack_quorum {self.ack_quorum} exceeds write_quorum {self.write_quorum}"
            )
        return self

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
