"""Parses Avro schemas, and decides whether a reader's schema can read data of a writer's. Pure.

The rules are those of the Avro specification, "Schema Resolution", as Apache Avro's Java library
checks them (`SchemaCompatibility`). Pulsar uses that library. The names of records, enums and fixed
types must be equal without their namespaces, or the reader has the writer's name as an alias.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from magnetar.broker.schemas.definition import json_tree

NODES_MAX: Final = 10_000
"""The maximum number of types and aliases in one schema. A type counts at its definition and at
each use."""

DEPTH_MAX: Final = 60
"""The maximum depth of nested types. The recursion of this module stays far from Python's limit."""

NAME_CHARS_MAX: Final = 512
"""The maximum length of a name with its namespace. The canonical form of a schema repeats the name
at each use of the type, so the form has at most 5 MB."""

STEPS_MAX: Final = 100_000
"""The maximum number of steps of one comparison, 0.1 s of CPU. Pairs of types, fields and their
aliases, and symbols are steps. A record with 2,000 fields, each a union with null, takes 12,000;
two unions of 2,000 records would take millions."""

_PRIMITIVES: Final = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
)
_PROMOTIONS: Final = {  # writer's type -> the reader's types that can read it, besides itself
    "int": frozenset(("long", "float", "double")),
    "long": frozenset(("float", "double")),
    "float": frozenset(("double",)),
    "string": frozenset(("bytes",)),
    "bytes": frozenset(("string",)),
}
_NAMED: Final = ("record", "error", "enum", "fixed")
_NAME: Final = re.compile(r"(?:[^\W\d]|\$)[\w$]*").fullmatch
"""The same pattern as in Pulsar: Java's nested classes have "$" in their names."""
_NAMESPACE: Final = re.compile(r"[\w$.-]*").fullmatch
_FIXED_BYTES_MAX: Final = 2**31 - 1
_IGNORED: Final = frozenset(("doc", "aliases", "namespace"))
"""Attributes in which equal schemas may differ. Names are compared with their namespaces."""


class NotAvro(ValueError):
    """The text is no Avro schema."""


@dataclass(slots=True, eq=False)
class Field:
    name: str
    type: Type
    has_default: bool
    names: tuple[str, ...]  # its own, then its aliases


@dataclass(slots=True, eq=False)
class Type:
    """A type. A record may refer to itself, so types are compared by identity."""

    kind: str
    name: str = ""  # the full name of a record, enum or fixed type
    aliases: frozenset[str] = frozenset()  # full names
    # An array or map has one part, a union its branches.
    parts: list[Type] = field(default_factory=list)
    # The branches of a union, keyed by name or kind.
    branches: dict[str, Type] = field(default_factory=dict)
    fields: dict[str, Field] = field(default_factory=dict)  # keyed by name
    names: int = 0  # the number of names of all fields, with their aliases
    symbols: frozenset[str] = frozenset()
    has_default: bool = False  # True: an enum has a default
    size: int = 0


@dataclass(frozen=True, slots=True)
class AvroSchema:
    root: Type
    canonical: str  # equal for equal schemas


def parse(text: bytes) -> AvroSchema:
    """Parse the JSON of an Avro schema. Raises NotAvro."""
    try:
        tree = json_tree(text)
    except ValueError as error:
        raise NotAvro(f"it is not JSON: {error}") from None
    parser = _Parser()
    root, canonical = parser.type(tree, "", 0)
    return AvroSchema(root, json.dumps(canonical, sort_keys=True, separators=(",", ":")))


