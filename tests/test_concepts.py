"""Each feature of docs/concepts.md has tests with both faces of the client and with Apache's:
`concepts.toml` names them, and they exist."""

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

import magnetar
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

FACES = ("sync", "asyncio", "apache")
SHARED = {  # keys whose tests run with several clients: with which
    "promises": ("sync", "asyncio"),
    "uses": ("sync", "asyncio"),
    "clients": FACES,
    "clients_in_pairs": FACES,
    "waits": ("sync", "asyncio"),
}
FIXTURES = {  # what parametrises such a test
    "clients": ("test_cluster_features.py", "api"),
    "clients_in_pairs": ("test_cluster_features.py", "request"),
    "waits": ("test_long_waits.py", "place"),
}
KEYS = {*SHARED, *FACES, "apache_lacks", "golden"}


def rows() -> list[list[str]]:
    """The cells of each row of the page's tables, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "feature"]


@cache
def functions(path: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a test module, by name."""
    parsed = ast.parse((TESTS / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name: one for one in parsed.body if isinstance(one, kinds)}


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


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_tested_with_both_faces_and_with_apaches_client(feature: str) -> None:
    tests = FEATURES[feature]
    assert set(tests) <= KEYS
    faces = faces_of(tests)
    assert {"sync", "asyncio"} <= faces
    assert ("apache" in faces) is not bool(tests.get("apache_lacks"))


@pytest.mark.parametrize("feature", FEATURES)
def test_tests_of_a_feature_exist(feature: str) -> None:
    tests = FEATURES[feature]
    known = {one.__name__ for one in (*promises.PROMISES, *promises.OUR_PROMISES)}
    assert set(tests.get("promises", ())) <= known
    assert set(tests.get("uses", ())) <= {one.__name__ for one in usage.USES}
    for key, (module, fixture) in FIXTURES.items():
        for name in tests.get(key, ()):
            arguments = functions(f"integration/{module}")[name].args.args
            assert fixture in [one.arg for one in arguments], name
    for key in (*FACES, "golden"):
        for named in tests.get(key, ()):
            path, _, name = named.partition("::")
            function = functions(path)[name]
            assert name.startswith("test_")
            assert key != "asyncio" or is_of_asyncio(path, function), named


def is_of_asyncio(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    return "magnetar.asyncio" in (
        ast.get_source_segment((TESTS / path).read_text(), function) or ""
    )


def test_names_in_the_page_are_those_of_the_client() -> None:
    """In the column that says how the client is used."""
    options = (ClientOptions, ProducerOptions, AsyncConsumerOptions, ReaderOptions)
    known = {name for one in options for name in one.__dataclass_fields__}
    public = [getattr(magnetar, name) for name in magnetar.__all__]
    known.update(magnetar.__all__)
    known.update(name for one in public for name in dir(one))
    for function in (
        magnetar.Producer.send,
        magnetar.Consumer.receive,
        magnetar.Consumer.reconsume_later,
        magnetar.ConsumerDeadLetterPolicy,
    ):
        known.update(inspect.signature(function).parameters)
    codes = [code for row in rows() for code in re.findall(r"`([^`]+)`", row[1])]
    used = {word for code in codes if "<" not in code for word in re.findall(r"[A-Za-z_]\w+", code)}
    assert used - known - OTHER_WORDS == set()


OTHER_WORDS = {
    *("re", "compile", "async", "for", "in", "consumer"),  # of examples
    *("REAL_TOPIC", "ORIGIN_MESSAGE_ID", "RECONSUMETIMES", "DELAY_TIME"),  # properties of letters
    "chunkedMessageRate",  # of a topic
}
