"""`magnetar schemas`: show, add, check and delete the schemas of topics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from magnetar.cli.admin import DEFAULT_ADMIN_URL, USAGE, AdminUrl, Topic, command, topic_path
from magnetar.cli.client import fail
from magnetar.cli.help import App
from magnetar.cli.output import print_json

Definition = Annotated[
    Path,
    typer.Option(
        "--filename",
        "-f",
        help='a JSON file: {"type": "AVRO", "schema": "<the definition>", "properties": {}}',
        exists=True,
        dir_okay=False,
    ),
]


def add_to(app: typer.Typer) -> None:
    schemas = App(help="Show, add, check and delete the schemas of topics.", no_args_is_help=True)
    schemas.callback()(lambda: None)
    schemas.command("get")(get)
    schemas.command("upload")(upload)
    schemas.command("delete")(delete)
    schemas.command("compatibility")(compatibility)
    app.add_typer(schemas, name="schemas")


def get(
    topic: Topic,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="number of the version")
    ] = None,
    all_versions: Annotated[
        bool, typer.Option("--all-version", "-a", help="all versions, oldest first")
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Print the newest version of a topic's schema as JSON, or the given version, or all."""
    if all_versions and version is not None:
        raise typer.BadParameter("--version and --all-version cannot be combined")
    path = schema_path(topic)
    if all_versions:
        print_json(command(admin_url, "GET", f"{path}/schemas")["getSchemaResponses"])
        return
    part = "schema" if version is None else f"schema/{version}"
    print_json(command(admin_url, "GET", f"{path}/{part}"))


def upload(topic: Topic, filename: Definition, admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Add a version to the schema of a topic."""
    found = command(admin_url, "POST", f"{schema_path(topic)}/schema", _read(filename))
    typer.echo(f"the schema of {topic} has version {found['version']}")


def delete(
    topic: Topic,
    force: Annotated[
        bool,
        typer.Option(
            "--force", "-f", help="delete all versions, even if stored messages need them"
        ),
    ] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete the schema of a topic. Without --force, its versions can still be read by number."""
    query = "?force=true" if force else ""
    command(admin_url, "DELETE", f"{schema_path(topic)}/schema{query}")
    typer.echo(f"deleted the schema of {topic}")


def compatibility(
    topic: Topic, filename: Definition, admin_url: AdminUrl = DEFAULT_ADMIN_URL
) -> None:
    """Check whether a definition could become the next version of a topic's schema."""
    found = command(admin_url, "POST", f"{schema_path(topic)}/compatibility", _read(filename))
    verdict = "compatible" if found["isCompatibility"] else "incompatible"
    typer.echo(f"{verdict} by strategy {found['schemaCompatibilityStrategy']}")
    if not found["isCompatibility"]:
        raise typer.Exit(1)


def schema_path(topic: str) -> str:
    """Return the path of a topic's schema. A persistent and a non-persistent topic of the same name
    share a schema, so the path has no domain."""
    _, _, rest = topic_path(topic).removeprefix("/admin/v2/").partition("/")
    return f"/admin/v2/schemas/{rest}"


def _read(file: Path) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{file}: {error}", code=USAGE)
    members = found if isinstance(found, dict) else {}
    wrong = [name for name in ("type", "schema") if not isinstance(members.get(name), str)]
    if wrong:
        fail(
            f"{file}: expected an object whose type and schema are strings; missing or no string:"
            f" {', '.join(wrong)}",
            code=USAGE,
        )
    return found
