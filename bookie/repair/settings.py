"""The settings of an autorecovery process."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from magnetar.bookie.ledger.quorum import ENSEMBLE_SIZE_MAX
from magnetar.bookie.repair.config import RepairConfig
from magnetar.runtime.config import RoleConfig

_STANDARD = RepairConfig()


class AutorecoveryConfig(RoleConfig):
    """Read from a TOML file, MAGNETAR_AUTORECOVERY_<KEY> and flags. Port 0 means any free port."""

    role: ClassVar[str] = "autorecovery"

    id: str = Field("autorecovery", min_length=1, description="name of this process in logs")
    metadata_url: str = Field(description="zk://host:port[,host:port…][/chroot]")
    host: str = Field("127.0.0.1", description="address to listen on")
    http_port: int = Field(8010, ge=0, le=65535, description="/health and /metrics")
    session_timeout_s: float = Field(10.0, gt=0, description="timeout of the metadata session")
    write_quorum: int = Field(
        3,
        ge=1,
        le=ENSEMBLE_SIZE_MAX,
        description="wanted copies of ledgers; a closed ledger with fewer copies gets more",
    )
    lost_bookie_delay_s: float = Field(
        _STANDARD.lost_bookie_delay_s,
        ge=0,
        description="delay before a missing bookie is declared lost",
    )
    lost_at_once_max: int = Field(
        _STANDARD.lost_at_once_max,
        ge=0,
        description="if more bookies than this, or more than a third, are missing at once, none is"
        " declared lost",
    )
    audit_period_s: float = Field(
        _STANDARD.audit_period_s, gt=0, description="period of audits of all ledgers' metadata"
    )
    check_period_s: float = Field(
        _STANDARD.check_period_s,
        gt=0,
        description="period in which all copies of all ledgers are compared",
    )
    scan_ledgers_per_s: int = Field(
        _STANDARD.scan_ledgers_per_s,
        ge=1,
        description="rate limit for reads of ledger metadata in an audit",
    )
    copy_bytes_per_s: int = Field(
        _STANDARD.copy_bytes_per_s,
        ge=1 << 20,
        description="rate limit for reading the entries that this process copies",
    )
    ledgers_at_once: int = Field(
        _STANDARD.ledgers_at_once, ge=1, description="ledgers repaired concurrently"
    )
    open_grace_s: float = Field(
        _STANDARD.open_grace_s,
        ge=0,
        description="time for a writer to replace a lost bookie before its ledger is recovered",
    )

    @property
    def repair(self) -> RepairConfig:
        return RepairConfig(
            **{name: getattr(self, name) for name in RepairConfig.__dataclass_fields__}
        )

    @model_validator(mode="after")
    def _repairs(self) -> Self:
        self.repair  # noqa: B018 (raises its own errors)
        return self
