"""produce, consume and topics without a server: parsing, printing, and what goes wrong."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
import typer
from fakes.client_world import TOPIC, A
from fakes.services import brokers_in_thread
from hypothesis import given
from hypothesis import strategies as st
from support import free_port
from typer.testing import CliRunner

import magnetar
import magnetar.asyncio
from magnetar.cli.client import run_client
from magnetar.cli.lines import READ_BYTES, LineSource
from magnetar.cli.main import make_app
from magnetar.cli.pace import Pace
from magnetar.cli.produce import parse_properties, send_paced, split
from magnetar.protos.entry import MESSAGE_BYTES_MAX


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(arguments), list(arguments))
    return result.exit_code, result.output


def test_messages_are_split_at_the_separator() -> None:
    assert split("a,b", ",") == ["a", "b"]
    assert split("a,b", "") == ["a,b"]
    assert split("a,b", None) == ["a,b"]
    assert split("a, b", "|") == ["a, b"]


NAMES = st.text(st.characters(exclude_characters=",=", exclude_categories=("Cs",)), min_size=1)
VALUES = st.text(st.characters(exclude_characters=",", exclude_categories=("Cs",)))


@given(st.dictionaries(NAMES, VALUES, min_size=1))
def test_properties_come_in_one_option_or_in_many(labels: dict[str, str]) -> None:
    pairs = [f"{name}={value}" for name, value in labels.items()]
    assert parse_properties(pairs) == labels
    assert parse_properties([",".join(pairs)]) == labels


@pytest.mark.parametrize("bad", ["", "a", "=b", "a=b,,c=d"])
def test_a_property_that_is_not_name_value_is_refused(bad: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not name=value"):
        parse_properties([bad])


def test_produce_without_messages_is_a_usage_error() -> None:
    code, said = invoke("produce", "greetings")
    assert code == 2
    assert "give messages with --messages, --lines or --files" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["produce", "t", "-m", "-", "-n", "2"], "standard input can be sent only once"),
        (["produce", "t", "-l", "-", "-n", "2"], "standard input can be sent only once"),
        (["produce", "t", "-m", "-", "-l", "lines"], "--lines and"),
        (["consume", "t", "-s", "s", "--json", "--quiet"], "cannot be combined"),
        (["schemas", "get", "t", "--version", "3", "--all-version"], "cannot be combined"),
    ],
)
def test_contradicting_options_are_refused(arguments: list[str], reason: str) -> None:
    code, said = invoke(*arguments)
    assert code == 2
    assert reason in said


async def test_a_rate_holds_although_receipts_take_longer_than_the_pause() -> None:
    loop = asyncio.get_running_loop()
    begun: list[float] = []

    async def send(content: bytes) -> None:
        begun.append(loop.time())
        await asyncio.sleep(1)

    pace, start = Pace(10), loop.time()
    for _ in range(2):  # the second chunk makes up for the wait for the receipts of the first
        await send_paced([b"x"] * 50, pace, send)
    assert len(begun) == 100
    assert begun[49] - start == pytest.approx(4.9, abs=0.01)
    assert loop.time() - start == pytest.approx(10.9, abs=0.01)


async def test_a_pace_saves_only_a_limited_part_of_an_idle_time() -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(10, saved_s=1.0)
    await pace.wait()
    await asyncio.sleep(60)
    start = loop.time()
    for _ in range(11):  # the messages of a second, and the one that is due
        await pace.wait()
    assert loop.time() - start == pytest.approx(0, abs=0.01)
    for _ in range(20):
        await pace.wait()
    assert loop.time() - start == pytest.approx(2, abs=0.01)


async def _all_lines(path: Path, lines_max: int) -> list[bytes]:
    found = []
    with LineSource(str(path)) as source:
        while chunk := await source.read(lines_max):
            assert len(chunk) <= lines_max
            found += chunk
    return found


@given(st.lists(st.binary(max_size=5).filter(lambda it: b"\n" not in it and b"\r" not in it)))
def test_lines_of_a_file_come_whole_and_in_order(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        assert asyncio.run(_all_lines(path, 3)) == lines


def test_a_line_beyond_the_maximum_message_size_is_not_gathered(tmp_path: Path) -> None:
    path = tmp_path / "line"
    path.write_bytes(bytes(3 * MESSAGE_BYTES_MAX))
    sizes = [len(line) for line in asyncio.run(_all_lines(path, 10))]
    assert sum(sizes) == 3 * MESSAGE_BYTES_MAX
    assert MESSAGE_BYTES_MAX < max(sizes) <= MESSAGE_BYTES_MAX + READ_BYTES


@pytest.mark.parametrize(
    "command",
    [
        ("produce", "greetings", "-m", "x"),
        ("consume", "greetings", "-s", "me"),
        ("spark", "archive", "--topic", "greetings", "--path", "not-made"),
    ],
)
def test_a_command_without_a_server_fails_with_advice(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"  # the command looks for it first, and does not start it
    java.parent.mkdir()
    java.touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    url = f"grpc://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    code, said = invoke(*command, "--service-url", url)
    assert code == 1
    [line] = said.splitlines()
    assert line.startswith(f"Error: cannot reach {url}: connection refused. Is a server running?")
    assert "MAGNETAR_SERVICE_URL" in line


def test_a_port_of_another_program_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        raise magnetar.ConnectError("gave up after 30 s")

    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(typer.Exit):
        run_client(f"grpc://127.0.0.1:{other.getsockname()[1]}", work())
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("Does the port match the URL's scheme (grpc: 6660, pulsar: 6650)?")


def test_timeout_without_receipt_names_topics_stats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def work() -> None:
        raise magnetar.Timeout("no receipt within 30 s", topic=TOPIC, broker=A)

    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(typer.Exit):
        run_client(f"grpc://127.0.0.1:{other.getsockname()[1]}", work())
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"`magnetar topics stats {TOPIC}` shows the topic's state")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost:8080", "lookups over HTTP are not supported"),
        ("localhost:6660", "expected grpc://host:port"),
        ("grpc://localhost:port", "is not host:port"),
    ],
)
def test_an_invalid_service_url_is_refused(url: str, reason: str) -> None:
    code, said = invoke("produce", "greetings", "-m", "x", "--service-url", url)
    assert code == 1
    [line] = said.splitlines()
    assert reason in line


def test_stats_without_a_server_fails_with_advice() -> None:
    code, said = invoke("topics", "stats", "greetings", "--admin-url", "http://127.0.0.1:1")
    assert code == 1
    [line] = said.splitlines()
    assert "Connection refused. Is a server running?" in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a//b"], "invalid topic name"),
        (["a", "--admin-url", "localhost:8080"], "does not begin with http://"),
    ],
)
def test_stats_of_an_invalid_target_is_a_usage_error(arguments: list[str], reason: str) -> None:
    code, said = invoke("topics", "stats", *arguments)
    assert code == 2
    assert reason in said


def test_stats_from_a_port_without_http_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, said = invoke("topics", "stats", "greetings", "--admin-url", url)
        thread.join()
    assert code == 1
    assert "did not answer like the HTTP port of a broker" in said


def test_produce_sends_more_bytes_than_may_be_pending(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(5_000_000))
    with brokers_in_thread(1) as service:
        url = service.grpc_url
        code, said = invoke("produce", "t", "-f", str(large), "-n", "14", "--service-url", url)
        assert (code, said) == (0, "14 messages successfully produced\n")
        [topic] = service.brokers[0].broker.topics
        assert topic.log.chain.entry_count == 14


def test_lines_of_a_file_named_dash_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-").write_text("a\nb\n")
    monkeypatch.chdir(tmp_path)
    with brokers_in_thread(1) as service:
        code, said = invoke("produce", "t", "-l", "./-", "--service-url", service.grpc_url)
        assert (code, said) == (0, "2 messages successfully produced\n")


def test_consume_does_not_count_a_message_whose_acknowledgement_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object) -> None:
        raise magnetar.AlreadyClosed("the consumer was closed")

    monkeypatch.setattr(magnetar.asyncio.Consumer, "acknowledge", refuse)
    with brokers_in_thread(1) as service:
        target = ("t", "--service-url", service.grpc_url)
        assert invoke("produce", *target, "-m", "x")[0] == 0
        code, said = invoke("consume", *target, "-s", "s", "-p", "Earliest")
    assert code == 1
    assert "content:x" in said
    assert "0 messages successfully consumed" in said
