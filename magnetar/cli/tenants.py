"""`magnetar tenants`: create, list, change and delete tenants, which own namespaces."""

from __future__ import annotations

from typing import Annotated

import typer

from magnetar.cli.admin import DEFAULT_ADMIN_URL, AdminUrl, Json, command, quoted
from magnetar.cli.help import App
from magnetar.cli.namespaces import print_lines
from magnetar.cli.output import print_json

Tenant = Annotated[str, typer.Argument(help="name of the tenant")]
Roles = Annotated[
    str | None,
    typer.Option(
        "--admin-roles", "-r", help="role names, separated by commas; stored, but not enforced yet"
    ),
]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--allowed-clusters",
        "-c",
        help="cluster names, separated by commas; empty: every cluster",
    ),
]


def add_to(app: typer.Typer) -> None:
    tenants = App(help="Create, list, change and delete tenants.", no_args_is_help=True)
    tenants.callback()(lambda: None)
    tenants.command("list")(list_tenants)
    tenants.command("create")(create)
    tenants.command("get")(get)
    tenants.command("update")(update)
    tenants.command("delete")(delete)
    app.add_typer(tenants, name="tenants")


def list_tenants(as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """List the tenants."""
    print_lines(command(admin_url, "GET", "/admin/v2/tenants"), as_json)


def create(
    tenant: Tenant,
    admin_roles: Roles = None,
    allowed_clusters: Clusters = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Create a tenant."""
    command(admin_url, "PUT", _path(tenant), _body(admin_roles, allowed_clusters))
    typer.echo(f"created {tenant}")


def get(tenant: Tenant, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Print a tenant as JSON."""
    print_json(command(admin_url, "GET", _path(tenant)))


def update(
    tenant: Tenant,
    admin_roles: Roles = None,
    allowed_clusters: Clusters = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Change a tenant. An option that is not given keeps its value."""
    command(admin_url, "POST", _path(tenant), _body(admin_roles, allowed_clusters))
    typer.echo(f"updated {tenant}")


def delete(tenant: Tenant, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Delete a tenant. It must have no namespaces."""
    command(admin_url, "DELETE", _path(tenant))
    typer.echo(f"deleted {tenant}")


def _path(tenant: str) -> str:
    return f"/admin/v2/tenants/{quoted(tenant)}"


def _body(roles: str | None, clusters: str | None) -> dict[str, list[str]]:
    given = {"adminRoles": roles, "allowedClusters": clusters}
    return {
        key: [part.strip() for part in text.split(",") if part.strip()]
        for key, text in given.items()
        if text is not None
    }
