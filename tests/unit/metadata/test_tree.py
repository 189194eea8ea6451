"""The tree of nodes, compared with a simple model that searches one flat dictionary."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.metadata.errors import (
    BadVersion,
    MetadataError,
    NodeExists,
    NoNode,
    NotEmpty,
    ParentIsEphemeral,
)
from magnetar.metadata.memory import MemoryNodes
from magnetar.metadata.node import ABSENT, Versioned, check_change, check_delete
from magnetar.metadata.tree import Tree

PATHS = ["/a", "/b", "/a/a", "/a/b", "/a/a/a", "/ab"]

paths = st.sampled_from(PATHS)
values = st.binary(max_size=2)
versions = st.integers(0, 2)
sessions = st.sampled_from([7, 8])
steps = st.one_of(
    st.tuples(st.just("put"), paths, values, st.integers(ABSENT, 2)),
    st.tuples(st.just("create"), paths, values, sessions),
    st.tuples(st.just("delete"), paths, versions),
    st.tuples(st.just("sequential"), paths, values, st.sampled_from([0, 7])),
    st.tuples(st.just("end"), sessions),
)


class Twin:
    """A simple model of the tree's contract: every operation searches one dictionary."""

    def __init__(self) -> None:
        self.nodes: dict[str, Versioned] = {}
        self.sequences: dict[str, int] = {}

    def children(self, path: str) -> list[str]:
        start = "/" if path == "/" else path + "/"
        below = [other[len(start) :] for other in self.nodes if other.startswith(start)]
        return sorted(name for name in below if "/" not in name)

    def step(self, step: tuple[Any, ...]) -> Any:
        match step:
            case ("put", path, value, -1):
                self.make(path, value, 0)
                return 0
            case ("put", path, value, expected):
                node = self.nodes.get(path)
                if node is None or node.version != expected:
                    raise BadVersion(path, expected)
                self.nodes[path] = Versioned(value, expected + 1, node.ephemeral_session)
                return expected + 1
            case ("create", path, value, session):
                return self.make(path, value, session)
            case ("delete", path, expected):
                if path not in self.nodes:
                    raise NoNode(path)
                if self.nodes[path].version != expected:
                    raise BadVersion(path, expected)
                if self.children(path):
                    raise NotEmpty(path)
                del self.nodes[path]
                return None
            case ("sequential", path, value, session):
                self.make_parents(path)
                parent = path.rpartition("/")[0]
                number = self.sequences.get(parent, 0)
                self.sequences[parent] = number + 1
                self.nodes[f"{path}{number:010}"] = Versioned(value, 0, session)
                return f"{path}{number:010}"
            case ("end", session):
                for path, node in list(self.nodes.items()):
                    if node.ephemeral_session == session:
                        del self.nodes[path]
                return None
        raise AssertionError(step)

    def make(self, path: str, value: bytes, session: int) -> None:
        if path in self.nodes:
            raise NodeExists(path)
        self.make_parents(path)
        self.nodes[path] = Versioned(value, 0, session)

    def make_parents(self, path: str) -> None:
        parts = path.split("/")[1:-1]
        parents = ["/" + "/".join(parts[: count + 1]) for count in range(len(parts))]
        if any(self.nodes[up].ephemeral_session for up in parents if up in self.nodes):
            raise ParentIsEphemeral(path)
        for up in parents:
            if up not in self.nodes:
                self.nodes[up] = Versioned(b"", 0)
                self.sequences.pop(up, None)

    def forget_sequences(self) -> None:
        """Forget the last sequence numbers of deleted parents."""
        for parent in list(self.sequences):
            if parent and parent not in self.nodes:
                del self.sequences[parent]


def apply(tree: Tree, step: tuple[Any, ...]) -> Any:
    match step:
        case ("put", path, value, expected):
            return tree.put(path, value, expected)
        case ("create", path, value, session):
            return tree.create(path, value, session)
        case ("delete", path, expected):
            return tree.delete(path, expected)
        case ("sequential", path, value, session):
            return tree.create_sequential(path, value, session)
        case ("end", session):
            return tree.end_session(session)
    raise AssertionError(step)


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except MetadataError as error:
        return type(error), str(error)


@settings(max_examples=150)
@given(st.lists(steps, max_size=25))
def test_the_tree_gives_the_results_of_the_simple_model(script: list[tuple[Any, ...]]) -> None:
    tree, twin = Tree(MemoryNodes()), Twin()
    for step in script:
        before = dict(twin.nodes)
        assert outcome(apply, tree, step) == outcome(twin.step, step), step
        twin.forget_sequences()
        after = twin.nodes
        everywhere = {*before, *after, *PATHS}
        for path in everywhere:
            assert tree.get(path) == after.get(path), (step, path)
            assert tree.children(path) == twin.children(path), (step, path)
        assert tree.children("/") == twin.children("/")
        touched = tree.take_touched()
        changed = {path for path in everywhere if before.get(path) != after.get(path)}
        appeared = {path for path in everywhere if (path in before) != (path in after)}
        assert changed <= touched
        assert {path.rpartition("/")[0] or "/" for path in appeared} <= touched
        assert touched == changed | {path.rpartition("/")[0] or "/" for path in appeared}


def test_a_sequence_skips_a_name_that_exists_already() -> None:
    tree = Tree(MemoryNodes())
    tree.create("/q/n0000000000", b"", 0)
    assert tree.create_sequential("/q/n", b"", 0) == "/q/n0000000001"
    assert tree.create_sequential("/q/n", b"", 0) == "/q/n0000000002"


@pytest.mark.parametrize("path", ["", "a", "/a/", "//a", "/a//b", "/a/./b", "/a/..", "/a\n", "/\0"])
def test_a_malformed_path_raises_an_assertion_error(path: str) -> None:
    with pytest.raises(AssertionError):
        check_change(path, b"", ABSENT)


def test_a_delete_of_the_root_or_without_a_version_raises_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        check_change("/", b"", 0)
    with pytest.raises(AssertionError):
        check_delete("/", 0)
    with pytest.raises(AssertionError):
        check_delete("/a", ABSENT)
