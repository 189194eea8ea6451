"""The settings of a broker of a cluster."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from magnetar.broker.balance import BalanceRules
from magnetar.broker.settings import BrokerSettings


class BrokerConfig(BrokerSettings):
    """The settings come from a TOML file, the environment (MAGNETAR_BROKER_<KEY>) and flags. Port 0
    means any free port."""

    role: ClassVar[str] = "broker"

    id: str = Field(min_length=1, description="name of this broker, unique in the cluster")
    metadata_url: str = Field(description="zk://host:port[,host:port…][/chroot]")
    cluster_name: str = Field(default="magnetar", description="label `cluster` of all metrics")
    zone: str = Field(
        default="", description="location of this broker; it reads replicas there first"
    )
    session_timeout_s: float = Field(
        default=10.0, gt=0, description="timeout of the metadata session"
    )
    broker_silence_in_seconds: float = Field(
        default=2.0,
        ge=0,
        description="silence of a broker, to this broker and to all bookies, after which this "
        "broker takes the silent broker's bundles; 0: only after its session has expired",
    )
    load_balancer_shedding_enabled: bool = Field(
        default=True,
        description="this broker hands bundles over to brokers that own fewer",
    )
    load_balancer_shedding_interval_minutes: float = Field(
        default=1.0, gt=0, description="time between two searches for brokers with fewer bundles"
    )
    load_balancer_shedding_grace_period_minutes: float = Field(
        default=30.0,
        ge=0,
        description="minimum time before this broker hands the same bundle over again",
    )
    ensemble_size: int = Field(default=3, ge=1, description="bookies of a ledger (E)")
    write_quorum: int = Field(default=3, ge=1, description="copies of each entry (Qw)")
    ack_quorum: int = Field(
        default=2, ge=1, description="copies on disk before an entry is acknowledged (Qa)"
    )
    ensemble_change_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="time that the broker waits for a lost bookie before it replaces the bookie",
    )

    @property
    def balance(self) -> BalanceRules:
        return BalanceRules(
            enabled=self.load_balancer_shedding_enabled,
            period_s=60.0 * self.load_balancer_shedding_interval_minutes,
            grace_s=60.0 * self.load_balancer_shedding_grace_period_minutes,
        )

    def survives(self, error: BaseException) -> bool:
        """Return True for every error: no client may end a broker, and a broker stores no data that
        a bug could damage."""
        del error
        return True

    @model_validator(mode="after")
    def quorums(self) -> Self:
        """Check that 1 <= Qa <= Qw <= E."""
        if self.write_quorum > self.ensemble_size:
            raise ValueError(
                f"write_quorum {self.write_quorum} exceeds ensemble_size {self.ensemble_size}"
            )
        if self.ack_quorum > self.write_quorum:
            raise ValueError(
                f"ack_quorum {self.ack_quorum} exceeds write_quorum {self.write_quorum}"
            )
        return self
