"""The rules between the versions of a schema: Pulsar's strategies as functions. Pure."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.broker.errors import IncompatibleSchema
from magnetar.broker.schemas import avro, key_value, protobuf
from magnetar.broker.schemas.schema import AVRO_TYPES, Schema, SchemaType
from magnetar.metadata.policies import SchemaCompatibility

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_parsed: Final = lru_cache(maxsize=4)(avro.parse)
_parsed_protobuf: Final = lru_cache(maxsize=4)(protobuf.parse)
"""Cached, because FULL compares the same two schemas in both directions. A large schema takes some
5 MB in its parsed form."""

T = TypeVar("T")
_Strategy = SchemaCompatibility

TRANSITIVE: Final = frozenset(
    (_Strategy.BACKWARD_TRANSITIVE, _Strategy.FORWARD_TRANSITIVE, _Strategy.FULL_TRANSITIVE)
)
_READS_EARLIER: Final = frozenset(
    (
        _Strategy.BACKWARD,
        _Strategy.BACKWARD_TRANSITIVE,
        _Strategy.FULL,
        _Strategy.FULL_TRANSITIVE,
    )
)
_READ_BY_EARLIER: Final = frozenset(
    (_Strategy.FORWARD, _Strategy.FORWARD_TRANSITIVE, _Strategy.FULL, _Strategy.FULL_TRANSITIVE)
)
_LATEST_FOR_CONSUMERS: Final = frozenset(
    (_Strategy.BACKWARD, _Strategy.FORWARD, _Strategy.FORWARD_TRANSITIVE, _Strategy.FULL)
)


def to_compare(versions: Sequence[T], strategy: SchemaCompatibility) -> Sequence[T]:
    """The versions with which a new version is compared. `versions`: oldest first."""
    if strategy is _Strategy.ALWAYS_COMPATIBLE:
        return ()
    return versions if strategy in TRANSITIVE else versions[-1:]


def for_consumer(strategy: SchemaCompatibility) -> SchemaCompatibility:
    """The strategy by which a consumer's schema is compared with the versions."""
    return _Strategy.BACKWARD if strategy in _LATEST_FOR_CONSUMERS else strategy


def require_compatible(new: Schema, earlier: Schema, strategy: SchemaCompatibility) -> None:
    """Raise IncompatibleSchema if `strategy` does not allow `new` after `earlier`."""
    if strategy is _Strategy.ALWAYS_COMPATIBLE:
        return
    if strategy is _Strategy.ALWAYS_INCOMPATIBLE:
        raise IncompatibleSchema("the compatibility strategy is ALWAYS_INCOMPATIBLE")
    if new.type is not earlier.type:
        raise IncompatibleSchema(
            f"Incompatible schema: exists schema type {earlier.type.name},"
            f" new schema type {new.type.name}"
        )
    reads = _reader_of(new.type)
    try:
        if strategy in _READS_EARLIER and (problem := reads(new, earlier)):
            raise IncompatibleSchema(f"the new schema cannot read earlier messages: {problem}")
        if strategy in _READ_BY_EARLIER and (problem := reads(earlier, new)):
            raise IncompatibleSchema(f"the earlier schema cannot read new messages: {problem}")
    except (avro.NotAvro, protobuf.NotProtobuf, key_value.NotKeyValue) as error:
        # The new schema was parsed before. So the stored schema breaks a rule that was added later.
        raise IncompatibleSchema(f"the earlier schema is not valid: {error}") from None


def _reader_of(kind: SchemaType) -> Callable[[Schema, Schema], str]:
    """The function that compares two schemas of this type. It returns the reason why the first
    schema cannot read messages of the second; "": it can."""
    if kind in AVRO_TYPES:
        return partial(_avro, is_json=kind is SchemaType.JSON)
    if kind is SchemaType.PROTOBUF_NATIVE:
        return _protobuf
    return _key_value if kind is SchemaType.KEY_VALUE else _primitive


def _avro(reader: Schema, writer: Schema, *, is_json: bool) -> str:
    try:
        return avro.unreadable(_parsed(reader.data), _parsed(writer.data))
    except avro.NotAvro:
        if is_json:  # one of them is a JSON schema of an old client: Pulsar accepts it
            return ""
        raise


def _protobuf(reader: Schema, writer: Schema) -> str:
    return protobuf.unreadable(_parsed_protobuf(reader.data), _parsed_protobuf(writer.data))


def _key_value(reader: Schema, writer: Schema) -> str:
    pairs = zip(
        ("key", "value"),
        key_value.parse(reader.data, reader.properties),
        key_value.parse(writer.data, writer.properties),
        strict=True,
    )
    for what, mine, theirs in pairs:
        if mine.type != theirs.type:
            return f"the {what} has the type {mine.type}, in the messages {theirs.type}"
        kind = SchemaType.__members__.get(mine.type, SchemaType.NONE)
        one, other = (Schema(kind, it.data, "", {}, b"") for it in (mine, theirs))
        if kind is not SchemaType.KEY_VALUE and (problem := _reader_of(kind)(one, other)):
            return f"the {what}: {problem}"
    return ""


def _primitive(_reader: Schema, _writer: Schema) -> str:
    return ""
