"""Avro schemas, and whether a reader's schema can read what was written with another. Pure.

The rules are those of the Avro specification, "Schema Resolution", as Apache Avro's Java library
checks them (`SchemaCompatibility`), which Pulsar uses: the names of records, enums and fixed types
must be equal without their namespaces, or the reader has the writer's name as an alias.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

NODES_MAX: Final = 10_000
"""Types in one schema, each counted where it is defined or used."""

DEPTH_MAX: Final = 60
"""Types within types: the recursion here, and that of the JSON decoder, stay far from Python's
limit."""

COMPARISONS_MAX: Final = 50_000
"""Pairs of types of two schemas: 0.2 s of CPU. A record with 2,000 fields, each a union with null,
takes 10,000; two unions of 2,000 records would take millions."""

_PRIMITIVES: Final = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
)
_PROMOTIONS: Final = {  # of the writer's type: what reads it, besides itself
    "int": frozenset(("long", "float", "double")),
    "long": frozenset(("float", "double")),
    "float": frozenset(("double",)),
    "string": frozenset(("bytes",)),
    "bytes": frozenset(("string",)),
}
_NAMED: Final = ("record", "error", "enum", "fixed")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_IGNORED: Final = frozenset(("doc", "aliases", "namespace"))
"""Attributes that two equal schemas may differ in; names are compared with their namespaces."""


class NotAvro(ValueError):
    """The text is no Avro schema."""


@dataclass(slots=True, eq=False)
class Field:
    name: str
    type: Type
    has_default: bool
    aliases: frozenset[str]


@dataclass(slots=True, eq=False)
class Type:
    """A type. Records refer to themselves: types are compared by identity."""

    kind: str
    name: str = ""  # full; of a record, enum or fixed
    aliases: frozenset[str] = frozenset()  # full
    parts: list[Type] = field(default_factory=list)  # of an array or map: one; of a union: branches
    branches: dict[str, Type] = field(default_factory=dict)  # of a union: by name or kind
    fields: list[Field] = field(default_factory=list)
    symbols: tuple[str, ...] = ()
    has_default: bool = False  # of an enum
    size: int = 0


@dataclass(frozen=True, slots=True)
class AvroSchema:
    root: Type
    canonical: str  # equal for equal schemas


def parse(text: bytes) -> AvroSchema:
    """Raises NotAvro."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAvro(f"it is not JSON: {error}") from None
    parser = _Parser()
    root, canonical = parser.type(tree, "", 0)
    return AvroSchema(root, json.dumps(canonical, sort_keys=True, separators=(",", ":")))


def unreadable(reader: AvroSchema, writer: AvroSchema) -> str:
    """Why the reader's schema cannot read what was written with the writer's; "": it can."""
    return _Resolution().problem(reader.root, writer.root, 0)


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, Type] = {}
        self._nodes = 0

    def type(self, tree: Any, namespace: str, depth: int) -> tuple[Type, Any]:
        """The type, and its canonical form as JSON."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise NotAvro(f"it has more than {NODES_MAX} types")
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
        seen = [part.name or part.kind for part, _ in made]
        if len(set(seen)) < len(seen) or "union" in seen:
            raise NotAvro("a union has a type twice, or another union in it")
        parts = [part for part, _ in made]
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
        made.aliases = _names(tree, namespace)
        self._named[name] = made
        canonical = {it: tree[it] for it in tree if it not in _IGNORED}
        canonical["name"] = name
        if kind == "enum":
            symbols = tree.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(it, str) for it in symbols):
                raise NotAvro(f"enum {_shown(name)} has no list of symbols")
            made.symbols = tuple(symbols)
            made.has_default = "default" in tree
        elif kind == "fixed":
            if type(tree.get("size")) is not int:
                raise NotAvro(f"fixed type {_shown(name)} has no size")
            made.size = tree["size"]
        else:
            canonical["fields"] = self._fields(made, tree, namespace, depth)
        return made, canonical

    def _fields(self, made: Type, tree: dict[str, Any], namespace: str, depth: int) -> list[Any]:
        items = tree.get("fields")
        if not isinstance(items, list):
            raise NotAvro(f"record {_shown(made.name)} has no list of fields")
        shown = []
        names = set()
        for item in items:
            if not isinstance(item, dict) or "type" not in item:
                raise NotAvro(f"a field of {_shown(made.name)} has no type")
            name = item.get("name")
            if not isinstance(name, str) or not _NAME(name) or name in names:
                raise NotAvro(f"{_shown(name)} is no name of a field, or a second one")
            names.add(name)
            kind, canonical = self.type(item["type"], namespace, depth + 1)
            found = item.get("aliases", [])
            aliases = frozenset(it for it in found if isinstance(it, str))
            made.fields.append(Field(name, kind, "default" in item, aliases))
            shown.append(
                {
                    **{it: item[it] for it in item if it not in _IGNORED},
                    "type": canonical,
                    "order": item.get("order", "ascending"),
                }
            )
        return shown


class _Resolution:
    """What was compared: pairs of types that refer to themselves are compared once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}

    def problem(self, reader: Type, writer: Type, depth: int) -> str:
        pair = (id(reader), id(writer))
        found = self._known.get(pair)
        if found is None:
            if depth > 4 * DEPTH_MAX:
                return "its types refer to each other over too many steps"
            if len(self._known) >= COMPARISONS_MAX:
                return f"to compare it takes more than {COMPARISONS_MAX} steps"
            self._known[pair] = ""  # while it is compared
            found = self._known[pair] = self._compare(reader, writer, depth + 1)
        return found

    def _compare(self, reader: Type, writer: Type, depth: int) -> str:
        if writer.kind == "union":
            return next(filter(None, (self.problem(reader, it, depth) for it in writer.parts)), "")
        if reader.kind == "union":
            same = reader.branches.get(writer.name or writer.kind)  # most often it is this one
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
            return f"the name changed from {writer.name} to {reader.name}"
        match reader.kind:
            case "array" | "map":
                return self.problem(reader.parts[0], writer.parts[0], depth)
            case "fixed":
                sizes = f"{writer.size} to {reader.size}"
                return "" if reader.size == writer.size else f"{reader.name}: size {sizes}"
            case "enum":
                missing = [it for it in writer.symbols if it not in reader.symbols]
                if missing and not reader.has_default:
                    return f"enum {reader.name} lacks the symbol {missing[0]}"
                return ""
            case "record":
                return self._compare_records(reader, writer, depth)
        return ""

    def _compare_records(self, reader: Type, writer: Type, depth: int) -> str:
        written = {it.name: it for it in writer.fields}
        for wanted in reader.fields:
            names = (wanted.name, *sorted(wanted.aliases))
            source = next((written[name] for name in names if name in written), None)
            if source is None:
                if not wanted.has_default and not wanted.type.has_default:
                    return f"field {wanted.name} of {reader.name} is new and has no default"
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
    if not all(_NAME(part) for part in name.split(".")):
        raise NotAvro(f"{_shown(name)} is no name")
    return name


def _names(tree: dict[str, Any], namespace: str) -> frozenset[str]:
    found = tree.get("aliases", [])
    if not isinstance(found, list):
        raise NotAvro("aliases are no list")
    names = (it for it in found if isinstance(it, str))
    return frozenset(it if "." in it or not namespace else f"{namespace}.{it}" for it in names)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
