"""`magnetar namespaces`: create, list and delete namespaces, and set their policies."""

from __future__ import annotations

from typing import Annotated

import typer

from magnetar.cli.admin import DEFAULT_ADMIN_URL, AdminUrl, Json, command, quoted
from magnetar.cli.help import App
from magnetar.cli.output import print_json
from magnetar.cli.policies import Namespace, add_namespace_policies, namespace_path


def add_to(app: typer.Typer) -> None:
    namespaces = App(
        help="Create, list and delete namespaces, and set their policies.", no_args_is_help=True
    )
    namespaces.callback()(lambda: None)
    namespaces.command("list")(list_namespaces)
    namespaces.command("create")(create)
    namespaces.command("delete")(delete)
    namespaces.command("policies")(policies)
    namespaces.command("topics")(topics)
    namespaces.command("bundles")(bundles)
    namespaces.command("unload")(unload)
    add_namespace_policies(namespaces)
    app.add_typer(namespaces, name="namespaces")


def list_namespaces(
    tenant: Annotated[str, typer.Argument(help="name of the tenant")] = "public",
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """List the namespaces of a tenant."""
    print_lines(command(admin_url, "GET", f"/admin/v2/namespaces/{quoted(tenant)}"), as_json)


def create(
    namespace: Namespace,
    bundles: Annotated[
        int | None,
        typer.Option(
            "--bundles",
            "-b",
            min=1,
            max=128,
            help="number of bundles; a broker serves whole bundles",
        ),
    ] = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Create a namespace. Its tenant must exist."""
    body = {} if bundles is None else {"bundles": {"numBundles": bundles}}
    command(admin_url, "PUT", namespace_path(namespace), body)
    typer.echo(f"created {namespace}")


def delete(
    namespace: Namespace,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="first delete its topics with all their messages")
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete a namespace. Without --force, it must have no topics."""
    query = "?force=true" if force else ""
    command(admin_url, "DELETE", f"{namespace_path(namespace)}{query}")
    typer.echo(f"deleted {namespace}")


def policies(namespace: Namespace, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Print all policies that a namespace sets, as JSON."""
    print_json(command(admin_url, "GET", namespace_path(namespace)))


def topics(
    namespace: Namespace, as_json: Json = False, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """List the topics of a namespace."""
    print_lines(command(admin_url, "GET", f"{namespace_path(namespace)}/topics"), as_json)


def bundles(namespace: Namespace, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Print the bundles of a namespace: ranges of topics by hash. A broker owns whole bundles."""
    print_json(command(admin_url, "GET", f"{namespace_path(namespace)}/bundles"))


def unload(
    namespace: Namespace,
    bundle: Annotated[
        str | None,
        typer.Option(
            "--bundle",
            "-b",
            help="only this bundle: its two boundaries (see `bundles`), for example"
            " 0x00000000_0x40000000",
        ),
    ] = None,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Hand the bundles of a namespace over to other brokers."""
    part = "" if bundle is None else f"/{quoted(bundle)}"
    command(admin_url, "PUT", f"{namespace_path(namespace)}{part}/unload")
    typer.echo(f"unloaded {namespace}{part}")


def print_lines(found: list[str], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name in found:
        typer.echo(name)
    if not found:
        typer.echo("none", err=True)
