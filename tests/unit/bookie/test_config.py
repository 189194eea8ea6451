from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from magnetar.bookie.config import BookieConfig
from magnetar.runtime.config import ConfigError, load_config
from magnetar.runtime.listener import is_loopback

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = {"id": "b1", "data_dir": "/data", "metadata_url": "zk://h:2181"}


def load(**flags: object) -> BookieConfig:
    return load_config(BookieConfig, file=None, flags=NEEDED | flags)


def test_a_bookie_listens_on_loopback_and_the_default_ports() -> None:
    config = load()
    assert (config.host, config.advertised) == ("127.0.0.1", "127.0.0.1")
    assert (config.data_port, config.grpc_port) == (3181, 3182)


def test_the_advertised_host_is_that_of_the_setting_or_host() -> None:
    assert load(host="10.0.0.5").advertised == "10.0.0.5"
    assert load(host="0.0.0.0", advertised_host="b1.example").advertised == "b1.example"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_host_needs_an_advertised_host(host: str) -> None:
    with pytest.raises(ConfigError, match="set advertised_host to the address"):
        load(host=host)


@pytest.mark.parametrize("bookie", ["", "a b", "ä", "-a", "a/b", "x" * 129])
def test_an_invalid_id_is_refused(bookie: str) -> None:
    with pytest.raises(ConfigError, match="--id: 1 to 128 of"):
        load(id=bookie)


@pytest.mark.parametrize("missing", sorted(NEEDED))
def test_a_setting_without_a_default_is_required(missing: str) -> None:
    flags = {key: value for key, value in NEEDED.items() if key != missing}
    with pytest.raises(ConfigError, match=f"{missing} is required"):
        load_config(BookieConfig, file=None, flags=flags)


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "bookie.toml"
    file.write_text('id = "b1"\ndata_dir = "/data"\nmetadata_url = "zk://h:2181"\ngrcp_port = 1\n')
    with pytest.raises(ConfigError, match=r"'grcp_port'.*did you mean grpc_port"):
        load_config(BookieConfig, file=file, flags={})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_are_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "b1.example", "::"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"disk_full": 0.8}, "disk_resume 0.9 is above --disk-full 0.8"),
        ({"disk_full": 0.8, "disk_resume": 0.7}, "disk_warn 0.9 is above --disk-full 0.8"),
        ({"disk_full": 1.5}, "disk-full"),
        ({"collect_interval_s": 0}, "collect-interval-s"),
    ],
)
def test_limits_that_contradict_are_named(flags: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(**flags)


def test_upkeep_has_the_configured_values() -> None:
    upkeep = load(disk_full=0.99, collect_interval_s=5, tombstones_kept_s=60).upkeep
    assert (upkeep.disk.full, upkeep.disk.warn) == (0.99, 0.9)
    assert (upkeep.collector.interval_s, upkeep.collector.tombstones_kept_s) == (5, 60)
