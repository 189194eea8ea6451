"""Requests to the admin port: several brokers, redirects, refusals, invalid answers."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import typer
from fakes.admin_port import broker, invoke
from support import free_port

from magnetar.cli.admin import parse_urls
from magnetar.cli.subscriptions import EARLIEST, LATEST, parse_age, parse_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PREFIX = "/admin/v2/persistent/public/default"


def test_a_dead_broker_is_skipped_in_silence() -> None:
    with broker() as alive:
        alive.answer(PREFIX, ["persistent://public/default/t"])
        code, said, errors = invoke(f"http://127.0.0.1:{free_port()},{alive.url}", "topics", "list")
    assert (code, said, errors) == (0, "persistent://public/default/t\n", "")


@pytest.mark.parametrize(
    "command",
    [
        ("subscriptions", "skip", "t", "\udcff", "--all"),
        ("subscriptions", "key", "t", "s", "\udcff"),
        ("subscriptions", "pending", "t", "s", "--consumer", "\udcff"),
        ("subscriptions", "list", "\udcff"),
        ("tenants", "create", "\udcff"),
        ("namespaces", "unload", "public/default", "--bundle", "\udcff"),
        ("topics", "set-backlog-quota", "t", "--type", "\udcff", "--policy", "\udcff"),
    ],
)
def test_an_argument_that_is_not_utf8_is_a_usage_error(command: tuple[str, ...]) -> None:
    code, said, errors = invoke("http://127.0.0.1:1", *command)
    assert (code, said) == (2, "")
    assert "udcff" in errors


def test_each_dead_broker_is_named_when_all_are_dead() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    code, _, errors = invoke(",".join(urls), "topics", "list")
    assert code == 1
    first, second, last = errors.splitlines()
    assert first == f"Warning: cannot reach {urls[0]}: Connection refused"
    assert second == f"Warning: cannot reach {urls[1]}: Connection refused"
    assert last.startswith("Error: none of 2 brokers answered. Is a server running?")


@pytest.mark.parametrize(
    ("command", "method", "path", "body"),
    [
        (("topics", "create", "a?b"), "PUT", f"{PREFIX}/a%3Fb", None),
        (
            ("subscriptions", "delete", "t", "a/b"),
            "DELETE",
            f"{PREFIX}/t/subscription/a%2Fb?force=false",
            None,
        ),
        (
            ("subscriptions", "reset", "t", "s", "--to", "3:15"),
            "POST",
            f"{PREFIX}/t/subscription/s/resetcursor",
            {"ledgerId": 3, "entryId": 15},
        ),
        (
            ("subscriptions", "reset", "t", "s", "--to", "3:15:2"),
            "POST",
            f"{PREFIX}/t/subscription/s/resetcursor",
            {"ledgerId": 3, "entryId": 15, "batchIndex": 2},
        ),
        (
            ("subscriptions", "create", "t", "s", "-m", "earliest"),
            "PUT",
            f"{PREFIX}/t/subscription/s",
            EARLIEST,
        ),
        (
            ("subscriptions", "skip", "t", "s", "--count", "3"),
            "POST",
            f"{PREFIX}/t/subscription/s/skip/3",
            None,
        ),
        (
            ("subscriptions", "skip", "t", "s", "--all"),
            "POST",
            f"{PREFIX}/t/subscription/s/skip_all",
            None,
        ),
        (
            ("subscriptions", "expire", "t", "s", "--older-than", "2h"),
            "POST",
            f"{PREFIX}/t/subscription/s/expireMessages/7200",
            None,
        ),
        (
            ("subscriptions", "expire", "t", "--older-than", "90"),
            "POST",
            f"{PREFIX}/t/all_subscription/expireMessages/90",
            None,
        ),
        (
            ("subscriptions", "reset", "t", "s", "--to", "2026-01-31T10:00:00Z"),
            "POST",
            f"{PREFIX}/t/subscription/s/resetcursor/1769853600000",
            None,
        ),
    ],
)
def test_a_redirect_repeats_the_request_at_the_owner(
    command: tuple[str, ...], method: str, path: str, body: Any
) -> None:
    with broker() as asked, broker() as owner:
        asked.answer(path, status=307, to=f"{owner.url}{path}")
        owner.answer(path, status=204)
        code, _, errors = invoke(asked.url, *command)
    assert (code, errors) == (0, "")
    assert asked.asked == owner.asked == [(method, path, body)]


def test_brokers_that_redirect_to_each_other_end_the_command() -> None:
    with broker() as one, broker() as other:
        one.answer(PREFIX, status=307, to=f"{other.url}{PREFIX}")
        other.answer(PREFIX, status=307, to=f"{one.url}{PREFIX}")
        code, _, errors = invoke(one.url, "topics", "list")
    assert code == 1
    assert "redirected 5 times: the topic is moving; try again" in errors


def test_a_refusal_is_printed_with_its_advice() -> None:
    path = f"{PREFIX}/t/subscription/s?force=false"
    refusal = {
        "reason": "subscription 's' has 1 connected consumers",
        "error": "ConsumersConnected",
        "advice": "close them first, or use --force",
    }
    with broker() as it:
        it.answer(path, refusal, status=412)
        code, _, errors = invoke(it.url, "subscriptions", "delete", "t", "s")
    assert code == 1
    assert errors == f"Error: {refusal['reason']} (HTTP status 412); {refusal['advice']}\n"


def test_expiry_without_an_age_is_refused_before_a_request_is_sent() -> None:
    with broker() as it:
        code, _, errors = invoke(it.url, "subscriptions", "expire", "t", "s")
        assert it.asked == []
    assert code == 2
    assert "--older-than" in errors


def test_a_change_may_take_longer_than_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may need up to a minute, for example to delete a namespace with its topics."""
    monkeypatch.setattr("magnetar.cli.admin.READ_TIMEOUT_S", 0.02)
    with broker() as slow:
        slow.delay_s = 0.1
        slow.answer(f"{PREFIX}/t", status=204)
        slow.answer(PREFIX, [])
        assert invoke(slow.url, "topics", "create", "t")[0] == 0
        code, _, errors = invoke(slow.url, "topics", "list")
    assert code == 1
    assert "did not answer within 0.02 s" in errors


