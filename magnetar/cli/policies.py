"""Makes the commands of `policy_table.py` for one level: namespaces or topics."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.cli.admin import (
    DEFAULT_ADMIN_URL,
    USAGE,
    AdminUrl,
    Topic,
    command,
    query_of,
    quoted,
    topic_path,
)
from magnetar.cli.client import fail
from magnetar.cli.output import print_json
from magnetar.cli.policy_table import BACKLOG_QUOTA, POLICIES, QUOTA_TYPE, Flag
from magnetar.protos.errors import InvalidNamespaceName
from magnetar.protos.names import NamespaceName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Namespace = Annotated[str, typer.Argument(help="as tenant/namespace")]
Applied = Annotated[
    bool, typer.Option("--applied", "-ap", help="show the policy in effect, of any level")
]


def add_namespace_policies(app: typer.Typer) -> None:
    """Add the commands of each policy that namespaces can set."""
    for row in POLICIES:
        if row.namespace_path:
            _add(app, row.name, row.text, row.flags, "namespace", row.namespace_path, "")
    _add_quota(app, "namespace")


def add_topic_policies(app: typer.Typer) -> None:
    """Add the commands of each policy that topics can set."""
    for row in POLICIES:
        if row.topic_path:
            name, flags = row.topic_name or row.name, row.topic_flags or row.flags
            _add(app, name, row.text, flags, "topic", row.topic_path, row.parameter)
    _add_quota(app, "topic")


def namespace_path(namespace: str) -> str:
    """Return the path of a namespace below the address of a broker. Ends the command for an invalid
    name."""
    try:
        name = NamespaceName.parse(namespace)
    except InvalidNamespaceName as error:
        fail(str(error), code=USAGE)
    return f"/admin/v2/namespaces/{quoted(name.tenant)}/{quoted(name.namespace)}"


def _path(level: str, target: str) -> str:
    return namespace_path(target) if level == "namespace" else topic_path(target)


def _add(
    app: typer.Typer,
    name: str,
    text: str,
    flags: Sequence[Flag],
    level: str,
    last: str,
    parameter: str,
) -> None:
    def set_policy(target: str, admin_url: str, **given: Any) -> None:
        path, body = f"{_path(level, target)}/{last}", _body(flags, given)
        if parameter:
            command(admin_url, "POST", f"{path}?{query_of({parameter: body})}")
        else:
            command(admin_url, "POST", path, body)
        typer.echo(f"set {name} of {target}")

    def get_policy(target: str, admin_url: str, applied: bool) -> None:
        query = "?applied=true" if applied else ""
        found = command(admin_url, "GET", f"{_path(level, target)}/{last}{query}")
        print_json(found)
        if found is None:
            typer.echo(f"{target} does not set it; --applied shows the policy in effect", err=True)

    def remove_policy(target: str, admin_url: str) -> None:
        command(admin_url, "DELETE", f"{_path(level, target)}/{last}")
        typer.echo(f"removed {name} of {target}")

    _register(app, f"set-{name}", f"Set {text}.", set_policy, level, _options(flags))
    _register(app, f"get-{name}", f"Show {text}.", get_policy, level, {"applied": _APPLIED})
    text = f"Remove the policy: {text}. The policy of the next level then applies."
    _register(app, f"remove-{name}", text, remove_policy, level, {})


def _add_quota(app: typer.Typer, level: str) -> None:
    def set_quota(target: str, admin_url: str, backlogQuotaType: str, **given: Any) -> None:
        body = _body(BACKLOG_QUOTA, given)
        query = query_of({"backlogQuotaType": backlogQuotaType})
        command(admin_url, "POST", f"{_path(level, target)}/backlogQuota?{query}", body)
        typer.echo(f"set backlog-quota of {target}")

    def get_quotas(target: str, admin_url: str, applied: bool) -> None:
        query = "?applied=true" if applied else ""
        print_json(command(admin_url, "GET", f"{_path(level, target)}/backlogQuotaMap{query}"))

    def remove_quota(target: str, admin_url: str, backlogQuotaType: str) -> None:
        query = query_of({"backlogQuotaType": backlogQuotaType})
        command(admin_url, "DELETE", f"{_path(level, target)}/backlogQuota?{query}")
        typer.echo(f"removed backlog-quota of {target}")

    kind = _options([QUOTA_TYPE])
    text = "what the broker does with a topic whose backlog is too large or too old"
    options = {**_options(BACKLOG_QUOTA), **kind}
    _register(app, "set-backlog-quota", f"Set {text}.", set_quota, level, options)
    shown = {"applied": _APPLIED}
    _register(app, "get-backlog-quotas", f"Show {text}.", get_quotas, level, shown)
    text = f"Remove the quota: {text}. The quota of the next level then applies."
    _register(app, "remove-backlog-quota", text, remove_quota, level, kind)


def _body(flags: Sequence[Flag], given: dict[str, Any]) -> Any:
    sent = {}
    for flag in flags:
        value = given[flag.key or "value"]
        if value is None:
            continue
        try:
            sent[flag.key] = flag.value(value)
        except typer.BadParameter as error:
            raise typer.BadParameter(error.message, param_hint=flag.names[0]) from None
    return sent.get("", sent)


def _options(flags: Sequence[Flag]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each option, keyed by the name of its parameter."""
    return {
        flag.key or "value": (
            Annotated[
                flag.kind if flag.default is not None else flag.kind | None,
                typer.Option(*flag.names, help=flag.text or None),
            ],
            inspect.Parameter.empty if flag.default is ... else flag.default,
        )
        for flag in flags
    }


_APPLIED = (Applied, False)


def _register(
    app: typer.Typer,
    name: str,
    text: str,
    function: Callable[..., None],
    level: str,
    options: dict[str, tuple[Any, Any]],
) -> None:
    """Add one command. Typer reads the options from the signature of a function, so each command
    gets a function with its own signature."""

    def called(**given: Any) -> None:
        function(given.pop(level), **given)

    empty = inspect.Parameter.empty
    parameters = {
        level: (Namespace if level == "namespace" else Topic, empty),
        **options,
        "admin_url": (AdminUrl, DEFAULT_ADMIN_URL),
    }
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for each, (annotation, default) in parameters.items()
        ]
    )
    called.__annotations__ = {each: annotation for each, (annotation, _) in parameters.items()}
    app.command(name, help=text, rich_help_panel="Policies")(called)
