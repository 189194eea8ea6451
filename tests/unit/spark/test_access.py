"""Credentials and TLS of source and sink: the options, and which calls and processes get them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pyarrow as pa
import pytest
from fakes.broker import running_broker
from fakes.cluster_state import ClusterState
from fakes.range_server import RangeServer, Topic, serving
from support import wait_for

from magnetar.broker.session.access import Accepted, AllowAll, Credentials, Outcome, Refused
from magnetar.protos import broker_pb2 as pb
from magnetar.runtime.grpc_frames import GREETING_KEY
from magnetar.spark.access import PARAMS, PLUGIN, Access
from magnetar.spark.errors import InvalidOption, ReadRefused, ReadStalled, WriteRefused
from magnetar.spark.range_client import find_entries
from magnetar.spark.sink.identity import Identity
from magnetar.spark.sink.notes import note_batch
from magnetar.spark.sink.options import parse_options as parse_write_options
from magnetar.spark.sink.policies import Policies, policies_of
from magnetar.spark.sink.task import TaskWriter
from magnetar.spark.source.driver import StreamDriver, plan_frame
from magnetar.spark.source.options import parse_options
from magnetar.spark.source.schema import SCHEMA
from magnetar.spark.source.task_reader import read_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.real_loop(deadline_s=60)

TOPIC = "persistent://public/default/t"
TLS = Path(__file__).parents[2] / "fakes" / "tls"
GIVEN = {"service.url": "grpc://one", "topic": "t"}
SECRET = "eyJhbGciOi"
TRUST = {"pulsar.client.tlsTrustCertsFilePath": str(TLS / "ca.pem")}


@pytest.mark.parametrize("parse", [parse_options, parse_write_options])
@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({PARAMS: f"token:{SECRET}"}, PARAMS),
        ({PLUGIN: "token", PARAMS: SECRET}, PARAMS),
        ({PLUGIN: "athenz", PARAMS: f"token:{SECRET}"}, PLUGIN),
        ({PLUGIN: "com.example.Mine", PARAMS: f"token:{SECRET}"}, PLUGIN),
        ({PLUGIN: "tls", PARAMS: f"token:{SECRET}"}, PARAMS),
        ({PLUGIN: "basic", PARAMS: f'{{"password":"{SECRET}"}}'}, PARAMS),
        ({PLUGIN: "oauth2", PARAMS: f"token:{SECRET}"}, PARAMS),
        (
            {
                PLUGIN: "oauth2",
                PARAMS: f'{{"issuer_url":"https://a","private_key":"data:a;base64,{SECRET}"}}',
            },
            PARAMS,
        ),
        ({PLUGIN: "token", PARAMS: "token:" + SECRET * 9_000}, PARAMS),
        (TRUST, "pulsar.client.tlsTrustCertsFilePath"),
        (
            {"service.url": "grpcs://one", "pulsar.client.tlsTrustCertsFilePath": "/no.pem"},
            "pulsar.client.tlsTrustCertsFilePath",
        ),
        (
            {"service.url": "grpcs://one", "pulsar.client.tlsKeyFilePath": "/no.pem"},
            "pulsar.client.tlsCertificateFilePath",
        ),
    ],
)
def test_wrong_credentials_are_refused_by_name_and_not_shown(
    parse: Any, change: dict[str, str], option: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse(GIVEN | change)
    assert caught.value.option == option
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "params"),
    [
        ("org.apache.pulsar.client.impl.auth.AuthenticationToken", f"token:{SECRET}"),
        ("token", "file:///run/t"),
        ("token", "env:T"),
        ("basic", f'{{"username":"u","password":"{SECRET}"}}'),
        ("tls", "tlsCertFile:/a.pem,tlsKeyFile:/b.pem"),
        ("oauth2", '{"issuer_url":"https://a","private_key":"file:///k.json"}'),
    ],
)
def test_options_with_credentials_do_not_show_them(plugin: str, params: str) -> None:
    given = GIVEN | {PLUGIN: plugin, PARAMS: params}
    for options in (parse_options(given), parse_write_options(given)):
        assert options.access.authentication() is options.access.authentication()
        assert SECRET not in repr(options)


def test_encrypted_reads_leave_out_bookies_unless_they_are_asked_for() -> None:
    assert parse_options(GIVEN).reads_from_bookies
    encrypted = GIVEN | {"service.url": "grpcs://one"}
    assert not parse_options(encrypted).reads_from_bookies
    assert parse_options(encrypted | {"readFromBookies": "true"}).reads_from_bookies


class Tokens:
    """Accepts the token that is in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def authenticate(self, credentials: Credentials) -> Outcome:
        if credentials.data == self._path.read_bytes():
            return Accepted("reader", AllowAll())
        return Refused("the token is not valid")


async def _one(batch: pa.RecordBatch) -> AsyncIterator[pa.RecordBatch]:
    yield batch


