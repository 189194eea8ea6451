"""produce, consume and topics against a server, as a person types them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
from fakes.standalone_process import StandaloneProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

MAGNETAR = [sys.executable, "-m", "magnetar.cli.main"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path_factory.mktemp("server"))
    process.start()
    yield process
    process.end()


@pytest.fixture
def environment(server: StandaloneProcess) -> dict[str, str]:
    return os.environ | {
        "MAGNETAR_SERVICE_URL": server.service_url,
        "MAGNETAR_ADMIN_URL": f"http://localhost:{server.http_port}",
    }


@pytest.fixture
def magnetar(environment: dict[str, str]):
    def run(*arguments: str | Path, code: int = 0) -> str:
        """Run a command. Returns its standard output or, with a `code`, its standard error."""
        command = [*MAGNETAR, *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def contents(said: str) -> list[str]:
    return [line.partition("content:")[2] for line in said.splitlines() if "content:" in line]


def test_consume_prints_the_produced_messages(magnetar, tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\xff\x00picture")
    said = magnetar(
        *("produce", "greetings", "-m", "hello", "-m", "world", "-m", "third"),
        *("-f", tmp_path / "picture"),
        *("-k", "k1", "-p", "a=b,c=d", "-p", "e=f"),
    )
    assert said == "4 messages successfully produced\n"
    said = magnetar("consume", "greetings", "-s", "me", "-n", "4", "-p", "Earliest")
    assert said.startswith(
        "----- got message -----\nkey:[k1], properties:[a=b, c=d, e=f], content:hello\n"
    )
    assert contents(said) == ["hello", "world", "third", "\\xff\0picture"]
    assert said.endswith("\n4 messages successfully consumed\n")


def test_consumed_messages_are_not_redelivered(magnetar) -> None:
    magnetar("produce", "queue", "-m", "a,b,c,d", "--separator", ",")
    first = magnetar("consume", "queue", "-s", "me", "-t", "shared", "-p", "earliest")
    assert contents(first) == ["a"]
    rest = magnetar("consume", "queue", "-s", "me", "-t", "shared", "-n", "3")
    assert contents(rest) == ["b", "c", "d"]


def test_produce_splits_at_the_separator_and_repeats_messages(magnetar) -> None:
    magnetar("produce", "repeated", "-m", "a,b|c", "-s", "|", "-n", "2", "--disable-batching")
    said = magnetar("consume", "repeated", "-s", "me", "-n", "4", "-p", "earliest")
    assert contents(said) == ["a,b", "c", "a,b", "c"]


def test_a_comma_in_a_message_does_not_split_it(magnetar) -> None:
    magnetar("produce", "commas", "-m", "a,b")
    assert contents(magnetar("consume", "commas", "-s", "me", "-p", "earliest")) == ["a,b"]


def test_produce_sends_each_line_of_a_file_and_of_standard_input(
    magnetar, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("first\nsecond\r\n\nlast")
    assert magnetar("produce", "lined", "--lines", tmp_path / "lines").startswith("4 messages")
    for option in (("-m", "-"), ("--lines", "-")):
        command = [*MAGNETAR, "produce", "lined", *option]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.communicate("one\ntwo\n", timeout=60)[0].startswith("2 messages")
    said = magnetar("consume", "lined", "-s", "me", "-n", "8", "-p", "earliest", "--quiet")
    assert said.splitlines() == ["first", "second", "", "last", "one", "two", "one", "two"]


def test_a_line_of_standard_input_is_sent_before_the_next_one_arrives(
    magnetar, environment: dict[str, str]
) -> None:
    magnetar("produce", "typed", "-m", "first")
    command = [*MAGNETAR, "produce", "typed", "-m", "-"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write("second\n")
        process.stdin.flush()
        said = magnetar("consume", "typed", "-s", "me", "-n", "2", "-p", "earliest", "--quiet")
        assert said == "first\nsecond\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "1 messages successfully produced\n"
        assert process.returncode == 130


def test_consume_prints_messages_as_json(magnetar) -> None:
    magnetar("produce", "described", "-m", "text", "-k", "k1", "-p", "a=b")
    said = magnetar("consume", "described", "-s", "me", "-p", "earliest", "--json")
    [line] = said.splitlines()
    found = json.loads(line)
    assert found["publishTime"] > 1_600_000_000_000
    # The form that `subscriptions reset --to` reads.
    assert re.fullmatch(r"\d+:\d+(:\d+)?", found["id"])
    del found["publishTime"], found["id"]
    assert found == {
        "topic": "persistent://public/default/described",
        "key": "k1",
        "eventTime": None,
        "redeliveryCount": 0,
        "properties": {"a": "b"},
        "content": "text",
    }


def test_consume_with_hide_content_prints_only_the_count(magnetar) -> None:
    assert magnetar("produce", "many", "-m", "x", "-n", "20000").startswith("20000 messages")
    said = magnetar(
        "consume", "many", "-s", "me", "-n", "20000", "-p", "earliest", "--hide-content"
    )
    assert said == "20000 messages successfully consumed\n"


def test_produce_and_consume_keep_to_the_given_rate(magnetar) -> None:
    began_s = time.monotonic()
    magnetar("produce", "slow", "-m", "x", "-n", "5", "-r", "10")
    assert time.monotonic() - began_s >= 0.4
    began_s = time.monotonic()
    magnetar("consume", "slow", "-s", "me", "-n", "5", "-r", "10", "-p", "earliest")
    assert time.monotonic() - began_s >= 0.4


def test_consume_without_a_limit_ends_with_130_at_ctrl_c(
    magnetar, environment: dict[str, str]
) -> None:
    magnetar("produce", "endless", "-m", "a", "-m", "b")
    command = [*MAGNETAR, "consume", "endless", "-s", "me", "-n", "0", "-p", "earliest"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert contents("".join(lines)) == ["a", "b"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "2 messages successfully consumed\n"
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
    magnetar("produce", "endless", "-m", "c")
    assert contents(magnetar("consume", "endless", "-s", "me")) == ["c"]  # a and b were acked


def line_of(start: str, table: str) -> list[str]:
    """The words of the line that begins with `start`."""
    [line] = [line for line in table.splitlines() if line.startswith(start)]
    return line.split()


def test_topics_and_subscriptions_from_creation_to_deletion(magnetar) -> None:
    magnetar("tenants", "create", "tenant")
    magnetar("namespaces", "create", "tenant/admin")
    assert magnetar("topics", "create", "tenant/admin/a?b") == "created tenant/admin/a?b\n"
    assert magnetar("topics", "list", "tenant/admin") == "persistent://tenant/admin/a?b\n"
    assert "exists already" in magnetar("topics", "create", "tenant/admin/a?b", code=1)
    magnetar("produce", "tenant/admin/a?b", "-m", "x", "-m", "y", "-k", "k1", "-p", "a=b")
    magnetar("consume", "tenant/admin/a?b", "-s", "me/1", "-p", "earliest")
    assert magnetar("subscriptions", "list", "tenant/admin/a?b") == "me/1\n"
    said = magnetar("topics", "peek", "tenant/admin/a?b", "-s", "me/1", "-n", "9")
    assert contents(said) == ["y"]
    assert "key:[k1], properties:[a=b], content:y" in said
    magnetar("subscriptions", "reset", "tenant/admin/a?b", "me/1", "--to", "earliest")
    said = magnetar("topics", "peek", "tenant/admin/a?b", "-s", "me/1", "-n", "9", "--json")
    assert [each["payload"] for each in json.loads(said)] == ["eA==", "eQ=="]
    magnetar("subscriptions", "reset", "tenant/admin/a?b", "me/1", "--to", "latest")
    said = magnetar("topics", "peek", "tenant/admin/a?b", "-s", "me/1")
    assert said == "the backlog of me/1 is empty\n"
    magnetar("subscriptions", "delete", "tenant/admin/a?b", "me/1")
    assert magnetar("subscriptions", "list", "tenant/admin/a?b") == ""
    refused = magnetar("subscriptions", "delete", "tenant/admin/a?b", "me/1", code=1)
    assert "subscription 'me/1' does not exist (HTTP status 404)" in refused


def test_metrics_count_messages_and_the_index_links_the_pages(
    magnetar, server: StandaloneProcess
) -> None:
    magnetar("produce", "measured", "-m", "x", "-n", "3")
    metrics = _page(server, "/metrics")
    labels = 'cluster="standalone",namespace="public/default",topic="persistent://public/default/measured"'
    assert f"pulsar_in_messages_total{{{labels}}} 3.0" in metrics
    assert 'pulsar_broker_publish_latency_bucket{cluster="standalone",le="+Inf"}' in metrics
    before = _connections(server)
    with socket.create_connection(("127.0.0.1", server.pulsar_port)):
        assert _connections(server) == before + 1
    index = _page(server, "/")
    for path in ("/health", "/metrics", "/docs"):
        assert f'href="{path}"' in index
    assert "swagger-ui-bundle.js" in _page(server, "/docs")


def _connections(server: StandaloneProcess) -> float:
    [value] = re.findall(
        r"^pulsar_active_connections{.*} (.*)$", _page(server, "/metrics"), re.MULTILINE
    )
    return float(value)


def _page(server: StandaloneProcess, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}", timeout=10) as reply:
        return reply.read().decode()


def test_topics_stats_prints_counts_and_backlogs(magnetar) -> None:
    magnetar("produce", "public/default/counted", "-m", "a,b,c", "-s", ",")
    magnetar("consume", "counted", "-s", "me", "-n", "2", "-p", "earliest")
    found = json.loads(magnetar("topics", "stats", "counted", "--json"))
    assert found["msgInCounter"] == 3
    assert found["subscriptions"]["me"]["msgBacklogMessages"] == 1
    table = magnetar("topics", "stats", "counted")
    assert [cell for cell in line_of("in ", table) if cell in ("in", "3")] == ["in", "3"]
    assert line_of("me ", table)[:4] == ["me", "None", "1", "0"]  # type, backlog, unacknowledged
    assert "topic persistent://public/default/nope does not exist" in magnetar(
        "topics", "stats", "nope", code=1
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["produce", "a//b", "-m", "x"], "a//b"),
        (["produce", "big", "-f", "big"], "5242880"),
        (["produce", "a", "-f", "nope"], "nope: No such file or directory"),
    ],
)
def test_an_error_is_printed_as_one_line(
    magnetar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").write_bytes(bytes(6 << 20))
    [line] = magnetar(*arguments, code=1).splitlines()
    assert line.startswith("Error: ")
    assert reason in line