def unreadable(reader: AvroSchema, writer: AvroSchema) -> str:
    """The reason why the reader's schema cannot read data of the writer's schema; "": it can."""
    try:
        return _Resolution().problem(reader.root, writer.root, 0)
    except _TooManySteps:
        return f"the comparison takes more than {STEPS_MAX} steps"


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, Type] = {}
        self._nodes = 0

    def type(self, tree: Any, namespace: str, depth: int) -> tuple[Type, Any]:
        """The type, and its canonical form as JSON."""
        self._count(1)
        if depth > DEPTH_MAX:
            raise NotAvro(f"types are nested deeper than {DEPTH_MAX}")
        match tree:
            case str():
                return self._reference(tree, namespace)
            case list():
                return self._union(tree, namespace, depth)
            case {"type": str(kind)} if kind in _NAMED:
                return self._definition(kind, tree, namespace, depth)
            case {"type": "array" | "map" as kind}:
                return self._container(kind, tree, namespace, depth)
            case {"type": inner}:
                found, canonical = self.type(inner, namespace, depth + 1)
                extra = {it: tree[it] for it in tree if it != "type" and it not in _IGNORED}
                return found, {**extra, "type": canonical} if extra else canonical
        raise NotAvro(f"{_shown(tree)} is no type")

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            raise NotAvro(f"it has more than {NODES_MAX} types and aliases")

    def _reference(self, name: str, namespace: str) -> tuple[Type, Any]:
        if name in _PRIMITIVES:
            return Type(name), name
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self._named.get(full) or self._named.get(name)
        if found is None:
            raise NotAvro(f"type {_shown(name)} is not defined")
        return found, found.name

    def _union(self, tree: list[Any], namespace: str, depth: int) -> tuple[Type, Any]:
        made = [self.type(branch, namespace, depth + 1) for branch in tree]
        parts = [part for part, _ in made]
        seen = [part.name or part.kind for part in parts]
        if len(set(seen)) < len(seen) or any(part.kind == "union" for part in parts):
            raise NotAvro("a union has a type twice, or another union in it")
        branches = dict(zip(seen, parts, strict=True))
        return Type("union", parts=parts, branches=branches), [shown for _, shown in made]

    def _container(
        self, kind: str, tree: dict[str, Any], namespace: str, depth: int
    ) -> tuple[Type, Any]:
        key = "items" if kind == "array" else "values"
        if key not in tree:
            raise NotAvro(f"a type {kind} has no {key}")
        part, shown = self.type(tree[key], namespace, depth + 1)
        extra = {it: tree[it] for it in tree if it not in _IGNORED}
        return Type(kind, parts=[part]), {**extra, key: shown}

    def _definition(
        self, kind: str, tree: dict[str, Any], namespace: str, depth: int
    ) -> tuple[Type, Any]:
        name = _full_name(tree, namespace)
        if name in self._named:
            raise NotAvro(f"type {_shown(name)} is defined twice")
        namespace = name.rpartition(".")[0]
        made = Type("record" if kind == "error" else kind, name)
        made.aliases = frozenset(
            it if "." in it or not namespace else f"{namespace}.{it}" for it in self._aliases(tree)
        )
        self._named[name] = made
        canonical = {it: tree[it] for it in tree if it not in _IGNORED}
        canonical["name"] = name
        if kind == "enum":
            symbols = tree.get("symbols")
            if not isinstance(symbols, list) or not all(_is_name(it) for it in symbols):
                raise NotAvro(f"enum {_shown(name)} has no list of symbols that are names")
            made.symbols = frozenset(symbols)
            if len(made.symbols) < len(symbols):
                raise NotAvro(f"enum {_shown(name)} has a symbol twice")
            made.has_default = tree.get("default") in symbols
        elif kind == "fixed":
            size = tree.get("size")
            if type(size) is not int or not 0 <= size <= _FIXED_BYTES_MAX:
                raise NotAvro(f"fixed type {_shown(name)} has no size")
            made.size = size
        else:
            canonical["fields"] = self._fields(made, tree, namespace, depth)
        return made, canonical

    def _fields(self, made: Type, tree: dict[str, Any], namespace: str, depth: int) -> list[Any]:
        items = tree.get("fields")
        if not isinstance(items, list):
            raise NotAvro(f"record {_shown(made.name)} has no list of fields")
        shown = []
        for item in items:
            if not isinstance(item, dict) or "type" not in item:
                raise NotAvro(f"a field of {_shown(made.name)} has no type")
            name = item.get("name")
            if not _is_name(name) or name in made.fields:
                raise NotAvro(f"{_shown(name)} is not a valid field name, or names two fields")
            kind, canonical = self.type(item["type"], namespace, depth + 1)
            names = (name, *sorted(set(self._aliases(item))))
            made.fields[name] = Field(name, kind, "default" in item, names)
            made.names += len(names)
            shown.append(
                {
                    **{it: item[it] for it in item if it not in _IGNORED},
                    "type": canonical,
                    "order": item.get("order", "ascending"),
                }
            )
        return shown

    def _aliases(self, tree: dict[str, Any]) -> list[str]:
        found = tree.get("aliases", [])
        if not isinstance(found, list):
            raise NotAvro("aliases are no list")
        self._count(len(found))
        return [it for it in found if isinstance(it, str)]


