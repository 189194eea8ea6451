"""The message types of a Protobuf definition, as the registry keeps it for PROTOBUF_NATIVE schemas.

A definition holds the files of its root message and of all imports, in any order: Apache's Java
client takes them from a hash map. A descriptor pool accepts a file only after its imports.

A definition may come from a producer. The pool does not check the types of map entries. If such a
type lacks the field 1 or 2, a read of the map ends the process with a segmentation fault. So this
module checks these types, by the rules of Protobuf's compiler.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import EncodeError

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import (
        DescriptorProto,
        FileDescriptorProto,
        FileDescriptorSet,
    )

_NO_KEYS: Final = frozenset(
    {
        FieldDescriptorProto.TYPE_BYTES,
        FieldDescriptorProto.TYPE_DOUBLE,
        FieldDescriptorProto.TYPE_ENUM,
        FieldDescriptorProto.TYPE_FLOAT,
        FieldDescriptorProto.TYPE_GROUP,
        FieldDescriptorProto.TYPE_MESSAGE,
    }
)
"""The types that the key of a map cannot have."""


def pool_of(described: FileDescriptorSet) -> DescriptorPool:
    """Return a pool with all files. Raises ValueError if they do not form a valid definition."""
    files: dict[str, FileDescriptorProto] = {}
    for file in described.file:
        if files.setdefault(file.name, file) != file:
            raise ValueError(f"two files have the name {file.name!r}")
        _check_maps(file)
    pool = DescriptorPool()
    # The sorter has no recursion: a chain of imports may be as long as the definition.
    imports = TopologicalSorter({name: file.dependency for name, file in files.items()})
    try:
        for name in imports.static_order():
            if name not in files:
                raise ValueError(f"the imported file {name!r} is missing")
            pool.Add(files[name])
    except CycleError as error:
        raise ValueError(f"the file {error.args[1][0]!r} imports itself") from None
    except (TypeError, EncodeError) as error:  # protobuf's errors for a file that is not valid
        raise ValueError(str(error)) from None
    return pool


def _check_maps(file: FileDescriptorProto) -> None:
    """Raise ValueError if a type of map entries is not valid."""
    pending = list(file.message_type)
    while pending:
        kind = pending.pop()
        pending += kind.nested_type
        if kind.options.map_entry and not _is_map_entry(kind):
            raise ValueError(f"the type {kind.name!r} is not a valid type of map entries")


def _is_map_entry(kind: DescriptorProto) -> bool:
    fields = sorted(kind.field, key=lambda it: it.number)
    return (
        [it.number for it in fields] == [1, 2]
        and all(it.label == FieldDescriptorProto.LABEL_OPTIONAL for it in fields)
        and fields[0].type not in _NO_KEYS
        and not (kind.nested_type or kind.enum_type or kind.oneof_decl)
        and not (kind.extension or kind.extension_range)
    )
