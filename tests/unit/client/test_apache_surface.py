"""The public names of Apache's client, one by one: modules, classes, methods, parameters, defaults.

docs/apache-client.md lists every difference with its reason. A difference that is not listed there
fails, and so does a listed one that is gone.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

import magnetar

if TYPE_CHECKING:
    from types import ModuleType

DOCUMENT = Path(__file__).parents[3] / "docs/apache-client.md"

MODULES = [
    "pulsar",
    "pulsar.asyncio",
    "pulsar.exceptions",
    "pulsar.functions",
    "pulsar.functions.context",
    "pulsar.functions.function",
    "pulsar.functions.serde",
    "pulsar.schema",
    "pulsar.tableview",
]
IMPORTED = {
    "Any",
    "Callable",
    "List",
    "Optional",
    "Schema",
    "Tuple",
    "Union",
    "abstractmethod",
    "timedelta",
}
"""The names that Apache's modules import from elsewhere."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

OBJECTS_OF_CLIENTS = {
    *("Client", "Producer", "Consumer", "Reader", "Message", "TableView"),
    *("EncryptionContext", "EncryptionKey", "PulsarException"),
}
"""Classes whose constructors are not compared, because only the client calls them. Those of Client
are compared by the parameters that Apache's has."""


def public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_") and name not in IMPORTED]


def ours_of(module: str) -> ModuleType:
    return importlib.import_module(module.replace("pulsar", "magnetar", 1))


def shown(value: object) -> str:
    """Defaults of both clients in one form: enumerations by name, schemas by class."""
    if hasattr(value, "name") and not inspect.isclass(value):
        return str(value.name)
    if type(value).__name__ == "BytesSchema":
        return "None"  # both read and write bytes
    return repr(value)


def parameters(function: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters of a function. None: a function of Apache's extension module, which has no
    signature. Without fastavro, some of Apache's names begin with an underscore."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return {name.lstrip("_"): one for name, one in found.items() if name != "self"}


def differences_of_call(path: str, theirs: Any, ours: Any) -> list[str]:
    wanted, found = parameters(theirs), parameters(ours)
    if wanted is None or found is None:
        return []
    differences = []
    named = [name for name, one in wanted.items() if one.kind not in VARIADIC]
    if list(found)[: len(named)] != named and set(named) <= set(found):
        differences.append(f"{path}: order")
    for name in named:
        if name not in found or (
            wanted[name].default is not inspect.Parameter.empty
            and (shown(wanted[name].default) != shown(found[name].default))
        ):
            differences.append(f"{path}({name})")
    more = [one for name, one in found.items() if name not in wanted]
    required = [one.name for one in more if one.default is one.empty and one.kind not in VARIADIC]
    return differences + [f"{path}({name})" for name in required]


def differences_of_class(path: str, theirs: type, ours: Any) -> list[str]:
    members = getattr(theirs, "__members__", None)
    if members is not None:
        assert issubclass(ours, enum.IntEnum)
        wanted = {name: int(value) for name, value in members.items()}
        same = {one.name: one.value for one in ours if one.name in wanted} == wanted
        texts = all(str(ours[name]) == str(members[name]) for name in wanted if same)
        return [] if same and texts else [path]
    differences = []
    constructor = theirs.__name__ not in OBJECTS_OF_CLIENTS
    for name in [*public(theirs), *(["__init__"] if constructor else [])]:
        if not hasattr(ours, name):
            differences.append(f"{path}.{name}")
            continue
        one, other = inspect.getattr_static(theirs, name), inspect.getattr_static(ours, name)
        if isinstance(one, property) or (name.startswith("get_") and not callable(other)):
            assert isinstance(one, property) == isinstance(other, property) or name in getattr(
                ours, "__annotations__", ()
            ), f"{path}.{name}"
            continue
        where = path if name == "__init__" else f"{path}.{name}"
        differences += differences_of_call(where, getattr(theirs, name), getattr(ours, name))
    return differences


def differences() -> set[str]:
    found: list[str] = []
    for module in MODULES:
        theirs, ours = importlib.import_module(module), ours_of(module)
        inner = module.partition(".")[2]
        for name in public(theirs):
            value = getattr(theirs, name)
            if inspect.ismodule(value) and not value.__name__.startswith("pulsar."):
                continue  # a module that Apache's module imports
            path = f"{inner}.{name}" if inner in ("asyncio", "schema") else name
            if value is pulsar:
                continue
            if not hasattr(ours, name):
                if inner == "asyncio" and getattr(pulsar, name, None) is value:
                    continue  # a name that `pulsar.asyncio` imports from `pulsar`
                found.append(path)
            elif inspect.isclass(value) and not issubclass(value, Exception):
                found += differences_of_class(path, value, getattr(ours, name))
    return set(found)


def documented() -> set[str]:
    """The first column of the table of names and parameters, with a row for each difference."""
    text = DOCUMENT.read_text()
    table = text.partition("## Names and parameters that differ")[2].partition("\n## ")[0]
    return {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }


def test_every_difference_is_documented_and_every_documented_one_exists() -> None:
    assert differences() == documented()


def test_every_exception_is_there_with_its_place_in_the_hierarchy() -> None:
    for name in public(importlib.import_module("pulsar.exceptions")):
        ours = getattr(magnetar, name)
        assert ours is getattr(importlib.import_module("magnetar.exceptions"), name)
        assert issubclass(ours, magnetar.PulsarException)
    asyncio = importlib.import_module("magnetar.asyncio")
    assert asyncio.PulsarException is magnetar.PulsarException


@pytest.mark.parametrize("module", ["exceptions", "functions", "tableview"])
def test_modules_are_attributes_of_the_package(module: str) -> None:
    assert getattr(magnetar, module) is importlib.import_module(f"magnetar.{module}")


def test_serializers_of_functions_are_apaches() -> None:
    for value in (b"bytes", 5, 1.5, "text", 2j):
        theirs, ours = pulsar.IdentitySerDe(), magnetar.IdentitySerDe()
        assert ours.serialize(value) == theirs.serialize(value)
        assert ours.deserialize(ours.serialize(value)) == theirs.deserialize(
            theirs.serialize(value)
        )
    with pytest.raises(TypeError):
        magnetar.IdentitySerDe().serialize([])
    assert magnetar.IdentitySerDe().deserialize(b"\xff") == b"\xff"
    assert magnetar.PickleSerDe().deserialize(magnetar.PickleSerDe().serialize([1])) == [1]
