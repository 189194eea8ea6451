"""Binding: what is wrong with a port or a host is said by name."""

from __future__ import annotations

from contextlib import closing

import pytest

from magnetar.runtime.errors import AddressUnusable, PortInUse
from magnetar.runtime.grpc_frames import grpc_server
from magnetar.runtime.listener import authority, bind_port, is_loopback, is_wildcard, port_of

pytestmark = pytest.mark.real_loop


def test_port_0_binds_a_free_port() -> None:
    with closing(bind_port("127.0.0.1", 0)) as listener:
        assert port_of(listener) > 0


async def test_a_port_is_taken_before_a_server_serves_on_it() -> None:
    with closing(bind_port("127.0.0.1", 0)) as listener:
        port = port_of(listener)
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1"):
            bind_port("127.0.0.1", port)
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1"):
            await serve_grpc("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "nonsense.invalid"])  # RFC 5737, RFC 2606
async def test_a_host_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(AddressUnusable, match=f"cannot listen on host {host}") as refused:
        bind_port(host, 0)
    assert (refused.value.host, refused.value.definite) == (host, True)
    with pytest.raises(AddressUnusable, match=host):
        await serve_grpc(host, 0)


async def test_an_ipv6_address_can_be_served() -> None:
    try:
        bind_port("::1", 0).close()
    except AddressUnusable:
        pytest.skip("this machine has no IPv6")
    assert await serve_grpc("::1", 0) > 0


async def serve_grpc(host: str, port: int) -> int:
    async with grpc_server({}, host=host, port=port) as bound:
        return bound


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert authority("127.0.0.1", 6650) == "127.0.0.1:6650"
    assert authority("broker-1", 6650) == "broker-1:6650"
    assert authority("::1", 6650) == "[::1]:6650"


def test_loopback_and_wildcard_hosts_are_recognised() -> None:
    assert [h for h in ("127.0.0.1", "127.1.2.3", "::1", "localhost") if not is_loopback(h)] == []
    assert [h for h in ("0.0.0.0", "10.0.0.1", "::", "broker-1", "") if is_loopback(h)] == []
    assert [h for h in ("", "0.0.0.0", "::", "*") if not is_wildcard(h)] == []
    assert not is_wildcard("127.0.0.1")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(AddressUnusable, match=f"host {host}.*not a host name"):
        bind_port(host, 0)
