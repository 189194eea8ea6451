"""Records: classes whose fields describe an Avro schema, in the style of Apache's Python client.

    class Order(Record):
        number = Long(required=True)
        note = String()

The schema of a class is the same JSON as in Apache's client, so that both clients share the
versions in the registry. If a field is not required, its type is a union with null. The schema
contains the default of a field only with `required_default=True`. When a new version of a class
adds a field, the schema must contain the field's default. Otherwise consumers with the new version
cannot read earlier messages.
"""

from __future__ import annotations

import copy
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

_PARAMETERS = ("self", "default", "required_default", "required")  # of the constructor of Record
_OWN = ("_default", "_required", "_required_default")
"""The attributes of a record that are not fields."""


class Defined(set[str]):
    """The full names that one schema defines so far, with their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: dict[str, Any] = {}


def is_defined(name: str, cls: Any, defined_names: set[str]) -> bool:
    """Return whether the schema defines `name` already; if not, note that it does now.

    Raises TypeError if `defined_names` is a `Defined` that has the name for a class of another
    definition. Two Record classes or enums with the same definition may have the same name, as in
    Apache's client.
    """
    if isinstance(defined_names, Defined):
        other = defined_names.classes.setdefault(name, cls)
        if other is not cls and _definition(other) != _definition(cls):
            raise TypeError(
                f"{_path(other)} and {_path(cls)} have the same name in one schema; rename one of"
                " the classes"
            )
    if name in defined_names:
        return True
    defined_names.add(name)
    return False


def _definition(cls: Any) -> Any:
    """Return what must be equal in two classes of the same name: the Avro schema of a Record
    class, or the symbols of an enum. Two dataclasses or models are never equal."""
    if issubclass(cls, Record):
        return cls.schema_info(set())  # a plain set: this call must not compare again
    # Iteration skips aliases, which are no symbols.
    return [it.name for it in cls] if issubclass(cls, Enum) else cls


def _path(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Field:
    """A field of a record.

    - `default`: the value of the field in a record that is created without this field.
    - `required`: if True, the type of the field in the schema is not a union with null.
    - `required_default`: if True, the schema contains the default.
    """

    kind: ClassVar[str] = ""  # the name of the type in Avro
    kinds: ClassVar[tuple[type, ...]] = ()  # the Python types of values

    def __init__(
        self, default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self._required = required
        self._required_default = required_default
        self._default = None
        if default is not None:
            self._default = self.validate_type("default", default)

    def type(self) -> str:
        """Return the name of the type in Avro."""
        return self.kind

    def python_type(self) -> Any:
        """Return the Python type of values, or a tuple of types."""
        return self.kinds[0] if len(self.kinds) == 1 else self.kinds

    def validate_type(self, name: str, val: Any) -> Any:
        """Return the value that the record stores for `val`. Raises TypeError for a wrong type."""
        if val is None and not self._required:
            return self.default()
        if not isinstance(val, self.python_type()):
            expected = " or ".join(it.__name__ for it in self.kinds)
            raise TypeError(f"Invalid type '{type(val)}' for field '{name}'. Expected: {expected}")
        return val

    def schema(self) -> Any:
        """Return the schema of the field's type. Raises TypeError if two classes of different
        definitions have the same name."""
        return self.schema_info(Defined())

    def schema_info(self, _defined_names: set[str]) -> Any:
        """Return the schema. If the type's name is in `_defined_names`, return only the name."""
        return self.kind

    def default(self) -> Any:
        return self._default

    def required_default(self) -> bool:
        return self._required_default

    @property
    def is_required(self) -> bool:
        return self._required


class Null(Field):
    """A field that is always None."""

    kind = "null"
    kinds = (type(None),)

    def validate_type(self, name: str, val: Any) -> Any:
        if val is not None:
            raise TypeError(f"Field {name} is set to be None")
        return val


class Boolean(Field):
    """A bool. Its default is False."""

    kind = "boolean"
    kinds = (bool,)

    def default(self) -> Any:
        return False if self._default is None else self._default


class Integer(Field):
    """A signed number of 32 bits."""

    kind = "int"
    kinds = (int,)


class Long(Field):
    """A signed number of 64 bits."""

    kind = "long"
    kinds = (int,)


class Float(Field):
    """A number of single precision."""

    kind = "float"
    kinds = (float, int)


class Double(Field):
    """A number of double precision."""

    kind = "double"
    kinds = (float, int)


class Bytes(Field):
    """Bytes. The field converts text to UTF-8."""

    kind = "bytes"
    kinds = (bytes, str)

    def validate_type(self, name: str, val: Any) -> Any:
        found = super().validate_type(name, val)
        return found.encode() if isinstance(found, str) else found