def test_a_change_without_an_answer_is_not_repeated_at_the_next_broker() -> None:
    with broker() as first, broker() as second:
        first.answers = {}  # the first broker ends the connection without an answer
        first.answer(f"{PREFIX}/u", status=204)
        second.answer(f"{PREFIX}/t", status=204)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ThreadingHTTPServer, "handle_error", lambda *_: None)
            code, _, errors = invoke(f"{first.url},{second.url}", "topics", "create", "t")
    assert code == 1
    assert "Whether the request was carried out is unknown" in errors
    assert second.asked == []


BODY = b'{"reason": "why"}'
WHOLE = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 17\r\n\r\n" + BODY
CHUNKED = b"HTTP/1.1 500 -\r\ntransfer-encoding: chunked\r\n\r\n11\r\n" + BODY + b"\r\n0\r\n\r\n"


@contextmanager
def server_of(answers: Iterable[bytes]) -> Iterator[str]:
    """A server that sends these answers, one on each connection, and then ends the connection."""

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("whole", "ends"),
    [(WHOLE, range(len(WHOLE))), (CHUNKED, range(CHUNKED.index(BODY), len(CHUNKED) - 7))],
    ids=["length", "chunked"],
)
def test_a_change_is_not_repeated_when_the_answer_ends_early(whole: bytes, ends: range) -> None:
    with broker() as second, server_of(whole[:end] for end in ends) as first:
        second.answer(f"{PREFIX}/t", status=204)
        for end in ends:
            code, _, errors = invoke(f"{first},{second.url}", "topics", "create", "t")
            assert (code, second.asked) == (1, []), whole[:end]
            assert "Whether the request was carried out is unknown" in errors


def test_a_query_is_repeated_when_the_answer_ends_early() -> None:
    with broker() as second, server_of([WHOLE[:-1]]) as first:
        second.answer(PREFIX, [])
        code, _, _ = invoke(f"{first},{second.url}", "topics", "list")
    assert code == 0