async def _write(given: dict[str, str], batch: int) -> None:
    options = parse_write_options(given, streaming=True)

    async def policies(topic: str) -> Policies:
        found = await asyncio.to_thread(policies_of, options, topic, "q")
        return Policies(deduplication=True, message_bytes_max=0, note=found.note)

    task = TaskWriter(options, Identity("q", batch, 0, (), "q"), 0, policies=policies)
    await task.run(_one(pa.RecordBatch.from_pydict({"value": [f"{batch}"]})))
    digests = {TOPIC: "d"}
    await asyncio.to_thread(note_batch, options, sink="q", query="q", batch=batch, digests=digests)


def _read(given: dict[str, str]) -> list[bytes]:
    options = parse_options(given)
    tasks = plan_frame(options)
    batches = [it for task in tasks for it in read_task(options, SCHEMA, task)]
    return [row["value"] for batch in batches for row in batch.to_pylist()]


async def test_every_call_of_source_and_sink_has_credentials_also_new_ones(tmp_path: Path) -> None:
    """The token changes between two batches. Source and sink read its file again for each call."""
    accepted, held = tmp_path / "accepted", tmp_path / "held"
    accepted.write_text("one")
    held.write_text("one")
    async with running_broker(
        ClusterState(), make_authenticator=lambda: Tokens(accepted)
    ) as broker:
        given = {"service.url": broker.grpc_url, "topic": TOPIC}
        mine = given | {PLUGIN: "token", PARAMS: f"file://{held}"}
        await _write(mine, 0)
        assert await asyncio.to_thread(_read, mine) == [b"0"]
        options = parse_options(mine | {"subscription": "s"}, streaming=True)
        driver = StreamDriver(options, now_ms=0, query="q")
        start = await asyncio.to_thread(_latest, driver, driver.initial())
        await asyncio.to_thread(wait_for, lambda: _pushes(driver, start))
        accepted.write_text("two")
        for refused in (given, mine):
            whole = rf"^{TOPIC}: NotAuthenticated: .*the token is not valid"
            with pytest.raises(ReadRefused, match=whole):
                await asyncio.to_thread(_read, refused)
            with pytest.raises(WriteRefused, match="the token is not valid"):
                await _write(refused, 1)
        held.write_text("two")
        await _write(mine, 1)
        assert await asyncio.to_thread(_read, mine) == [b"0", b"1"]
        driver.close()


def _latest(driver: StreamDriver, start: dict[str, Any]) -> dict[str, Any]:
    return driver.latest(start, rows_max=None, bytes_max=None)


def _pushes(driver: StreamDriver, start: dict[str, Any]) -> bool:
    _latest(driver, start)
    return bool(driver._pushed)


class Counted:
    """Counts the requests for a token. After a refusal, the token is another one."""

    method = "token"
    token = b"old"
    requests = 0

    async def data(self) -> bytes:
        self.requests += 1
        return self.token

    def on_refused(self) -> None:
        self.token = b"new"


def test_calls_at_the_same_time_get_their_credentials_with_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credentials = Counted()
    monkeypatch.setattr(Access, "authentication", lambda _: SimpleNamespace(auth=credentials))

    def admit(call: grpc.ServicerContext) -> None:
        if b"new" not in dict(call.invocation_metadata())[GREETING_KEY]:
            call.abort(grpc.StatusCode.ABORTED, "NotAuthenticated: the token is too old")

    topic = Topic()
    for _ in range(4):
        topic.add_batch(3, b"one")
    with serving(RangeServer(topic, before_entry=admit)) as server:
        asks = [(server.url, pb.FindEntryRequest(topic=TOPIC, index=at)) for at in range(4)]
        replies = find_entries(Access(), asks)
    assert [it.entry for it in replies if isinstance(it, pb.FindEntryReply)] == [0, 1, 2, 3]
    assert credentials.requests == 2  # one before the refusals, one after them


def test_a_source_over_tls_never_calls_a_broker_without_it() -> None:
    topic = Topic()
    topic.add_batch(3, b"one")
    credentials = grpc.ssl_server_credentials(
        [((TLS / "server-key.pem").read_bytes(), (TLS / "server.pem").read_bytes())]
    )
    with ExitStack() as stack:
        plain = stack.enter_context(serving(RangeServer(topic)))
        server = stack.enter_context(serving(RangeServer(topic), credentials))
        given = {"service.url": server.url, "topic": "t", "readTimeoutMs": "3000"}
        assert _read(given | TRUST) == [b"one"]
        server.owner = plain.url
        with pytest.raises(ReadRefused, match=f"owner is {plain.url}, without TLS"):
            _read(given | TRUST)
        assert plain.plans == 0
        server.owner = ""
        untrusted = {"pulsar.client.tlsTrustCertsFilePath": str(TLS / "client.pem")}
        with pytest.raises(ReadStalled):
            _read(given | untrusted)
