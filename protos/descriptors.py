"""The message types of a Protobuf definition, as the registry keeps it for PROTOBUF_NATIVE schemas.

A definition holds the files of its root message and of all imports, in any order: Apache's Java
client takes them from a hash map. A descriptor pool accepts a file only after its imports.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pool import DescriptorPool

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet


def pool_of(described: FileDescriptorSet) -> DescriptorPool:
    """Return a pool with all files. Raises ValueError if they do not form a valid definition."""
    files: dict[str, FileDescriptorProto] = {}
    for file in described.file:
        if files.setdefault(file.name, file) != file:
            raise ValueError(f"two files have the name {file.name!r}")
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
    except TypeError as error:  # protobuf's error for a file that is not valid
        raise ValueError(str(error)) from None
    return pool
