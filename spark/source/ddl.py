"""Parses Spark's schema text, `carrier string, delay int`, without a session.

Spark's own parser is in Java, and a data source runs in a Python process without it. A schema may
also be the JSON that `schema.json()` returns.
"""

from __future__ import annotations

import json
import re
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "boolean": BooleanType(),
    "tinyint": ByteType(),
    "byte": ByteType(),
    "smallint": ShortType(),
    "short": ShortType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "float": FloatType(),
    "real": FloatType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
}
_TOKEN: Final = re.compile(r"\s*(?:`([^`]*)`|(\w+)|([<>:,()]))")
_REFUSALS: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(AssertionError, ImportError),  # a name that is no string; a class of a user-defined type
)
"""The errors of PySpark's parser of JSON schemas."""

DEPTH_MAX: Final = 32
CHARACTERS_MAX: Final = 100_000


def parse_schema(text: str) -> StructType:
    """Parse `name type, ...` or a schema's JSON. Raises ValueError with the reason."""
    if len(text) > CHARACTERS_MAX:
        raise ValueError(f"has more than {CHARACTERS_MAX} characters")
    if text.lstrip().startswith("{"):
        return _from_json(text)
    parser = _Parser(text)
    fields = parser.fields(end="", separator="")
    return StructType(fields)


def _from_json(text: str) -> StructType:
    try:
        parsed = StructType.fromJson(json.loads(text))
    except _REFUSALS as error:
        raise ValueError(f"is not the JSON of a schema: {error!r}") from None
    require_supported(parsed)
    return parsed


def require_supported(kind: DataType, depth: int = 0) -> None:
    """Raise ValueError if the source cannot decode JSON payloads to this type."""
    if depth > DEPTH_MAX:
        raise ValueError(f"types are nested deeper than {DEPTH_MAX}")
    match kind:
        case StructType():
            for field in kind.fields:
                if not isinstance(field.metadata, dict):
                    raise ValueError(f"the metadata of the field {field.name!r} is not an object")
                require_supported(field.dataType, depth + 1)
        case ArrayType():
            require_supported(kind.elementType, depth + 1)
        case DecimalType():
            _require_decimal(kind.precision, kind.scale)
        case _:
            if type(kind) not in {type(known) for known in _TYPES.values()}:
                raise ValueError(f"{kind.simpleString()} is not supported")


def _require_decimal(precision: int, scale: int) -> None:
    if not 0 < precision <= 38 or not 0 <= scale <= precision:
        raise ValueError(f"decimal({precision},{scale}) is not a type")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []  # kind, text
        at, text = 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at : at + 20]!r} is not a part of a schema")
            quoted, word, sign = match.groups()
            name = quoted if quoted is not None else word
            self._tokens.append(("name", name) if name is not None else ("sign", sign))
            at = match.end()

    def fields(self, *, end: str, separator: str, depth: int = 0) -> list[StructField]:
        """Parse fields of the form `name<separator>type` until the sign `end`, or, with "", until
        the end of the text."""
        if depth > DEPTH_MAX:
            raise ValueError(f"types are nested deeper than {DEPTH_MAX}")
        fields = []
        while True:
            name = self._name()
            if separator:
                self._expect(separator)
            fields.append(StructField(name, self._type(depth)))
            if self._peek() != ("sign", ","):
                break
            self._tokens.pop(0)
        if end:
            self._expect(end)
        elif self._tokens:
            raise ValueError(f"{self._tokens[0][1]!r} is not expected")
        return fields

    def _type(self, depth: int) -> DataType:
        name = self._name().lower()
        if name == "array":
            self._expect("<")
            if depth > DEPTH_MAX:
                raise ValueError(f"types are nested deeper than {DEPTH_MAX}")
            item = self._type(depth + 1)
            self._expect(">")
            return ArrayType(item)
        if name == "struct":
            self._expect("<")
            return StructType(self.fields(end=">", separator=":", depth=depth + 1))
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name not in _TYPES:
            known = ", ".join([*_TYPES, "decimal", "array", "struct"])
            raise ValueError(f"the type {name!r} is not one of {known}")
        return _TYPES[name]

    def _decimal(self) -> DecimalType:
        if self._peek() != ("sign", "("):
            return DecimalType()
        self._expect("(")
        precision = self._number()
        scale = 0
        if self._peek() == ("sign", ","):
            self._expect(",")
            scale = self._number()
        self._expect(")")
        _require_decimal(precision, scale)
        return DecimalType(precision, scale)

    def _number(self) -> int:
        text = self._name()
        if not text.isdecimal() or len(text) > 2:
            raise ValueError(f"expected precision or scale of a decimal, found {text!r}")
        return int(text)

    def _peek(self) -> tuple[str, str] | None:
        return self._tokens[0] if self._tokens else None

    def _name(self) -> str:
        if not self._tokens or self._tokens[0][0] != "name":
            found = repr(self._tokens[0][1]) if self._tokens else "the end"
            raise ValueError(f"expected a name or type, found {found}")
        return self._tokens.pop(0)[1]

    def _expect(self, sign: str) -> None:
        if self._peek() != ("sign", sign):
            found = repr(self._tokens[0][1]) if self._tokens else "the end"
            raise ValueError(f"expected {sign!r}, found {found}")
        self._tokens.pop(0)
