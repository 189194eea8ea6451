"""Policies of namespaces and topics over HTTP: for each row of the table, three routes at each
level.

GET answers 204 without a body when the level does not set the policy. With `applied=true`, the
answer is the policy that is in effect.
"""

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, Query, Response

from magnetar.broker.admin.topics import REFUSALS
from magnetar.broker.operations import policies
from magnetar.broker.operations.arguments import namespace_name, topic_name
from magnetar.broker.operations.errors import InvalidArgument
from magnetar.broker.operations.policy_model import BacklogQuotaBody
from magnetar.broker.operations.policy_table import QUOTAS, ROWS, PolicyRow, QuotaType
from magnetar.protos.names import Domain, NamespaceName, TopicName

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.broker import Broker

NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC: Final = "/admin/v2/{domain}/{tenant}/{namespace}/{topic}"

Applied = Annotated[bool, Query(description="true: show the policy that is in effect")]
QuotaOf = Annotated[
    QuotaType, Query(alias="backlogQuotaType", description="the quota, by size or by age")
]

_NOT_SET: Final[dict[int | str, dict[str, Any]]] = {
    204: {"description": "The policy is not set here."}
}


def policies_router(broker: "Broker") -> APIRouter:
    """Make the routes of every policy, at the paths of Pulsar's admin API."""
    router = APIRouter(responses=REFUSALS)
    for row in ROWS:
        if row.namespace_path:
            path = f"{NAMESPACE}/{row.namespace_path}"
            _add(router, broker, row, path, _namespace, "namespace policies", parameter="")
        if row.topic_path:
            path = f"{TOPIC}/{row.topic_path}"
            _add(router, broker, row, path, _topic, "topic policies", row.topic_parameter)
    _add_quotas(router, broker, NAMESPACE, _namespace, "namespace policies")
    _add_quotas(router, broker, TOPIC, _topic, "topic policies")
    return router


def _namespace(tenant: str, namespace: str) -> NamespaceName:
    return namespace_name(tenant, namespace)


def _topic(domain: Domain, tenant: str, namespace: str, topic: str) -> TopicName:
    return topic_name(tenant, namespace, topic, domain)


def _add(
    router: APIRouter,
    broker: "Broker",
    row: PolicyRow,
    path: str,
    target: "Callable[..., policies.Target]",
    tag: str,
    parameter: str,
) -> None:
    """Make the three routes of one policy. `parameter`: the query parameter that carries the value;
    "": the body carries it."""

    async def get_policy(at: Any, applied: Applied = False) -> Any:
        value = await policies.get_policy(broker, at, row.field, applied=applied)
        return Response(status_code=HTTPStatus.NO_CONTENT) if value is None else row.shown(value)

    async def set_policy(at: Any, value: Any) -> None:
        await policies.set_policy(broker, at, row.field, row.record(value))

    async def remove_policy(at: Any) -> None:
        await policies.set_policy(broker, at, row.field, None)

    # Each row has its own types. FastAPI reads the types from the annotations of the functions.
    for function in (get_policy, set_policy, remove_policy):
        function.__annotations__["at"] = Annotated[policies.Target, Depends(target)]
    carrier = Query(alias=parameter) if parameter else Body()
    set_policy.__annotations__["value"] = Annotated[row.body, carrier]
    get: dict[str, Any] = {"response_model": row.body, "responses": _NOT_SET}
    for method, function, verb, settings in (
        ("GET", get_policy, "Show", get),
        ("POST", set_policy, "Set", {"status_code": HTTPStatus.NO_CONTENT}),
        ("DELETE", remove_policy, "Remove", {"status_code": HTTPStatus.NO_CONTENT}),
    ):
        router.add_api_route(
            path, function, methods=[method], tags=[tag], summary=f"{verb} {row.title}", **settings
        )


def _add_quotas(
    router: APIRouter,
    broker: "Broker",
    path: str,
    target: "Callable[..., policies.Target]",
    tag: str,
) -> None:
    At = Annotated[Any, Depends(target)]

    @router.get(f"{path}/backlogQuotaMap", tags=[tag])
    async def get_quotas(at: At, applied: Applied = False) -> dict[QuotaType, BacklogQuotaBody]:
        """Show the backlog quotas: by size (destination_storage) and by age (message_age)."""
        return {
            kind: quota.shown(value)
            for kind, quota in QUOTAS.items()
            if (value := await policies.get_policy(broker, at, quota.field, applied=applied))
            is not None
        }

    @router.post(f"{path}/backlogQuota", status_code=HTTPStatus.NO_CONTENT, tags=[tag])
    async def set_quota(at: At, body: BacklogQuotaBody, kind: QuotaOf = QuotaType.SIZE) -> None:
        """Set a backlog quota."""
        quota = QUOTAS[kind]
        value = quota.record(body)
        if value is None:
            raise InvalidArgument("backlogQuota", body.model_dump(mode="json"), quota.expected)
        await policies.set_policy(broker, at, quota.field, value)

    @router.delete(f"{path}/backlogQuota", status_code=HTTPStatus.NO_CONTENT, tags=[tag])
    async def remove_quota(at: At, kind: QuotaOf = QuotaType.SIZE) -> None:
        """Remove a backlog quota."""
        await policies.set_policy(broker, at, QUOTAS[kind].field, None)
