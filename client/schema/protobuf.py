"""Protobuf schemas of generated classes, with the same definition as in Apache's clients."""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError, Message

from magnetar.client.schema.schema import Schema, SchemaType


class ProtobufNativeSchema(Schema):
    """The binary encoding of a generated Protobuf class (`record_cls`).

    The constructor raises TypeError if `record_cls` is not a generated class. `decode` raises
    ValueError for bytes that are not a message of this class.
    """

    def __init__(self, record_cls: Any) -> None:
        is_message = isinstance(record_cls, type) and issubclass(record_cls, Message)
        if not is_message or record_cls.DESCRIPTOR is None:  # None: Message itself
            raise TypeError(f"record_cls must be a protobuf Message subclass, got {record_cls!r}")
        definition = _definition_of(record_cls.DESCRIPTOR)
        super().__init__(record_cls, SchemaType.PROTOBUF_NATIVE, definition, "PROTOBUF_NATIVE")

    def encode(self, obj: Any) -> bytes:
        self._validate_object_type(obj)
        assert isinstance(obj, Message)
        return obj.SerializeToString()

    def decode(self, data: bytes) -> Any:
        try:
            return self._record_cls.FromString(data)
        except DecodeError as error:
            raise ValueError(f"the payload is no {self._record_cls.__name__}: {error}") from error

    def __str__(self) -> str:
        return f"ProtobufNativeSchema({self._record_cls.__name__})"


def _definition_of(descriptor: Any) -> dict[str, str]:
    files = descriptor_pb2.FileDescriptorSet()
    _collect(descriptor.file, set(), files)
    return {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": descriptor.full_name,
        "rootFileDescriptorName": descriptor.file.name,
    }


def _collect(file: Any, seen: set[str], into: descriptor_pb2.FileDescriptorSet) -> None:
    """Add a file to `into`, after the files that it imports."""
    if file.name in seen:
        return
    for dependency in file.dependencies:
        _collect(dependency, seen, into)
    seen.add(file.name)
    file.CopyToProto(into.file.add())
