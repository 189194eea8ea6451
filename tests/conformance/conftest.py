"""A real ZooKeeper for the tests that ask for it, started once per session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import skip_without_zookeeper

from magnetar.zookeeper_server import ZooKeeperEnsemble

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperEnsemble]:
    """Start a standalone server. It acknowledges writes before it syncs: no test cuts the power."""
    directory = tmp_path_factory.mktemp("zookeeper")
    skip_without_zookeeper()
    server = ZooKeeperEnsemble(directory, force_sync=False)
    with server:
        yield server
