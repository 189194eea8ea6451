"""`magnetar standalone` as a user meets it: first program, crash, restart, refusals, size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fakes.standalone_process import StandaloneProcess
from support import free_port

import magnetar

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

EARLIEST = magnetar.InitialPosition.Earliest


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandaloneProcess]:
    process = StandaloneProcess(tmp_path)
    yield process
    process.end()


def receive(consumer: magnetar.Consumer, count: int) -> list[magnetar.Message]:
    return [consumer.receive(timeout_millis=30_000) for _ in range(count)]


def test_kill_9_loses_no_message_and_no_acknowledgement(server: StandaloneProcess) -> None:
    """After kill -9, the server redelivers the unacknowledged messages only, and has all messages
    that were sent."""
    server.start()
    with magnetar.Client(server.service_url) as client:
        consumer = client.subscribe("greetings", "readers", initial_position=EARLIEST)
        producer = client.create_producer("greetings")
        sent = [producer.send(b"%d" % n, properties={"n": str(n)}) for n in range(20)]
        got = receive(consumer, 20)
        assert [message.message_id() for message in got] == sent
        assert [message.properties()["n"] for message in got] == [str(n) for n in range(20)]
        for message in got[:12]:
            consumer.acknowledge(message)
        consumer.close()  # the acks given before are durable now
        server.kill()
    server.start()
    with magnetar.Client(server.service_url) as client:
        consumer = client.subscribe("greetings", "readers", initial_position=EARLIEST)
        assert [m.data() for m in receive(consumer, 8)] == [b"%d" % n for n in range(12, 20)]
        with pytest.raises(magnetar.Timeout):
            consumer.receive(timeout_millis=200)
        reader = client.create_reader("greetings", magnetar.MessageId.earliest)
        again = [reader.read_next(timeout_millis=30_000) for _ in range(20)]
        assert [message.message_id() for message in again] == sent
        client.create_producer("greetings").send(b"20")
        [message] = receive(consumer, 1)
        assert message.data() == b"20"


def test_a_client_that_is_there_survives_the_crash(server: StandaloneProcess) -> None:
    server.start()
    with magnetar.Client(server.service_url) as client:
        consumer = client.subscribe("greetings", "readers", initial_position=EARLIEST)
        producer = client.create_producer("greetings", send_timeout_millis=0)
        for n in range(10):
            producer.send(b"%d" % n)
        server.kill()
        results: list[magnetar.Result] = []
        for n in range(10, 20):
            producer.send_async(b"%d" % n, lambda result, _: results.append(result))
        server.start()
        producer.flush()
        assert results == [magnetar.Result.Ok] * 10
        seen = []
        while len(set(seen)) < 20:
            message = consumer.receive(timeout_millis=30_000)
            seen.append(message.data())
            consumer.acknowledge(message)
        assert list(dict.fromkeys(seen)) == [b"%d" % n for n in range(20)]


def test_standalone_restarts_repeatedly(server: StandaloneProcess) -> None:
    for round_, end in enumerate((server.kill, server.terminate, server.kill)):
        server.start()
        with magnetar.Client(server.service_url) as client:
            client.create_producer("rounds").send(b"%d" % round_)
        assert end() in (0, None)
    server.start()
    with magnetar.Client(server.service_url) as client:
        reader = client.create_reader("rounds", magnetar.MessageId.earliest)
        seen = [reader.read_next(timeout_millis=30_000).data() for _ in range(3)]
        assert seen == [b"0", b"1", b"2"]
        assert not reader.has_message_available()


def test_a_stop_under_load_is_clean_and_keeps_what_was_acknowledged(
    server: StandaloneProcess,
) -> None:
    server.start()
    acknowledged: list[bytes] = []
    client = magnetar.Client(server.service_url)
    producer = client.create_producer("load", max_pending_messages=5000, send_timeout_millis=0)

    def on_sent(data: bytes, result: magnetar.Result) -> None:
        if result is magnetar.Result.Ok:
            acknowledged.append(data)

    for n in range(5000):
        data = b"%d" % n
        producer.send_async(data, lambda result, _, data=data: on_sent(data, result))
        if n == 2500:
            producer.flush()
    assert server.terminate() == 0
    assert "stopped by" not in server.log
    assert len(acknowledged) >= 2500
    server.start()
    producer.flush()
    assert len(acknowledged) == 5000
    reader = client.create_reader("load", magnetar.MessageId.earliest)
    seen = []
    while reader.has_message_available():
        seen.append(reader.read_next(timeout_millis=30_000).data())
    assert list(dict.fromkeys(seen)) == [b"%d" % n for n in range(5000)]
    client.close()


def test_standalone_reports_its_addresses_and_its_health(server: StandaloneProcess) -> None:
    server.start()
    assert server.health() == (
        200,
        {"role": "standalone", "id": "standalone", "state": "serving"},
    )
    assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    events = [line["event"] for line in lines]
    ready = lines[events.index("broker is ready")]
    assert ready["grpc"] == f"grpc://127.0.0.1:{server.grpc_port}"
    assert any(event.startswith("listening on loopback only") for event in events)
    assert server.data_dir.is_dir()
    assert sorted(path.name for path in server.data_dir.iterdir()) == [
        "bookie",
        "metadata",
        "standalone",
    ]


def test_an_idle_standalone_server_needs_less_than_200_megabytes(server: StandaloneProcess) -> None:
    server.start()
    status = Path(f"/proc/{server.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    assert int(line.split()[1]) < 200 * 1024, line


# -- Refusals ----------------------------------------------------------------------------------


def refused(server: StandaloneProcess) -> str:
    """Start the server, which must refuse. Returns the error in the last line of its log."""
    server.launch()
    status = server.wait()
    [line] = [json.loads(line) for line in server.log.splitlines() if "stopped by" in line]
    assert (status, line["event"]) == (1, "stopped by an error")
    assert "Traceback" not in server.log
    return str(line["error"])


def test_a_directory_in_use_is_refused(server: StandaloneProcess, tmp_path: Path) -> None:
    server.start()
    (tmp_path / "second").mkdir()
    second = StandaloneProcess(tmp_path / "second")
    second.data_dir = server.data_dir
    said = refused(second)
    assert f"directory {server.data_dir}: another process uses it. Stop that process first" in said
    assert server.health()[0] == 200


def test_a_foreign_directory_is_refused_and_left_unchanged(server: StandaloneProcess) -> None:
    server.data_dir.mkdir()
    (server.data_dir / "thesis.tex").write_text("precious")
    said = refused(server)
    assert "it holds thesis.tex" in said
    assert "Give an empty directory" in said
    assert [path.name for path in server.data_dir.iterdir()] == ["thesis.tex"]


def test_the_directory_of_another_server_is_refused(server: StandaloneProcess) -> None:
    """The directory is that of a bookie."""
    server.start()
    server.terminate()
    server.log_file.unlink()
    server.data_dir = server.data_dir / "bookie"
    assert "does not belong to `magnetar standalone` alone" in refused(server)


def test_a_file_as_data_directory_is_refused(server: StandaloneProcess) -> None:
    server.data_dir.write_text("")
    assert "it is a file" in refused(server)


@contextmanager
def disk(path: Path, options: str) -> Iterator[None]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs permission to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "Read-only file system"), ("size=4k", "No space left on device")]
)
def test_a_start_on_a_read_only_or_full_disk_is_refused(
    server: StandaloneProcess, options: str, reason: str
) -> None:
    with disk(server.data_dir, options):
        assert reason in refused(server)


def test_a_disk_that_others_fill_is_read_from_and_written_to_again_when_it_has_room(
    server: StandaloneProcess,
) -> None:
    with disk(server.data_dir, "size=100m"):
        server.start()
        other = server.data_dir / "lost+found"
        with magnetar.Client(server.service_url, operation_timeout_seconds=30) as client:
            producer = client.create_producer("big", send_timeout_millis=3000)
            sent = 0
            for _ in range(100):
                producer.send(sent.to_bytes(4) + bytes(50_000))
                sent += 1
            found = os.statvfs(server.data_dir)
            with open(other, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - (3 << 20))
            with pytest.raises(magnetar.PulsarException):  # noqa: PT012 (one of many sends fails)
                for _ in range(10_000):
                    producer.send(sent.to_bytes(4))
                    sent += 1
            reader = client.create_reader("big", magnetar.MessageId.earliest)
            for n in range(sent):
                assert int.from_bytes(reader.read_next(timeout_millis=30_000).data()[:4]) == n
            other.unlink()
            client.create_producer("big").send(b"again")
        server.end()


def test_a_port_in_use_names_the_flag(server: StandaloneProcess, tmp_path: Path) -> None:
    server.start()
    for key in ("grpc_port", "pulsar_port", "http_port"):
        directory = tmp_path / key
        directory.mkdir()
        second = StandaloneProcess(directory)
        setattr(second, key, getattr(server, key))
        flag = key.replace("_", "-")
        assert refused(second) == (
            f"port {getattr(server, key)} on 127.0.0.1 is in use by another process: choose"
            f" another with --{flag}, MAGNETAR_STANDALONE_{key.upper()} or {key} in a file"
        )


def test_two_equal_ports_are_refused(server: StandaloneProcess) -> None:
    server.pulsar_port = server.grpc_port
    assert "in use" in refused(server)
    server.pulsar_port = free_port()
    server.log_file.unlink()
    server.start()


def test_ctrl_c_stops_the_server_with_status_0(server: StandaloneProcess) -> None:
    server.start()
    os.kill(server.pid, signal.SIGINT)
    assert server.wait() == 0
