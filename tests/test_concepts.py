"""Each feature of docs/concepts.md has tests, which `concepts.toml` names. Features of the client
have tests with both of its interfaces and with Apache's client. Features of the broker have tests
over both transports. All named tests exist."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fakes import promises, usage
from fakes.client_api import CLIENTS, OURS, OURS_OVER_TCP
from fakes.wire import TRANSPORTS

import magnetar
from magnetar.broker.settings import BrokerSettings
from magnetar.client.options import (
    AsyncConsumerOptions,
    ClientOptions,
    ProducerOptions,
    ReaderOptions,
)

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "concepts.md"
FEATURES: dict[str, dict[str, Any]] = tomllib.loads((TESTS / "concepts.toml").read_text())
COLUMNS = 4

BROKER_SECTIONS = {
    "Types of subscriptions",
    "Key_Shared",
    "Times of delivery and expiry",
    "Statistics of subscriptions",
    "Magnetar's own",
}

FACES = ("sync", "asyncio", "apache")
SHARED = {  # the clients of each key whose tests run with several clients
    "promises": ("sync", "asyncio"),
    "uses": ("sync", "asyncio"),
    "clients": FACES,
    "clients_in_pairs": FACES,
    "waits": ("sync", "asyncio"),
    "both_clients": ("sync", "apache"),
    "our_client": ("sync",),
    "commands": (),
}
FIXTURES = {  # the fixture that parametrises the tests of a key: its module and its name
    "clients": ("test_cluster_features.py", "api"),
    "clients_in_pairs": ("test_cluster_features.py", "request"),
    "waits": ("test_long_waits.py", "place"),
}
APACHE_OVER_TCP, OURS_OVER_GRPC = {"apache", "6650"}, {"ours", "grpc"}
RUNS = {  # the names of clients: a test must run with one client of each set
    "both_clients": (APACHE_OVER_TCP, OURS_OVER_GRPC),
    "our_client": ({OURS_OVER_TCP}, OURS_OVER_GRPC),
    "commands": ({"pulsar"}, {"grpc"}),
}
NAMES = {  # the values of the constants of the test modules
    "CLIENTS": CLIENTS,
    "OURS": OURS,
    "OURS_OVER_TCP": (OURS_OVER_TCP,),
    "TRANSPORTS": TRANSPORTS,
}
BOTH_TRANSPORTS = {*RUNS, "promises", "uses", "clients", "clients_in_pairs", "waits"}
UNIT = ("golden", "unit")
KEYS = {*SHARED, *FACES, *UNIT, "apache_lacks"}


def sections() -> dict[str, list[list[str]]]:
    """The cells of each row of the page's tables, without the heads, keyed by section."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, *lines = part.splitlines()
        cells = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
        stripped = [[cell.strip() for cell in row] for row in cells]
        found[title] = [row for row in stripped if row[0] != "feature"]
    return found


def rows() -> list[list[str]]:
    return [row for section in sections().values() for row in section]


@cache
def module(path: str) -> ast.Module:
    return ast.parse((TESTS / path).read_text())


@cache
def functions(path: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a test module, keyed by name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name: one for one in module(path).body if isinstance(one, kinds)}


def named_clients(*nodes: ast.AST) -> set[str]:
    """The clients and transports that a piece of code names."""
    known = {*APACHE_OVER_TCP, *OURS_OVER_GRPC, OURS_OVER_TCP, *TRANSPORTS}
    found: set[str] = set()
    for node in nodes:
        for one in ast.walk(node):
            if isinstance(one, ast.Name):
                found.update(NAMES.get(one.id, ()))
            elif isinstance(one, ast.Constant) and one.value in known:
                found.add(str(one.value))
    return found


def clients_of(path: str, name: str) -> set[str]:
    """The clients and transports with which a test runs: those of its parameters and fixtures, and
    those in its body."""
    function = functions(path)[name]
    found = named_clients(function)
    fixtures = functions("integration/conftest.py") | functions(path)
    for argument in function.args.args:
        if argument.arg in fixtures:
            found |= named_clients(*fixtures[argument.arg].decorator_list)
        elif argument.arg == "transport":
            marks = [one for one in module(path).body if isinstance(one, ast.Assign)]
            found |= named_clients(*(one for one in marks if is_pytestmark(one)))
    return found


def is_pytestmark(assignment: ast.Assign) -> bool:
    [target] = assignment.targets
    return isinstance(target, ast.Name) and target.id == "pytestmark"


