"""Requests to the admin API of a local cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from magnetar.local_cluster import LocalCluster

UNLIMITED_RETENTION: Final = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
"""Keep acknowledged messages, because the run reads every message back at its end."""


def admin(cluster: LocalCluster, method: str, path: str, body: object = None) -> Any:
    """Ask the first broker; redirects lead to the others. Raises httpx.HTTPStatusError."""
    [port] = [cluster.of_role("broker")[0].ports["http"]]
    answer = httpx.request(
        method,
        f"http://127.0.0.1:{port}/admin/v2/{path}",
        json=body,
        follow_redirects=True,
        timeout=30.0,
    )
    answer.raise_for_status()
    return answer.json() if answer.content else None


def keep_everything(cluster: LocalCluster) -> None:
    """Let every topic of public/default keep all messages. Raises httpx.HTTPStatusError."""
    admin(cluster, "POST", "namespaces/public/default/retention", UNLIMITED_RETENTION)
