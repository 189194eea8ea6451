"""Classes of values: Record classes, dataclasses and Pydantic models, and their Avro schemas."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from enum import Enum
from typing import Any, Final, Union, get_args, get_origin

from magnetar.client.schema.definition import Defined, Record, arguments_of, is_defined, set_others

_PRIMITIVES: Final[dict[Any, str]] = {
    bool: "boolean",
    int: "long",
    float: "double",
    str: "string",
    bytes: "bytes",
}
_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_MISSING: Final = object()


def definition_of(cls: Any) -> Any:
    """Return the Avro schema of a class. Raises TypeError for a class or field without a schema."""
    if isinstance(cls, type) and issubclass(cls, Record):
        return cls.schema()
    if is_model(cls) or (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return _record(cls, Defined())
    raise TypeError(f"{cls!r} is no Record class, dataclass or Pydantic model")


def is_model(cls: Any) -> bool:
    """Return whether the class is a Pydantic model, without importing Pydantic."""
    return isinstance(cls, type) and hasattr(cls, "model_validate") and hasattr(cls, "model_fields")


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists and primitives.

    A member of an enum becomes its name; in a Pydantic model, its value.
    """
    if isinstance(value, Enum):
        return value.name
    if is_model(type(value)):
        return _by_value(value.model_dump())
    if isinstance(value, Record):
        return {name: plain(item) for name, item in value.fields().items()}
    if dataclasses.is_dataclass(value):
        return {it.name: plain(getattr(value, it.name)) for it in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _by_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _by_value(item) for key, item in value.items()}
    return [_by_value(item) for item in value] if isinstance(value, list) else value


def made(cls: Any, tree: Any) -> Any:
    """Convert a result of `plain` to an instance of `cls`. Ignores keys that `cls` does not have.

    Raises TypeError or ValueError for a value that does not fit.
    """
    try:
        return _made(cls, tree)
    except RecursionError:
        raise ValueError(f"values of {cls.__name__} are nested too deeply") from None


def _made(cls: Any, tree: Any) -> Any:
    if issubclass(cls, Record):
        _require(tree, dict)
        record = cls(**arguments_of(cls, tree))
        set_others(record, tree)
        return record
    if is_model(cls):
        return cls.model_validate(tree)
    _require(tree, dict)
    hints = typing.get_type_hints(cls)
    return cls(
        **{
            it.name: _value(hints[it.name], tree[it.name])
            for it in dataclasses.fields(cls)
            if it.init and it.name in tree
        }
    )


def _value(hint: Any, tree: Any) -> Any:
    """Return the value of a dataclass's field of type `hint`."""
    optional = _optional(hint)
    if tree is None or optional is not None:
        return None if tree is None else _value(optional, tree)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        _require(tree, list)
        return [_value(arguments[0], item) for item in tree]
    if origin is dict:
        _require(tree, dict)
        return {key: _value(arguments[1], item) for key, item in tree.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        if tree not in hint.__members__:
            raise ValueError(f"{hint.__name__} has no member {tree!r:.80}")
        return hint[tree]
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Record)):
        return _made(hint, tree)
    if hint is bytes and isinstance(tree, str):
        return tree.encode()
    return tree


def _require(tree: Any, kind: type) -> None:
    if not isinstance(tree, kind):
        raise TypeError(f"{tree!r:.80} is no {kind.__name__}")


def _record(cls: Any, defined: Defined) -> Any:
    name = cls.__name__
    if is_defined(name, cls, defined):
        return name
    hints = typing.get_type_hints(cls)
    fields = []
    for key, default in _fields_of(cls):
        optional = _optional(hints[key])
        where = f"{name}.{key}"
        kind = _type(hints[key] if optional is None else optional, where, defined, is_model(cls))
        shown: dict[str, Any] = {"name": key}
        if default is not _MISSING:
            shown["default"] = _by_value(default) if is_model(cls) else plain(default)
        if optional is not None:  # Avro: a union's default must have the union's first type
            first_null = default is _MISSING or default is None
            kind = ["null", kind] if first_null else [kind, "null"]
        shown["type"] = kind
        fields.append(shown)
    return {"type": "record", "name": name, "fields": fields}


def _fields_of(cls: Any) -> list[tuple[str, Any]]:
    """Return the names and defaults of the fields. _MISSING: no default that JSON can express."""
    found = []
    if is_model(cls):
        for name, field in cls.model_fields.items():
            given = (
                _MISSING if field.is_required() else field.get_default(call_default_factory=True)
            )
            found.append((name, _json_default(given)))
        return found
    for item in dataclasses.fields(cls):
        given = item.default if item.default is not dataclasses.MISSING else _MISSING
        if item.default_factory is not dataclasses.MISSING:
            given = item.default_factory()
        found.append((item.name, _json_default(given)))
    return found


def _json_default(value: Any) -> Any:
    simple = isinstance(value, (bool, int, float, str, Enum)) or value is None
    return value if simple or value in ([], {}) else _MISSING


def _optional(hint: Any) -> Any:
    """Return X for `X | None`. None: the hint is no such union."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    others = [it for it in get_args(hint) if it is not type(None)]
    return others[0] if len(others) == 1 and len(get_args(hint)) == 2 else None


def _type(hint: Any, where: str, defined: Defined, in_model: bool) -> Any:
    if hint in _PRIMITIVES:
        return _PRIMITIVES[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        return {"type": "array", "items": _part(arguments[0], where, defined, in_model)}
    if origin is dict and arguments[0] is str:
        return {"type": "map", "values": _part(arguments[1], where, defined, in_model)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, where, defined, in_model)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.schema_info(defined)
    if is_model(hint) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return _record(hint, defined)
    raise TypeError(
        f"{where}: {hint!r} has no Avro type; expected bool, int, float, str, bytes, list[...],"
        " dict[str, ...], an Enum, a dataclass or a model, each also with | None"
    )


def _part(hint: Any, where: str, defined: Defined, in_model: bool) -> Any:
    optional = _optional(hint)
    if optional is None:
        return _type(hint, where, defined, in_model)
    return ["null", _type(optional, where, defined, in_model)]


def _enum(hint: type[Enum], where: str, defined: Defined, in_model: bool) -> Any:
    """Return the type of an enum. A model writes the members' values, a dataclass their names."""
    if in_model:
        kinds = {type(it.value) for it in hint}
        if len(kinds) != 1 or not kinds <= _PRIMITIVES.keys():
            raise TypeError(f"{where}: the values of {hint.__name__} have no common Avro type")
        return _PRIMITIVES[kinds.pop()]
    name = hint.__name__
    if is_defined(name, hint, defined):
        return name
    symbols = [it.name for it in hint]
    if not all(_SYMBOL(it) for it in symbols):
        raise TypeError(f"{where}: Avro's symbols have ASCII letters, digits and underscores")
    return {"type": "enum", "name": name, "symbols": symbols}