def faces_of(tests: dict[str, Any]) -> set[str]:
    """The clients with which a feature is tested."""
    found = {face for face in FACES if tests.get(face)}
    found.update(face for key, faces in SHARED.items() if tests.get(key) for face in faces)
    common = {one.__name__ for one in promises.PROMISES}
    if common & set(tests.get("promises", ())):
        found.add("apache")
    return found


def test_page_and_table_name_the_same_features() -> None:
    named = [row[0] for row in rows()]
    assert len(named) == len(set(named)) > 50
    assert sorted(named) == sorted(FEATURES)
    assert [row[0] for row in rows() if len(row) != COLUMNS or not row[1] or not row[3]] == []


def test_sections_of_the_broker_are_in_the_page() -> None:
    assert sections().keys() > BROKER_SECTIONS


@pytest.mark.parametrize(
    ("section", "feature"),
    [(title, row[0]) for title, found in sections().items() for row in found],
)
def test_feature_is_tested_with_both_faces_or_transports_and_with_apaches_client(
    section: str, feature: str
) -> None:
    tests = FEATURES[feature]
    assert set(tests) <= KEYS
    faces = faces_of(tests)
    if section in BROKER_SECTIONS:
        assert BOTH_TRANSPORTS & {key for key, names in tests.items() if names}
    else:
        assert {"sync", "asyncio"} <= faces
    assert ("apache" in faces) is not bool(tests.get("apache_lacks"))


@pytest.mark.parametrize("feature", FEATURES)
def test_tests_of_a_feature_exist(feature: str) -> None:
    tests = FEATURES[feature]
    known = {one.__name__ for one in (*promises.PROMISES, *promises.OUR_PROMISES)}
    assert set(tests.get("promises", ())) <= known
    assert set(tests.get("uses", ())) <= {one.__name__ for one in usage.USES}
    for key, (file, fixture) in FIXTURES.items():
        for name in tests.get(key, ()):
            arguments = functions(f"integration/{file}")[name].args.args
            assert fixture in [one.arg for one in arguments], name
    for key in (*FACES, *UNIT, *RUNS):
        for named in tests.get(key, ()):
            path, _, name = named.partition("::")
            function = functions(path)[name]
            assert name.startswith("test_")
            assert path.startswith("unit/" if key in UNIT else "integration/"), named
            assert key != "asyncio" or is_of_asyncio(path, function), named
            assert all(clients_of(path, name) & one for one in RUNS.get(key, ())), named


def is_of_asyncio(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    return "magnetar.asyncio" in (
        ast.get_source_segment((TESTS / path).read_text(), function) or ""
    )


def test_names_in_the_page_are_those_of_the_client_and_the_broker() -> None:
    """The check covers the column that says how a feature is used."""
    options = (ClientOptions, ProducerOptions, AsyncConsumerOptions, ReaderOptions)
    known = {name for one in options for name in one.__dataclass_fields__}
    public = [getattr(magnetar, name) for name in magnetar.__all__]
    known.update(magnetar.__all__)
    known.update(BrokerSettings.model_fields)
    known.update(name for one in public for name in dir(one))
    for function in (
        magnetar.Producer.send,
        magnetar.Consumer.receive,
        magnetar.Consumer.reconsume_later,
        magnetar.Consumer.close,
        magnetar.ConsumerDeadLetterPolicy,
        magnetar.ConsumerKeySharedPolicy,
    ):
        known.update(inspect.signature(function).parameters)
    codes = [code for row in rows() for code in re.findall(r"`([^`]+)`", row[1])]
    used = {word for code in codes if "<" not in code for word in re.findall(r"[A-Za-z_]\w+", code)}
    assert used - known - OTHER_WORDS == set()


OTHER_WORDS = {
    *("re", "compile", "async", "for", "in", "consumer"),  # words of examples
    *("REAL_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUMETIMES", "DELAY_TIME"),  # properties of letters
    "chunkedMessageRate",  # a statistic of a topic
    *("activeConsumerName", "keyHashRangeArrays", "drainingHashes"),  # statistics of subscriptions
    *("drainingHashesCount", "drainingHashesUnackedMessages", "drainingHashesClearedTotal"),
    *("unackMsgs", "blockedAttempts"),
    *("magnetar", "subscriptions", "explain", "pending", "key"),  # commands
    *("subscribe_order", "hash", "True"),  # values
}
