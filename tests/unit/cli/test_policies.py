"""The verbs of policies: paths and bodies are those of the broker's table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fakes.admin_port import broker, invoke
from pydantic import TypeAdapter

from magnetar.broker.operations.policy_table import ROWS
from magnetar.cli.policy_table import POLICIES, seconds, size

if TYPE_CHECKING:
    from magnetar.cli.policy_table import Flag, PolicyCommands

NAMESPACE = "/admin/v2/namespaces/acme/orders"
TOPIC = "/admin/v2/persistent/acme/orders/t"
SAMPLES = {
    "--time": "90m",
    "--size": "10M",
    "--types": "Shared,Key_Shared",
    "--delete-mode": "delete_when_no_subscriptions",
    "--compatibility": "FORWARD",
    "--max-inactive-duration": "10m",
}


def given(flags: tuple[Flag, ...]) -> list[str]:
    """All required options."""
    words: list[str] = []
    for flag in flags:
        if flag.kind is bool:
            words.append(flag.names[0].partition("/")[0])
        elif flag.default is ...:
            sample = SAMPLES.get(flag.names[0], "3") if flag.kind is str else "3"
            words += [flag.names[0], sample]
    return words


def test_the_command_line_has_each_policy_of_the_broker() -> None:
    assert {row.namespace_path for row in POLICIES} == {row.namespace_path for row in ROWS}
    assert {row.topic_path for row in POLICIES} == {row.topic_path for row in ROWS}


@pytest.mark.parametrize("row", POLICIES, ids=lambda row: row.name)
def test_each_verb_sends_what_the_broker_takes(row: PolicyCommands) -> None:
    levels = []
    if row.namespace_path:
        path = f"{NAMESPACE}/{row.namespace_path}"
        levels.append(("namespaces", row.name, "acme/orders", row.flags, path, ""))
    if row.topic_path:
        name, flags = row.topic_name or row.name, row.topic_flags or row.flags
        path = f"{TOPIC}/{row.topic_path}"
        levels.append(("topics", name, "acme/orders/t", flags, path, row.parameter))
    [known] = [it for it in ROWS if it.namespace_path == row.namespace_path]
    for group, name, target, flags, path, parameter in levels:
        with broker() as asked:
            asked.answer(path, status=204)
            asked.answer(f"{path}?applied=true", 5)
            if parameter:
                asked.answer(f"{path}?{parameter}=3", status=204)
            assert invoke(asked.url, group, f"set-{name}", target, *given(flags))[0] == 0
            code, said, errors = invoke(asked.url, group, f"get-{name}", target)
            assert (code, said) == (0, "null\n")
            assert "does not set it" in errors
            assert invoke(asked.url, group, f"get-{name}", target, "--applied")[:2] == (0, "5\n")
            assert invoke(asked.url, group, f"remove-{name}", target)[0] == 0
        (method, sent_to, body), *rest = asked.asked
        assert method == "POST"
        sent: Any = parse_qs(urlsplit(sent_to).query)[parameter][0] if parameter else body
        known.record(TypeAdapter(known.body).validate_python(sent))
        assert [it[0] for it in rest] == ["GET", "GET", "DELETE"]


def test_a_backlog_quota_is_set_by_type() -> None:
    quota = f"{TOPIC}/backlogQuota?backlogQuotaType=message_age"
    with broker() as asked:
        asked.answer(quota, status=204)
        words = ("--limitTime", "2h", "--policy", "producer_exception", "--type", "message_age")
        code, said, errors = invoke(
            asked.url, "topics", "set-backlog-quota", "acme/orders/t", *words
        )
    assert (code, errors) == (0, "")
    assert said == "set backlog-quota of acme/orders/t\n"
    assert asked.asked == [("POST", quota, {"limitTime": 7200, "policy": "producer_exception"})]


def test_retention_has_pulsars_units() -> None:
    path = f"{NAMESPACE}/retention"
    with broker() as asked:
        asked.answer(path, status=204)
        words = ("set-retention", "acme/orders", "-t", "2d", "-s", "16G")
        assert invoke(asked.url, "namespaces", *words)[0] == 0
        body = {"retentionTimeInMinutes": 2880, "retentionSizeInMB": 16384}
        assert asked.asked == [("POST", path, body)]
        words = ("set-retention", "acme/orders", "-t", "2d", "-s", "16X")
        code, _, errors = invoke(asked.url, "namespaces", *words)
    assert code == 2
    assert "--size" in errors
    assert "'16X' is not a size" in errors


def test_sizes_and_times_are_parsed_with_their_units() -> None:
    assert [size(text) for text in ("0", "4096", "10k", "1G", "-1")] == [
        0,
        4096,
        10240,
        1 << 30,
        -1,
    ]
    assert [seconds(text) for text in ("0", "90", "2m", "1w", "-1")] == [0, 90, 120, 604800, -1]


def test_tenant_and_namespace_commands_send_pulsars_requests() -> None:
    with broker() as asked:
        for path in ("/admin/v2/tenants/acme", NAMESPACE):
            asked.answer(path, status=204)
        asked.answer("/admin/v2/tenants", ["acme", "public"])
        asked.answer("/admin/v2/namespaces/acme", [])
        assert invoke(asked.url, "tenants", "create", "acme", "-r", "a, b")[0] == 0
        assert invoke(asked.url, "tenants", "list")[1] == "acme\npublic\n"
        assert invoke(asked.url, "namespaces", "create", "acme/orders", "-b", "8")[0] == 0
        assert invoke(asked.url, "namespaces", "list", "acme")[1:] == ("", "none\n")
        assert invoke(asked.url, "namespaces", "delete", "acme/orders")[0] == 0
        assert invoke(asked.url, "tenants", "delete", "acme")[0] == 0
        assert invoke(asked.url, "namespaces", "create", "acme")[0] == 2
    assert asked.asked[0] == ("PUT", "/admin/v2/tenants/acme", {"adminRoles": ["a", "b"]})
    assert asked.asked[2] == ("PUT", NAMESPACE, {"bundles": {"numBundles": 8}})
