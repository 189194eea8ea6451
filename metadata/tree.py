"""The rules of a tree of versioned nodes, as a machine over any map of nodes.

Memory and embedded stores share the machine, so that they agree. The conformance suite checks
ZooKeeper against the same rules. A method that raises changes nothing. Each change adds paths to
`touched` for the watches: the paths whose value or existence changed, and the parents whose set of
children changed.

1. Every node but the root has a parent. 2. An ephemeral node has no children.
3. A node's version is 0 when made and grows by one with each change of its value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from magnetar.metadata.errors import BadVersion, NodeExists, NoNode, NotEmpty, ParentIsEphemeral
from magnetar.metadata.node import ABSENT, Versioned, parent_of, parents_of


@dataclass(frozen=True, slots=True)
class Node:
    value: bytes
    version: int = 0
    session: int = 0  # 0: persistent
    next_sequence: int = 0  # the number for the next sequential child


class Nodes(Protocol):
    """A map from path to node that also knows the children of each node. The root always exists."""

    def get(self, path: str) -> Node | None: ...
    def put(self, path: str, node: Node) -> None: ...
    def remove(self, path: str) -> None: ...
    def child_names(self, path: str) -> Iterable[str]: ...  # in any order; an absent node has none
    def has_children(self, path: str) -> bool: ...
    def of_session(self, session: int) -> list[str]: ...


class Tree:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.touched: set[str] = set()

    def get(self, path: str) -> Versioned | None:
        node = self.nodes.get(path)
        return None if node is None else Versioned(node.value, node.version, node.session)

    def children(self, path: str) -> list[str]:
        return sorted(self.nodes.child_names(path))

    def put(self, path: str, value: bytes, expected: int) -> int:
        if expected == ABSENT:
            self.create(path, value, session=0)
            return 0
        node = self.nodes.get(path)
        if node is None or node.version != expected:
            raise BadVersion(path, expected)
        self.nodes.put(path, replace(node, value=value, version=expected + 1))
        self.touched.add(path)
        return expected + 1

    def create(self, path: str, value: bytes, session: int) -> None:
        if self.nodes.get(path) is not None:
            raise NodeExists(path)
        self._make_parents(path)
        self.nodes.put(path, Node(value, session=session))
        self.touched |= {path, parent_of(path)}

    def create_sequential(self, prefix: str, value: bytes, session: int) -> str:
        self._make_parents(prefix)
        parent = parent_of(prefix)
        node = self.nodes.get(parent)
        assert node is not None, parent
        number = node.next_sequence
        while self.nodes.get(path := f"{prefix}{number:010}") is not None:
            number += 1  # a node of this name was created without `create_sequential`
        self.nodes.put(parent, replace(node, next_sequence=number + 1))
        self.create(path, value, session)
        return path

    def delete(self, path: str, expected: int) -> None:
        node = self.nodes.get(path)
        if node is None:
            raise NoNode(path)
        if node.version != expected:
            raise BadVersion(path, expected)
        if self.nodes.has_children(path):
            raise NotEmpty(path)
        self._remove(path)

    def end_session(self, session: int) -> None:
        for path in self.nodes.of_session(session):
            self._remove(path)

    def take_touched(self) -> set[str]:
        touched, self.touched = self.touched, set()
        return touched

    def _remove(self, path: str) -> None:
        self.nodes.remove(path)
        self.touched |= {path, parent_of(path)}

    def _make_parents(self, path: str) -> None:
        missing = []
        for parent in parents_of(path):
            node = self.nodes.get(parent)
            if node is None:
                missing.append(parent)
            elif node.session != 0:
                raise ParentIsEphemeral(path)
        for parent in missing:
            self.nodes.put(parent, Node(b""))
            self.touched |= {parent, parent_of(parent)}