class String(Field):
    """Text. The field decodes bytes as UTF-8."""

    kind = "string"
    kinds = (str, bytes)

    def validate_type(self, name: str, val: Any) -> Any:
        found = super().validate_type(name, val)
        return found.decode() if isinstance(found, bytes) else found


class CustomEnum(Field):
    """A member of an Enum class. The field also accepts the member's name or integer value."""

    kind = "enum"

    def __init__(
        self,
        enum_type: Any,
        default: Any = None,
        required: bool = False,
        required_default: bool = False,
    ) -> None:
        if not (isinstance(enum_type, type) and issubclass(enum_type, Enum)):
            raise TypeError(f"{enum_type!r} is not a valid Enum type")
        self.enum_type = enum_type
        self.values = {member.value: member for member in enum_type}
        super().__init__(default, required, required_default)

    def python_type(self) -> Any:
        return self.enum_type

    def validate_type(self, name: str, val: Any) -> Any:
        if val is None or isinstance(val, self.enum_type):
            return val
        known = self.enum_type.__members__ if isinstance(val, str) else self.values
        if type(val) not in (str, int):
            expected = self.enum_type.__name__
            raise TypeError(f"Invalid type '{type(val)}' for field '{name}'. Expected: {expected}")
        if val not in known:
            expected = ", ".join(map(str, known))
            raise TypeError(f"Invalid enum value '{val}' for field '{name}'. Expected: {expected}")
        return known[val]

    def schema_info(self, defined_names: set[str]) -> Any:
        name = self.enum_type.__name__
        if is_defined(name, self.enum_type, defined_names):
            return name
        return {"type": "enum", "name": name, "symbols": [it.name for it in self.enum_type]}


# Array and Map declare all parameters again, because the name of the first parameter differs, as in
# Apache's client.


class Array(Field):
    """A list whose items have the type of a field or record."""

    kind = "array"
    kinds = (list,)

    def __init__(
        self,
        array_type: Any,
        default: Any = None,
        required: bool = False,
        required_default: bool = False,
    ) -> None:
        self.array_type = _part(array_type)
        super().__init__(default, required, required_default)

    def validate_type(self, name: str, val: Any) -> Any:
        if val is None:
            return None
        super().validate_type(name, val)
        _require_parts(f"Array field {name} items", self.array_type, val)
        return val

    def schema_info(self, defined_names: set[str]) -> Any:
        return {"type": "array", "items": _part_schema(self.array_type, defined_names)}


class Map(Field):
    """A dict with texts as keys. Its values have the type of a field or record."""

    kind = "map"
    kinds = (dict,)

    def __init__(
        self,
        value_type: Any,
        default: Any = None,
        required: bool = False,
        required_default: bool = False,
    ) -> None:
        self.value_type = _part(value_type)
        super().__init__(default, required, required_default)

    def validate_type(self, name: str, val: Any) -> Any:
        if val is None:
            return None
        super().validate_type(name, val)
        if not all(isinstance(key, str) for key in val):
            raise TypeError(f"Map keys for field {name} should all be strings")
        _require_parts(f"Map values for field {name}", self.value_type, val.values())
        return val

    def schema_info(self, defined_names: set[str]) -> Any:
        return {"type": "map", "values": _part_schema(self.value_type, defined_names)}


class _RecordMeta(type):
    """Collects the fields that the body of a class declares."""

    _fields: dict[str, Any]

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _RecordMeta:
        if bases:  # Record itself has none
            fields: dict[str, Any] = {}
            for key, value in body.items():
                if isinstance(value, EnumMeta):
                    fields[key] = CustomEnum(value)
                elif isinstance(value, _RecordMeta):
                    fields[key] = value()
                elif isinstance(value, (Record, Field)):
                    fields[key] = value
            body["_fields"] = fields
            body["_required"] = False
        return type.__new__(cls, name, bases, body)


