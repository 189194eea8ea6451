"""Apache's classes of authentication: what each sends, and what is refused by name."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

import magnetar
from magnetar.client import oauth2
from magnetar.client.authentication import credentials_of
from magnetar.client.errors import (
    ErrorGettingAuthenticationData,
    InvalidConfiguration,
    NotAllowedError,
)
from magnetar.client.oauth2 import TOKEN_BYTES_MAX, Oauth2Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_loop

JAVA = "org.apache.pulsar.client.impl.auth."
BASIC = json.dumps({"username": "u", "password": "p"})


async def sent(authentication: magnetar.Authentication | None) -> tuple[str, bytes | None]:
    credentials = credentials_of(authentication)
    return credentials.method, await credentials.data()


async def test_each_class_sends_what_apaches_brokers_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a token"
    file.write_text("from-file\n")
    monkeypatch.setenv("TEST_TOKEN", "from-env")
    create = magnetar.Authentication
    cases: list[tuple[magnetar.Authentication | None, tuple[str, bytes | None]]] = [
        (None, ("none", None)),
        (magnetar.AuthenticationToken("abc"), ("token", b"abc")),
        (magnetar.AuthenticationToken(lambda: "new"), ("token", b"new")),
        (magnetar.AuthenticationBasic("u", "p"), ("basic", b"u:p")),
        (magnetar.AuthenticationBasic("u", "p", "oms3.0"), ("oms3.0", b"u:p")),
        (magnetar.AuthenticationBasic(auth_params_string=BASIC), ("basic", b"u:p")),
        (magnetar.AuthenticationTLS("c.pem", "k.pem"), ("tls", None)),
        (create("token", "token:abc"), ("token", b"abc")),
        (create("token", "abc"), ("token", b"abc")),
        (create("token", f"file://{file}"), ("token", b"from-file")),
        (create(f"{JAVA}AuthenticationToken", "env:TEST_TOKEN"), ("token", b"from-env")),
        (create("basic", BASIC), ("basic", b"u:p")),
        (create(f"{JAVA}AuthenticationTls", "tlsCertFile:c,tlsKeyFile:k"), ("tls", None)),
    ]
    for authentication, expected in cases:
        assert await sent(authentication) == expected


def test_a_certificate_is_offered_to_the_handshake() -> None:
    assert magnetar.AuthenticationTLS("c.pem", "k.pem").auth.certificate == ("c.pem", "k.pem")
    by_name = magnetar.Authentication("tls", "tlsCertFile:c,tlsKeyFile:k")
    assert by_name.auth.certificate == ("c", "k")


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: magnetar.Authentication("/lib/auth.so", ""), NotAllowedError, "auth.so"),
        (lambda: magnetar.AuthenticationAthenz("{}"), NotAllowedError, "Athenz"),
        (lambda: magnetar.Authentication("athenz", "{}"), NotAllowedError, "Athenz"),
        (lambda: magnetar.AuthenticationToken(5), TypeError, "token"),
        (lambda: magnetar.AuthenticationToken(None), ValueError, "token"),
        (lambda: magnetar.AuthenticationBasic("u"), TypeError, "password"),
        (lambda: magnetar.AuthenticationTLS("c", 5), TypeError, "private_key_path"),
        (lambda: magnetar.AuthenticationOauth2("x"), InvalidConfiguration, "oauth2"),
        (lambda: magnetar.AuthenticationOauth2("{}"), InvalidConfiguration, "issuer_url"),
        (lambda: magnetar.AuthenticationOauth2(5), TypeError, "auth_params_string"),
        (lambda: magnetar.Authentication("basic", '{"a":1}'), InvalidConfiguration, "basic"),
        (lambda: magnetar.Authentication("tls", "x"), InvalidConfiguration, "tlsCertFile"),
        (lambda: magnetar.Client("pulsar://a", authentication="t"), TypeError, "authentication"),
    ],
)
def test_unusable_credentials_are_refused_by_name(make: Any, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        make()


@pytest.mark.parametrize("token", ["", "x" * (TOKEN_BYTES_MAX + 1), b"abc", None, "\udc80"])
async def test_a_token_that_cannot_be_sent_is_an_error(token: Any) -> None:
    with pytest.raises(ErrorGettingAuthenticationData):
        await magnetar.AuthenticationToken(lambda: token).auth.data()


async def test_a_function_that_fails_is_reported() -> None:
    def fail() -> str:
        raise KeyError("vault")

    with pytest.raises(ErrorGettingAuthenticationData, match="vault"):
        await magnetar.AuthenticationToken(fail).auth.data()


async def test_a_variable_that_is_not_set_is_named() -> None:
    token = magnetar.Authentication("token", "env:NOT_SET").auth
    with pytest.raises(ErrorGettingAuthenticationData, match="variable NOT_SET is not set"):
        await token.data()


def test_secrets_are_not_printed() -> None:
    for authentication in (
        magnetar.AuthenticationToken("secret"),
        magnetar.AuthenticationBasic("u", "secret"),
    ):
        assert "secret" not in repr(authentication)
    with pytest.raises(InvalidConfiguration) as caught:
        magnetar.AuthenticationBasic(auth_params_string="secret")
    assert "secret" not in str(caught.value)
    params = {"issuer_url": "http://a", "private_key": "data:application/json;base64,secret"}
    assert "secret" not in repr(Oauth2Tokens.parse(params))


async def test_secrets_are_not_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"secret\xff")
    key = '{"client_id": "me", "client_secret": "secret"}'
    params = json.dumps({"issuer_url": "http://a", "private_key": key})
    for authentication in (
        magnetar.Authentication("token", f"file://{file}"),
        magnetar.AuthenticationOauth2(params),
    ):
        with pytest.raises(ErrorGettingAuthenticationData) as caught:
            await authentication.auth.data()
        assert "secret" not in str(caught.value)


TLS = Path(__file__).parents[2] / "fakes" / "tls"


class Issuer(http.server.BaseHTTPRequestHandler):
    """An OAuth 2.0 server that gives token-1, token-2, ..."""

    forms: list[dict[str, list[str]]]
    lifetime_s = 3600

    def do_GET(self) -> None:
        host = self.headers["Host"]
        self.answer({"token_endpoint": f"http://{host}/token"})

    def do_POST(self) -> None:
        self.forms.append(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        token = f"token-{len(self.forms)}"
        self.answer({"access_token": token, "expires_in": self.lifetime_s})

    def answer(self, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[tuple[str, type[Issuer]]]:
    handler = type("Handler", (Issuer,), {"forms": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", handler
    server.shutdown()
    thread.join()
    server.server_close()


KEY = json.dumps({"client_id": "me", "client_secret": "s"})


@pytest.mark.parametrize("form", ["path", "file", "data"])
async def test_oauth2_fetches_a_token_and_keeps_it(
    issuer: tuple[str, type[Issuer]], tmp_path: Path, form: str
) -> None:
    url, handler = issuer
    path = tmp_path / "key.json"
    path.write_text(KEY)
    data = base64.b64encode(KEY.encode()).decode()
    keys = {
        "path": str(path),
        "file": f"file://{path}",
        "data": f"data:application/json;base64,{data}",
    }
    params = {"issuer_url": url, "private_key": keys[form], "audience": "a", "scope": "s"}
    authentication = magnetar.AuthenticationOauth2(json.dumps(params))
    assert await sent(authentication) == ("token", b"token-1")
    assert await sent(authentication) == ("token", b"token-1")
    assert handler.forms == [
        {
            "grant_type": ["client_credentials"],
            "client_id": ["me"],
            "client_secret": ["s"],
            "audience": ["a"],
            "scope": ["s"],
        }
    ]


async def test_oauth2_renews_a_token_that_expires_soon(issuer: tuple[str, type[Issuer]]) -> None:
    url, handler = issuer
    handler.lifetime_s = 5
    data = "data:application/json;base64," + base64.b64encode(KEY.encode()).decode()
    authentication = magnetar.AuthenticationOauth2(
        json.dumps({"issuer_url": url, "private_key": data})
    )
    assert await sent(authentication) == ("token", b"token-1")
    assert await sent(authentication) == ("token", b"token-2")


async def test_oauth2_replaces_a_token_that_a_broker_refuses_unless_it_is_fresh(
    issuer: tuple[str, type[Issuer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "data:application/json;base64," + base64.b64encode(KEY.encode()).decode()
    authentication = magnetar.AuthenticationOauth2(
        json.dumps({"issuer_url": issuer[0], "private_key": data})
    )
    assert await sent(authentication) == ("token", b"token-1")
    authentication.auth.on_refused()
    assert await sent(authentication) == ("token", b"token-1")
    monkeypatch.setattr(oauth2, "FRESH_S", 0.0)
    authentication.auth.on_refused()
    assert await sent(authentication) == ("token", b"token-2")


async def test_oauth2_names_the_server_that_gives_no_token(
    issuer: tuple[str, type[Issuer]], tmp_path: Path
) -> None:
    url, _ = issuer
    params = {"issuer_url": url, "private_key": str(tmp_path / "missing")}
    authentication = magnetar.AuthenticationOauth2(json.dumps(params))
    with pytest.raises(ErrorGettingAuthenticationData, match="no token from"):
        await authentication.auth.data()


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.1 200 OK\r\n\r\n{"access_token": "t", "token_endpoint": 5}',
        b'HTTP/1.1 200 OK\r\n\r\n{"token_endpoint": "SELF", "access_token": "t",'
        b' "expires_in": 1' + b"0" * 400 + b"}",
        b'HTTP/1.1 200 OK\r\n\r\n{"token_endpoint": "SELF", "access_token": "\\udc80"}',
        b'HTTP/1.1 200 OK\r\n\r\n{"token_endpoint": "SELF", "access_token": ""}',
    ],
)
async def test_oauth2_reports_a_server_that_answers_nonsense(answer: bytes) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.replace(b"SELF", url.encode()))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    data = "data:application/json;base64," + base64.b64encode(KEY.encode()).decode()
    params = json.dumps({"issuer_url": url, "private_key": data})
    with pytest.raises(ErrorGettingAuthenticationData, match="no token from"):
        await magnetar.AuthenticationOauth2(params).auth.data()
    server.close()


async def test_oauth2_sends_no_secret_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(url: str, form: bytes | None = None) -> dict[str, str]:
        asked.append(url)
        return {"token_endpoint": "http://a/token"}

    monkeypatch.setattr(oauth2, "_ask", ask)
    data = "data:application/json;base64," + base64.b64encode(KEY.encode()).decode()
    params = json.dumps({"issuer_url": "https://a", "private_key": data})
    with pytest.raises(ErrorGettingAuthenticationData, match="not encrypted"):
        await magnetar.AuthenticationOauth2(params).auth.data()
    assert asked == ["https://a/.well-known/openid-configuration"]


async def test_oauth2_follows_no_redirect_from_https_to_http(
    issuer: tuple[str, type[Issuer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = issuer

    class Redirecting(Issuer):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{url}.well-known/openid-configuration")
            self.send_header("Content-Length", "0")
            self.end_headers()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "server.pem", TLS / "server-key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    with http.server.ThreadingHTTPServer(("localhost", 0), Redirecting) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        data = "data:application/json;base64," + base64.b64encode(KEY.encode()).decode()
        values = {"issuer_url": f"https://localhost:{server.server_port}", "private_key": data}
        try:
            with pytest.raises(ErrorGettingAuthenticationData, match="which is not encrypted"):
                await magnetar.AuthenticationOauth2(json.dumps(values)).auth.data()
        finally:
            server.shutdown()
            thread.join()
    assert handler.forms == []
