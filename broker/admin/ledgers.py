"""Ledgers over HTTP. Pulsar has no such paths."""

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query

from magnetar.broker.operations import ledgers
from magnetar.broker.operations.arguments import INT64_MAX
from magnetar.broker.operations.model import OrphanPage

if TYPE_CHECKING:
    from magnetar.broker.broker import Broker

_After = Annotated[int, Query(ge=-1, le=INT64_MAX, description="begin after this ledger")]


def ledgers_router(broker: "Broker") -> APIRouter:
    """Make the routes below `/admin/v2/ledgers`."""
    router = APIRouter(prefix="/admin/v2/ledgers", tags=["ledgers"])

    @router.get("/orphans")
    async def list_orphans(after: _After = -1) -> OrphanPage:
        """List the ledgers that belong to no topic, among the next thousand. Changes nothing."""
        return await ledgers.orphans(broker, after=after, delete=False)

    @router.delete("/orphans")
    async def delete_orphans(after: _After = -1) -> OrphanPage:
        """Delete the ledgers that belong to no topic, among the next thousand."""
        return await ledgers.orphans(broker, after=after, delete=True)

    return router