class Record(metaclass=_RecordMeta):
    """The base class of record classes. The constructor takes the fields as keyword arguments. It
    ignores keywords that are not fields.

    If a program sets a field to a value of a wrong type, the record raises TypeError. If a program
    sets an attribute that is not a field, the record raises AttributeError.

    A class can set two attributes. `_avro_namespace` is the namespace of the record in Avro. With
    `_sorted_fields = True`, the fields of the schema are in alphabetical order.
    """

    _avro_namespace: ClassVar[str | None] = None
    _sorted_fields: ClassVar[bool] = False
    _fields: ClassVar[dict[str, Any]] = {}
    _required = False

    def __init__(
        self,
        default: Any = None,
        required_default: bool = False,
        required: bool = False,
        **kwargs: Any,
    ) -> None:
        self._required_default = required_default
        self._default = default
        self._required = required
        for name, kind in self._fields.items():
            if name in kwargs:
                setattr(self, name, _made(kind, kwargs[name]))
            elif isinstance(kind, Record):
                setattr(self, name, kind)
            else:
                object.__setattr__(self, name, kind.default())

    @classmethod
    def schema(cls) -> Any:
        """Return the Avro schema of the class. Raises TypeError if two classes of different
        definitions have the same name."""
        return cls.schema_info(Defined())

    @classmethod
    def schema_info(cls, defined_names: set[str]) -> Any:
        """Return the schema. If the record's full name is in `defined_names`, return only this
        name."""
        name = cls.__name__
        full = name if cls._avro_namespace is None else f"{cls._avro_namespace}.{name}"
        if is_defined(full, cls, defined_names):
            return full
        schema: dict[str, Any] = {"type": "record", "name": name}
        if cls._avro_namespace is not None:
            schema["namespace"] = cls._avro_namespace
        fields: list[Any] = []
        for key in sorted(cls._fields) if cls._sorted_fields else cls._fields:
            field = cls._fields[key]
            kind = field.schema_info(defined_names)
            shown: dict[str, Any] = {"name": key}
            if field.required_default():
                default = field.default()
                shown["default"] = default.name if isinstance(default, Enum) else default
            shown["type"] = kind if field.is_required else ["null", kind]
            fields.append(shown)
        schema["fields"] = fields
        return schema

    def type(self) -> str:
        return type(self).__name__

    def python_type(self) -> Any:
        return type(self)

    def validate_type(self, name: str, val: Any) -> Any:
        """Return the value that another record stores for `val` in a field of this type. Raises
        TypeError for a wrong type."""
        if val is None and not self._required:
            return self.default()
        if not isinstance(val, type(self)):
            expected = type(self).__name__
            raise TypeError(
                f"Invalid type '{type(val)}' for sub-record field '{name}'. Expected: {expected}"
            )
        return val

    def default(self) -> Any:
        return self._default

    def required_default(self) -> bool:
        return self._required_default

    @property
    def is_required(self) -> bool:
        return self._required

    def fields(self) -> dict[str, Any]:
        """Return the values of the fields, by name. Apache's client does not have this method."""
        return {name: getattr(self, name) for name in self._fields}

    def __setattr__(self, key: str, value: Any) -> None:
        if key in _OWN:
            object.__setattr__(self, key, value)
            return
        if key not in self._fields:
            raise AttributeError(f"Cannot set undeclared field {key} on record")
        object.__setattr__(self, key, self._fields[key].validate_type(key, value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return self.fields() == other.fields()

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self.fields())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fields()})"


def _made(kind: Any, value: Any) -> Any:
    """Return the value of a field. If the field is a record, convert a dict to the record. The same
    applies to the items of arrays and the values of maps."""
    if isinstance(kind, Record) and isinstance(value, dict):
        return _record(kind, value)
    if isinstance(kind, Array) and isinstance(value, list):
        return [_made(kind.array_type, item) for item in value]
    if isinstance(kind, Map) and isinstance(value, dict):
        return {key: _made(kind.value_type, item) for key, item in value.items()}
    return value


def _record(kind: Record, value: dict[str, Any]) -> Record:
    made = copy.copy(kind)
    made.__init__(**arguments_of(type(kind), value))  # type: ignore[misc]
    set_others(made, value)
    return made


def arguments_of(cls: type[Record], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of fields that the constructor takes as keyword arguments."""
    return {
        name: value
        for name, value in values.items()
        if name in cls._fields and name not in _PARAMETERS
    }


def set_others(record: Record, values: dict[str, Any]) -> None:
    """Set the fields that have the name of one of the constructor's own parameters."""
    for name in _PARAMETERS:
        if name in record._fields and name in values:
            setattr(record, name, _made(record._fields[name], values[name]))


def _part(kind: Any) -> Any:
    """Return the type of an array's items or a map's values. Raises TypeError for a wrong type."""
    if isinstance(kind, _RecordMeta):
        return kind()
    if not isinstance(kind, (Record, Field)):
        raise TypeError(f"Argument {kind!r} is not a Record or a Field")
    return kind


def _require_parts(what: str, kind: Any, values: Iterable[Any]) -> None:
    expected = kind.python_type()
    if not all(isinstance(item, expected) for item in values):
        raise TypeError(f"{what} should all be of type {kind.type()}")


def _part_schema(kind: Any, defined_names: set[str]) -> Any:
    if isinstance(kind, (Array, Map, Record)):
        return kind.schema_info(defined_names)
    return kind.type()
