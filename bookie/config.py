"""A bookie's settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from magnetar.bookie.bookie import PENDING_BYTES_MAX, STOP_GRACE_S
from magnetar.bookie.collector import CollectorConfig
from magnetar.bookie.disk import DiskLimits
from magnetar.bookie.scrub import ScrubConfig
from magnetar.bookie.service import READ_CACHE_BYTES
from magnetar.bookie.storage.format import is_name
from magnetar.bookie.storage.opening import OPEN_DEADLINE_S
from magnetar.bookie.upkeep import UpkeepConfig
from magnetar.runtime.config import RoleConfig
from magnetar.runtime.listener import is_wildcard


class BookieConfig(RoleConfig):
    """Settings from a TOML file, MAGNETAR_BOOKIE_<KEY> and flags. Port 0 means any free port."""

    role: ClassVar[str] = "bookie"

    id: str = Field(description="name of this bookie, for the life of its data directory")
    data_dir: Path = Field(description="directory of the bookie's data; created if missing")
    metadata_url: str = Field(description="zk://host:port[,host:port…][/chroot]")
    host: str = Field("127.0.0.1", description="address to listen on")
    advertised_host: str = Field("", description="address to register for brokers; empty: host")
    data_port: int = Field(3181, ge=0, le=65535, description="adds and reads, framed TCP")
    grpc_port: int = Field(3182, ge=0, le=65535, description="all other calls")
    http_port: int = Field(8000, ge=0, le=65535, description="/health and /metrics")
    zone: str = Field("", description="failure domain, such as a rack or a zone")
    session_timeout_s: float = Field(10.0, gt=0, description="timeout of the metadata session")
    pending_bytes_max: int = Field(
        PENDING_BYTES_MAX, ge=1 << 20, description="unsynced bytes above which writers wait"
    )
    read_cache_mb: int = Field(READ_CACHE_BYTES >> 20, ge=0, description="MiB of the read cache")
    open_deadline_s: float = Field(
        OPEN_DEADLINE_S, gt=0, description="time limit to open the store after a crash"
    )
    new_incarnation: bool = Field(
        False,
        description="take a new incarnation on an empty directory, although the cluster knows this "
        "bookie: its data is lost and is restored from the other bookies",
    )
    disk_full: float = Field(
        DiskLimits().full,
        gt=0,
        le=1,
        description="used share of the disk at which ordinary adds are refused",
    )
    disk_warn: float = Field(
        DiskLimits().warn,
        gt=0,
        le=1,
        description="used share of the disk from which on the bookie warns",
    )
    disk_resume: float = Field(
        DiskLimits().resume,
        gt=0,
        le=1,
        description="used share of the disk at which adds are allowed again",
    )
    disk_reserve_bytes: int = Field(
        DiskLimits().reserve_bytes,
        ge=0,
        description="reserved for fences, deletions and starts on a full disk; at most 1 % of "
        "the disk",
    )
    collect_interval_s: float = Field(
        CollectorConfig().interval_s, gt=0, description="time between searches for deleted ledgers"
    )
    collect_grace_s: float = Field(
        CollectorConfig().grace_s, ge=0, description="time before a replaced copy is deleted"
    )
    tombstones_kept_s: float = Field(
        CollectorConfig().tombstones_kept_s,
        gt=0,
        description="time for which the bookie remembers a deleted ledger",
    )
    scrub_bytes_per_s: float = Field(
        ScrubConfig().bytes_per_s, gt=0, description="read rate of the search for damage"
    )
    stop_grace_s: float = Field(
        STOP_GRACE_S, ge=0, description="time limit at a stop for requests under way"
    )

    @field_validator("id")
    @classmethod
    def id_is_a_name(cls, value: str) -> str:
        if not is_name(value):
            raise ValueError("1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
        return value

    @model_validator(mode="after")
    def advertised_is_reachable(self) -> Self:
        if is_wildcard(self.host) and not self.advertised_host:
            raise ValueError(
                f"host {self.host} is every address of this machine: set advertised_host to the "
                "address that brokers use"
            )
        return self

    @model_validator(mode="after")
    def disk_limits_are_ordered(self) -> Self:
        if self.disk_resume > self.disk_full:
            raise ValueError(
                f"disk_resume {self.disk_resume:g} is above disk_full {self.disk_full:g}: the "
                "bookie would accept adds on a full disk"
            )
        if self.disk_warn > self.disk_full:
            raise ValueError(
                f"disk_warn {self.disk_warn:g} is above disk_full {self.disk_full:g}: the warning "
                "would come too late"
            )
        return self

    @property
    def upkeep(self) -> UpkeepConfig:
        return UpkeepConfig(
            disk=DiskLimits(
                full=self.disk_full,
                warn=self.disk_warn,
                resume=self.disk_resume,
                reserve_bytes=self.disk_reserve_bytes,
            ),
            collector=CollectorConfig(
                interval_s=self.collect_interval_s,
                grace_s=self.collect_grace_s,
                tombstones_kept_s=self.tombstones_kept_s,
            ),
            scrub=ScrubConfig(bytes_per_s=self.scrub_bytes_per_s),
        )

    @property
    def advertised(self) -> str:
        return self.advertised_host or self.host
