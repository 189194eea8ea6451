"""The launcher of real ZooKeeper servers: the jars that it finds, its errors, and its clean-up."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from support import skip_without_zookeeper, wait_for

from magnetar.local_process import ProcessFailed
from magnetar.zookeeper_server import (
    JavaMissing,
    ZooKeeperEnsemble,
    address,
    find_jars,
    find_java,
    mode,
)

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.local_process import LocalProcess

pytestmark = pytest.mark.zookeeper


@pytest.fixture(autouse=True)
def _java() -> None:
    skip_without_zookeeper()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_mode(node: LocalProcess, wanted: str) -> None:
    """Wait until the server is in this mode. A busy machine may miss the deadline of `mode`."""
    wait_for(lambda: mode(node) == wanted)


def test_five_jars_are_found_in_the_wheel() -> None:
    names = [jar.name for jar in find_jars()]
    assert len(names) == 5
    assert all(jar.exists() for jar in find_jars())
    assert any(name.startswith("zookeeper-3") for name in names)


def test_a_zookeeper_server_restarts_after_a_stop_and_a_kill(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(tmp_path) as server:
        (node,) = server.nodes
        wait_mode(node, "standalone")
        assert server.hosts == address(node)
        first = node.pid
        assert first is not None
        node.kill()
        assert not node.running
        assert node.pid is None
        assert mode(node) is None
        assert not is_alive(first)
        node.start()
        second = node.pid
        assert second not in (None, first)
        wait_mode(node, "standalone")
    assert second is not None
    assert not is_alive(second)
    server.stop()  # a repeated stop has no effect


def test_a_paused_server_is_silent_and_can_be_stopped(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(tmp_path, force_sync=False) as server:
        (node,) = server.nodes
        node.pause()
        assert node.running
        assert mode(node) is None
        node.resume()
        wait_mode(node, "standalone")
        node.pause()
    assert not node.running


def test_java_that_is_missing_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaMissing, match="openjdk-17"):
        ZooKeeperEnsemble(tmp_path / "zookeeper")
    assert not (tmp_path / "zookeeper").exists()


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == tmp_path / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert find_java() != tmp_path / "nowhere" / "bin" / "java"


def test_a_jar_that_ends_the_server_is_reported_with_its_log(tmp_path: Path) -> None:
    jars = [jar for jar in find_jars() if "jute" not in jar.name]
    server = ZooKeeperEnsemble(tmp_path, jars=jars)
    with pytest.raises(ProcessFailed) as error:
        server.start()
    assert "NoClassDefFoundError" in error.value.log_tail
    assert error.value.name == "zookeeper-1"
    assert not server.nodes[0].running


def test_a_server_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    """One jar is missing, so the main thread dies. The process stays and does not answer."""
    jars = [jar for jar in find_jars() if "snappy" not in jar.name]
    server = ZooKeeperEnsemble(tmp_path, jars=jars, ready_s=1.5)
    server.nodes[0].launch()
    pid = server.nodes[0].pid
    assert pid is not None
    started_s = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"was not ready after 1\.5 s"):
        server.start()
    assert time.monotonic() - started_s < 20
    assert not is_alive(pid)


def test_two_launchers_in_one_process_do_not_share_ports(tmp_path: Path) -> None:
    with (
        ZooKeeperEnsemble(tmp_path / "one", force_sync=False) as one,
        ZooKeeperEnsemble(tmp_path / "two", force_sync=False) as two,
    ):
        assert one.hosts != two.hosts
        assert all(12_000 <= node.ports["client"] < 32_000 for node in (*one.nodes, *two.nodes))
