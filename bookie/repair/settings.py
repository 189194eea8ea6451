"""The settings of a process that repairs."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from magnetar.bookie.repair.config import RepairConfig
from magnetar.runtime.config import RoleConfig

_STANDARD = RepairConfig()


class AutorecoveryConfig(RoleConfig):
    """Read from a TOML file, MAGNETAR_AUTORECOVERY_<KEY> and flags. The port may be 0: any free
    one."""

    role: ClassVar[str] = "autorecovery"

    id: str = Field("autorecovery", min_length=1, description="name of this process in logs")
    metadata_url: str = Field(description="zk://host:port[,host:port…][/chroot]")
    host: str = Field("127.0.0.1", description="address to listen on")
    http_port: int = Field(8010, ge=0, le=65535, description="/health and /metrics")
    session_timeout_s: float = Field(10.0, gt=0, description="of the metadata session")
    write_quorum: int = Field(
        3, ge=1, description="copies that ledgers should have; those made with fewer get more"
    )
    lost_bookie_delay_s: float = Field(
        _STANDARD.lost_bookie_delay_s, ge=0, description="before a missing bookie is given up"
    )
    lost_at_once_max: int = Field(
        _STANDARD.lost_at_once_max,
        ge=0,
        description="when more bookies than this, or than a third, are missing at once, none is"
        " given up",
    )
    audit_period_s: float = Field(
        _STANDARD.audit_period_s, gt=0, description="between looks at every ledger's metadata"
    )
    check_period_s: float = Field(
        _STANDARD.check_period_s,
        gt=0,
        description="in which all copies of all ledgers are compared",
    )
    scan_ledgers_per_s: int = Field(
        _STANDARD.scan_ledgers_per_s, ge=1, description="reads of ledgers' metadata in an audit"
    )
    copy_bytes_per_s: int = Field(
        _STANDARD.copy_bytes_per_s, ge=1 << 20, description="that this process copies at most"
    )
    ledgers_at_once: int = Field(
        _STANDARD.ledgers_at_once, ge=1, description="ledgers repaired side by side"
    )
    open_grace_s: float = Field(
        _STANDARD.open_grace_s,
        ge=0,
        description="for a writer to replace a lost bookie before its ledger is recovered",
    )

    @property
    def repair(self) -> RepairConfig:
        return RepairConfig(
            **{name: getattr(self, name) for name in RepairConfig.__dataclass_fields__}
        )

    @model_validator(mode="after")
    def _repairs(self) -> Self:
        self.repair  # noqa: B018 (names what contradicts)
        return self
