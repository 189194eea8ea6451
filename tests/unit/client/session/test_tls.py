"""TLS over both transports: which servers a client accepts, and which certificate it offers."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from fakes.loops import LOOPS, loop_of
from grpc import aio

import magnetar
from magnetar.client.errors import ConnectError, InvalidConfiguration, NotAllowedError
from magnetar.client.options import ClientOptions
from magnetar.client.session.connection import Connection
from magnetar.client.session.pool import Purpose
from magnetar.client.session.service_url import Scheme, parse_service_url
from magnetar.client.session.transport import dialer_of, service_url_of
from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.framing import encode_command
from magnetar.runtime.grpc_frames import frame_stream_handler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from magnetar.runtime.frames import FrameStream

pytestmark = pytest.mark.real_loop

FILES = Path(__file__).parents[3] / "fakes" / "tls"
TRUSTED = {"tls_trust_certs_file_path": str(FILES / "ca.pem")}
OWN = str(FILES / "client.pem"), str(FILES / "client-key.pem")


@pytest.fixture(params=LOOPS)
def _loop(request: pytest.FixtureRequest) -> Iterator[None]:
    with loop_of(request.param):
        yield


@asynccontextmanager
async def pulsar_server(*, wants_certificate: bool = False) -> AsyncIterator[int]:
    """Accept sessions over TLS; the server's version is the name in the client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(FILES / "ca.pem"))
    context.load_cert_chain(FILES / "server.pem", FILES / "server-key.pem")
    if wants_certificate:
        context.verify_mode = ssl.CERT_REQUIRED

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        subject: Any = (writer.get_extra_info("peercert") or {}).get("subject", ())
        name = dict(pair for pairs in subject for pair in pairs).get("commonName", "no certificate")
        writer.write(encode_command(pb.CommandConnected(server_version=name)))
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(accept, "localhost", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


@asynccontextmanager
async def grpc_server(*, wants_certificate: bool = False) -> AsyncIterator[int]:
    async def accept(stream: FrameStream) -> None:
        await stream.receive()
        await stream.send([encode_command(pb.CommandConnected(server_version="admin"))])
        while True:
            await stream.receive()

    handlers = {"Session": frame_stream_handler(accept)}
    server = aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("magnetar.broker.Broker", handlers),)
    )
    pair = (FILES / "server-key.pem").read_bytes(), (FILES / "server.pem").read_bytes()
    authority = (FILES / "ca.pem").read_bytes() if wants_certificate else None
    credentials = grpc.ssl_server_credentials([pair], authority, wants_certificate)
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    yield port
    await server.stop(0)


async def server_version(url: str, **options: Any) -> str:
    """Open a session and return what the server calls itself. Raises why it does not open."""
    chosen = ClientOptions(url, **options)
    dialer = dialer_of(chosen)
    (broker,) = parse_service_url(service_url_of(chosen))
    stream = dialer.open(broker, Purpose.PUBLISH)
    connection = Connection(stream, broker, open_timeout_s=10, keepalive_s=30)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(connection.run())
            try:
                await connection.wait_opened()
            except ConnectError as error:
                return error.reason
            await connection.close()
        return connection.server_version
    finally:
        await dialer.close()


@pytest.mark.usefixtures("_loop")
async def test_only_a_trusted_certificate_of_the_right_host_is_accepted() -> None:
    async with pulsar_server() as port:
        url, by_address = f"pulsar+ssl://localhost:{port}", f"pulsar+ssl://127.0.0.1:{port}"
        assert await server_version(url, **TRUSTED) == "no certificate"
        assert "CERTIFICATE_VERIFY_FAILED" in await server_version(url)
        assert await server_version(url, tls_allow_insecure_connection=True) == "no certificate"
        unchecked = TRUSTED | {"tls_validate_hostname": False}
        assert await server_version(url, **unchecked) == "no certificate"
        if (
            await server_version(by_address, **unchecked) == "no certificate"
        ):  # the server listens on this address, too
            assert "mismatch" in await server_version(by_address, **TRUSTED)
        plain = f"pulsar://localhost:{port}"
        assert await server_version(plain, use_tls=True, **TRUSTED) == "no certificate"