@pytest.mark.parametrize("status", [b"502 Bad Gateway", b"504 Gateway Timeout"])
def test_a_change_is_not_repeated_after_a_failure_of_a_proxy(status: bytes) -> None:
    answer = b"HTTP/1.1 " + status + b"\r\ncontent-length: 3\r\n\r\n<p>"
    with broker() as second, server_of([answer]) as first:
        code, _, errors = invoke(f"{first},{second.url}", "topics", "create", "t")
    assert (code, second.asked) == (1, [])
    assert "Whether the request was carried out is unknown" in errors


PAGE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\n<p>"


@pytest.mark.parametrize("answer", [b"220 mail\r\n", b"\0\0\0\1", PAGE])
def test_a_change_is_sent_to_the_next_address_when_the_first_is_no_broker(answer: bytes) -> None:
    with broker() as second, server_of([answer]) as first:
        second.answer(f"{PREFIX}/t", status=204)
        code, _, errors = invoke(f"{first},{second.url}", "topics", "create", "t")
    assert (code, errors, len(second.asked)) == (0, "", 1)


def test_an_address_without_a_broker_is_named() -> None:
    with broker() as it:
        it.answer(PREFIX, {"detail": "a server of another kind"}, status=404)
        code, _, errors = invoke(it.url, "topics", "list")
    assert code == 1
    assert "did not answer like the HTTP port of a broker" in errors


def test_stats_prints_a_table_that_names_the_fault_of_the_log() -> None:
    flow = {"msgRateOut": 2.5, "msgThroughputOut": 2_500_000.0}
    counters = {"msgOutCounter": 3, "bytesOutCounter": 30, "msgInCounter": 9, "bytesInCounter": 90}
    consumer = {
        "consumerName": "c1",
        "availablePermits": 0,
        "unackedMessages": 2,
        "blockedConsumerOnUnackedMsgs": True,
        "msgRateOut": 1.0,
        "messageAckRate": 0.5,
        "drainingHashesCount": 3,
        "address": "10.0.0.2:7",
    }
    subscription = {
        **flow,
        "type": "Shared",
        "msgBacklogMessages": 6,
        "unackedMessages": 2,
        "consumers": [consumer],
        "waitingFor": ["no_permits: [a]"],
    }
    producer = {
        "producerName": "me",
        "msgRateIn": 1.0,
        "msgThroughputIn": 10.0,
        "accessMode": "Shared",
        "address": "10.0.0.1:5",
    }
    with broker() as it:
        it.answer(
            f"{PREFIX}/t/stats",
            {
                **flow,
                **counters,
                "msgRateIn": 1.0,
                "msgThroughputIn": 10.0,
                "msgCount": 7,
                "storageSize": 1_200,
                "publishers": [producer],
                "subscriptions": {"s": subscription},
                "managedLedger": {"trouble": "2 of 3 bookies are away"},
            },
        )
        code, said, _ = invoke(it.url, "topics", "stats", "t")
    assert code == 0
    assert [line.split() for line in said.splitlines()] == [
        ["rate", "throughput", "messages", "bytes"],
        ["in", "1.0/s", "10", "B/s", "9", "90", "B"],
        ["out", "2.5/s", "2.5", "MB/s", "3", "30", "B"],
        ["stored", "7", "1.2", "kB"],
        ["trouble:", "2", "of", "3", "bookies", "are", "away"],
        [],
        ["producer", "rate", "throughput", "access", "address"],
        ["me", "1.0/s", "10", "B/s", "Shared", "10.0.0.1:5"],
        [],
        ["subscription", "type", "backlog", "unacked", "rate", "consumers", "waiting", "for"],
        ["s", "Shared", "6", "2", "2.5/s", "1", "no_permits:", "[a]"],
        [],
        ["subscription", "consumer", "permits", "unacked", "rate", "acks", "draining", "address"],
        ["s", "c1", "0", "2", "(blocked)", "1.0/s", "0.5/s", "3", "10.0.0.2:7"],
    ]


