"""Tenants and namespaces as JSON, in Pulsar's form."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from magnetar.broker.operations.arguments import NO_BOOLEAN
from magnetar.broker.operations.errors import InvalidArgument
from magnetar.broker.operations.namespaces import BUNDLES_MAX
from magnetar.broker.operations.policy_model import BacklogQuotaBody
from magnetar.broker.operations.policy_table import QUOTAS, ROWS, QuotaType
from magnetar.metadata.policies import NamespaceRecord, Policies, TenantRecord

NAMES_MAX: Final = 100
"""The limit of roles, and of clusters, of a tenant. Every broker reads the tenant's record."""

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Names = Annotated[frozenset[_Name], Field(max_length=NAMES_MAX)]


class TenantInfo(BaseModel):
    """The settings of a tenant, which owns namespaces."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )

    admin_roles: _Names | None = Field(default=None, description="not enforced yet")
    allowed_clusters: _Names | None = Field(default=None, description="empty: every cluster")

    def changed(self, record: TenantRecord) -> TenantRecord:
        """Return the record, changed by the fields that this body sets."""
        roles, clusters = self.admin_roles, self.allowed_clusters
        return TenantRecord(
            allowed_clusters=record.allowed_clusters if clusters is None else clusters,
            admin_roles=record.admin_roles if roles is None else roles,
            unknown=record.unknown,
        )


class TenantShown(BaseModel):
    """A tenant."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    admin_roles: list[str]
    allowed_clusters: list[str]

    @classmethod
    def of(cls, record: TenantRecord, cluster: str) -> TenantShown:
        return cls(
            admin_roles=sorted(record.admin_roles),
            allowed_clusters=sorted(record.allowed_clusters or {cluster}),
        )


class Bundles(BaseModel):
    """The bundles of a namespace, which divide its hash space."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    boundaries: list[str]
    num_bundles: int

    @classmethod
    def of(cls, record: NamespaceRecord) -> Bundles:
        names = record.bundles.names
        starts = [name.partition("_")[0] for name in names]
        return cls(boundaries=[*starts, names[-1].partition("_")[2]], num_bundles=len(names))


class BundleCount(BaseModel):
    """The number of bundles of a new namespace. All have the same size."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    num_bundles: Annotated[
        int, Field(ge=0, le=BUNDLES_MAX, description="0: the broker's default"), NO_BOOLEAN
    ]


class NewNamespace(BaseModel):
    """The settings of a new namespace. Policies have the names that GET shows. Magnetar ignores
    keys that it does not know, because Pulsar's tools send all of Pulsar's keys."""

    model_config = ConfigDict(extra="allow", frozen=True)

    bundles: BundleCount | None = None

    @property
    def bundle_count(self) -> int | None:
        """None: the broker's default."""
        return (self.bundles.num_bundles or None) if self.bundles else None

    def policies(self, cluster: str) -> Policies:
        """Return the policies of the body. Raises InvalidArgument."""
        given = self.model_extra or {}
        values: dict[str, Any] = {}
        for row in ROWS:
            if not row.namespace_key:
                continue
            found = given.get(row.namespace_key)
            if row.by_cluster and isinstance(found, dict):
                found = found.get(cluster)
            if found is not None and found != []:
                values[row.field] = row.record(_parsed(row.namespace_key, row.body, found))
        quotas = given.get("backlog_quota_map")
        for kind, body in _parsed("backlog_quota_map", _QUOTA_MAP, quotas or {}).items():
            quota = QUOTAS[kind]
            if (value := quota.record(body)) is not None:
                values[quota.field] = value
        return Policies(**values)


_QUOTA_MAP: Final = dict[QuotaType, BacklogQuotaBody]


def _parsed(name: str, form: Any, found: Any) -> Any:
    try:
        return TypeAdapter(form).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument.of((name, *first["loc"]), first) from None


def shown_policies(record: NamespaceRecord, cluster: str) -> dict[str, Any]:
    """Return the policies that a namespace sets, with Pulsar's keys. A policy that is not set is
    null. In `backlog_quota_map` and in a map by cluster, its key is missing."""
    policies = record.policies
    shown: dict[str, Any] = {
        "bundles": Bundles.of(record).model_dump(by_alias=True),
        "replication_clusters": [cluster],
        "backlog_quota_map": {
            kind.value: quota.shown(value).model_dump(by_alias=True, mode="json")
            for kind, quota in QUOTAS.items()
            if (value := getattr(policies, quota.field)) is not None
        },
        "deleted": False,
    }
    for row in ROWS:
        if not row.namespace_key:
            continue
        value = getattr(policies, row.field)
        body = None if value is None else row.shown(value)
        if isinstance(body, BaseModel):
            body = body.model_dump(by_alias=True, mode="json")
        if row.by_cluster:
            body = {} if body is None else {cluster: body}
        shown[row.namespace_key] = body
    return shown