@pytest.mark.usefixtures("_loop")
async def test_the_clients_certificate_is_offered() -> None:
    async with pulsar_server(wants_certificate=True) as port:
        url = f"pulsar+ssl://localhost:{port}"
        by_class = magnetar.AuthenticationTLS(*OWN)
        assert await server_version(url, authentication=by_class, **TRUSTED) == "admin"
        paths = {"tls_certificate_file_path": OWN[0], "tls_private_key_file_path": OWN[1]}
        assert await server_version(url, **paths, **TRUSTED) == "admin"
        assert await server_version(url, **TRUSTED) != "admin"


async def test_grpc_over_tls_presents_the_client_certificate() -> None:
    async with grpc_server(wants_certificate=True) as port:
        url = f"grpcs://localhost:{port}"
        by_class = magnetar.AuthenticationTLS(*OWN)
        assert await server_version(url, authentication=by_class, **TRUSTED) == "admin"
        assert await server_version(url, **TRUSTED) != "admin"


async def test_without_a_file_the_authorities_of_the_system_are_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with grpc_server() as grpc_port, pulsar_server() as pulsar_port:
        urls = f"grpcs://localhost:{grpc_port}", f"pulsar+ssl://localhost:{pulsar_port}"
        for url in urls:
            assert await server_version(url) not in ("admin", "no certificate")
        monkeypatch.setenv("SSL_CERT_FILE", str(FILES / "ca.pem"))  # OpenSSL's own variable
        assert [await server_version(url) for url in urls] == ["admin", "no certificate"]


@pytest.mark.parametrize("scheme", ["grpcs", "pulsar+ssl"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tls_trust_certs_file_path", "/missing.pem"),
        ("tls_certificate_file_path", OWN[0]),
        ("authentication", magnetar.AuthenticationTLS("/missing.pem", "/missing-key.pem")),
    ],
)
def test_files_that_cannot_be_used_are_named(scheme: str, option: str, value: Any) -> None:
    named = "tls_certificate_file_path" if option == "authentication" else option
    with pytest.raises(InvalidConfiguration, match=f"{named}|tls_private_key_file_path"):
        dialer_of(ClientOptions(f"{scheme}://a", **{option: value}))


@pytest.mark.parametrize("scheme", ["grpcs", "pulsar+ssl"])
def test_an_empty_path_of_authorities_means_those_of_the_system(scheme: str) -> None:
    dialer_of(ClientOptions(f"{scheme}://a", tls_trust_certs_file_path=""))


@pytest.mark.parametrize("scheme", ["grpcs", "pulsar+ssl"])
@pytest.mark.parametrize("form", ["PKCS8", "TraditionalOpenSSL"])
def test_encrypted_private_key_is_refused_without_a_question_on_the_terminal(
    scheme: str, form: str, tmp_path: Path
) -> None:
    key = load_pem_private_key(Path(OWN[1]).read_bytes(), None)
    password = BestAvailableEncryption(b"secret")
    path = tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, getattr(PrivateFormat, form), password))
    options: dict[str, Any] = {
        "tls_certificate_file_path": OWN[0],
        "tls_private_key_file_path": str(path),
    }
    with pytest.raises(InvalidConfiguration, match=r"key\.pem is encrypted"):
        dialer_of(ClientOptions(f"{scheme}://a", **options))


def test_grpc_refuses_connections_without_checks_by_name() -> None:
    with pytest.raises(NotAllowedError, match="tls_allow_insecure_connection"):
        dialer_of(ClientOptions("grpcs://a", tls_allow_insecure_connection=True))


def test_use_tls_selects_the_scheme() -> None:
    for scheme in Scheme:
        url = service_url_of(ClientOptions(f"{scheme}a,b", use_tls=True))
        assert url == f"{scheme.with_tls}a,b"
        assert service_url_of(ClientOptions(f"{scheme}a,b")) == f"{scheme}a,b"