def test_peek_reads_until_it_has_enough_messages() -> None:
    def message(number: int) -> dict[str, Any]:
        return {
            "messageId": f"3:{number}",
            "publishTime": 0,
            "key": None,
            "properties": {"n": str(number)},
            "payload": "/2E=",
            "problem": None,
        }

    path = f"{PREFIX}/t/subscription/s/position"
    end = {"reason": "there is no more", "error": "MessageNotFound"}
    with broker() as it:
        it.answer(f"{path}/1", [message(1), message(2)])
        it.answer(f"{path}/2", [message(3)])
        it.answer(f"{path}/3", end, status=404)
        code, said, _ = invoke(it.url, "topics", "peek", "t", "-s", "s", "-n", "2")
        assert len(it.asked) == 1
        assert code == 0
        assert said.splitlines() == [
            "----- message 3:1, published 1970-01-01 00:00:00Z -----",
            "key:[null], properties:[n=1], content:\\xffa",
            "----- message 3:2, published 1970-01-01 00:00:00Z -----",
            "key:[null], properties:[n=2], content:\\xffa",
        ]
        code, said, _ = invoke(it.url, "topics", "peek", "t", "-s", "s", "-n", "9", "--json")
        assert [each["messageId"] for each in json.loads(said)] == ["3:1", "3:2", "3:3"]
        it.answer(f"{path}/1", end, status=404)
        _, said, _ = invoke(it.url, "topics", "peek", "t", "-s", "s")
        assert said == "the backlog of s is empty\n"


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://a:1", ["http://a:1"]),
        ("http://a:1/,b:2", ["http://a:1", "http://b:2"]),
        ("http://a:1, https://[::1]:2,c", ["http://a:1", "https://[::1]:2", "https://c"]),
    ],
)
def test_admin_urls_are_parsed_with_or_without_repeated_schemes(text: str, urls: list[str]) -> None:
    assert parse_urls(text) == urls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:1", "a:1 does not begin with http://"),
        ("ftp://a:1", "does not begin with http://"),
        ("http://a:b", "Port could not be cast"),
        ("http://a:1,", "names no host"),
    ],
)
def test_an_invalid_admin_url_is_refused(
    text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        parse_urls(text)
    assert reason in capsys.readouterr().err


NOW = datetime(2026, 1, 31, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("earliest", EARLIEST),
        ("latest", LATEST),
        ("3:15", {"ledgerId": 3, "entryId": 15}),
        ("3:15:2", {"ledgerId": 3, "entryId": 15, "batchIndex": 2}),
        ("10m", 1_769_853_600_000 - 600_000),
        ("1w", 1_769_853_600_000 - 7 * 86_400_000),
        ("2026-01-31T10:00:00+00:00", 1_769_853_600_000),
        ("999999999s", 1_769_853_600_000 - 999_999_999_000),
    ],
)
def test_each_form_of_a_target_moves_the_subscription(text: str, target: object) -> None:
    assert parse_target(text, now=NOW) == target


@pytest.mark.parametrize(
    "text",
    ["", "now", "3", "3:", "10", "-10m", "999999999w", "2026-13-01", "0001-01-01"],
)
def test_an_invalid_target_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not earliest, latest, a message id"):
        parse_target(text, now=NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1", 1), ("30s", 30), ("10m", 600), ("2h", 7_200), ("1d", 86_400), ("9w", 5_443_200)],
)
def test_an_age_is_parsed_into_seconds(text: str, seconds: int) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1.5h", "10x", "1000000000", "999999999w"])
def test_an_invalid_age_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not an age such as 10m"):
        parse_age(text)


def test_an_empty_list_prints_a_note_on_standard_error() -> None:
    with broker() as server:
        server.answer("/admin/v2/persistent/no/there", [])
        server.answer(f"{PREFIX}/greetings/subscriptions", [])
        topics = invoke(server.url, "topics", "list", "no/there")
        subscriptions = invoke(server.url, "subscriptions", "list", "greetings")
    assert topics == (0, "", "no topics in no/there\n")
    assert subscriptions == (0, "", "no subscriptions of greetings\n")