class _TooManySteps(Exception):
    """The comparison takes more than STEPS_MAX."""


class _Resolution:
    """One comparison of two schemas.

    A pair of types counts as readable while it is compared, so recursion ends. If the pair turns
    out not to be readable, the results that may rely on this assumption are forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}
        self._readable: list[tuple[int, int]] = []  # in the order in which their comparisons began
        self._steps = 0

    def problem(self, reader: Type, writer: Type, depth: int) -> str:
        self._spend(1)
        pair = (id(reader), id(writer))
        found = self._known.get(pair)
        if found is None:
            if depth > 4 * DEPTH_MAX:
                return "its types refer to each other over too many steps"
            self._known[pair] = ""
            before = len(self._readable)
            self._readable.append(pair)
            found = self._compare(reader, writer, depth + 1)
            if found:
                for it in self._readable[before:]:
                    del self._known[it]
                del self._readable[before:]
                self._known[pair] = found
        return found

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS_MAX:
            raise _TooManySteps

    def _compare(self, reader: Type, writer: Type, depth: int) -> str:
        if writer.kind == "union":
            return next(filter(None, (self.problem(reader, it, depth) for it in writer.parts)), "")
        if reader.kind == "union":
            same = reader.branches.get(writer.name or writer.kind)  # the usual match
            if same is not None and not self.problem(same, writer, depth):
                return ""
            if any(not self.problem(it, writer, depth) for it in reader.parts):
                return ""
            return f"no branch of a union reads {writer.name or writer.kind}"
        if reader.kind != writer.kind:
            if reader.kind in _PROMOTIONS.get(writer.kind, ()):
                return ""
            return f"{reader.kind} does not read {writer.kind}"
        if reader.name and not _same_name(reader, writer):
            return f"the name is {reader.name}, in the messages {writer.name}"
        match reader.kind:
            case "array" | "map":
                return self.problem(reader.parts[0], writer.parts[0], depth)
            case "fixed":
                sizes = f"{reader.size} bytes, in the messages {writer.size}"
                return "" if reader.size == writer.size else f"{reader.name} has {sizes}"
            case "enum":
                self._spend(len(writer.symbols))
                missing = writer.symbols - reader.symbols
                if missing and not reader.has_default:
                    return f"enum {reader.name} lacks the symbol {min(missing)}"
                return ""
            case "record":
                return self._compare_records(reader, writer, depth)
        return ""

    def _compare_records(self, reader: Type, writer: Type, depth: int) -> str:
        self._spend(reader.names)
        for wanted in reader.fields.values():
            found = (writer.fields.get(name) for name in wanted.names)
            source = next((it for it in found if it is not None), None)
            if source is None:
                # The default of an enum type does not help: it only replaces unknown symbols.
                if not wanted.has_default:
                    field = f"field {wanted.name} of {reader.name}"
                    return f"{field} has no default, and the messages lack it"
                continue
            problem = self.problem(wanted.type, source.type, depth)
            if problem:
                return f"field {wanted.name} of {reader.name}: {problem}"
        return ""


def _same_name(reader: Type, writer: Type) -> bool:
    return (
        reader.name.rpartition(".")[2] == writer.name.rpartition(".")[2]
        or writer.name in reader.aliases
    )


def _full_name(tree: dict[str, Any], namespace: str) -> str:
    name = tree.get("name")
    if not isinstance(name, str):
        raise NotAvro(f"a {tree['type']} has no name")
    if "." not in name:
        own = tree.get("namespace")
        space = own if isinstance(own, str) else namespace
        name = f"{space}.{name}" if space else name
    space, _, last = name.rpartition(".")
    if len(name) > NAME_CHARS_MAX or not _NAME(last) or not _NAMESPACE(space):
        raise NotAvro(f"{_shown(name)} is no name of at most {NAME_CHARS_MAX} characters")
    return name if space else last


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= NAME_CHARS_MAX and bool(_NAME(value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
