"""Files of Protobuf definitions, as a client of another language may order them."""

from __future__ import annotations

import random

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from magnetar.protos.descriptors import pool_of


def file_of(name: str, *imports: str) -> FileDescriptorProto:
    """A file with one message, which has a field of each imported message."""
    file = FileDescriptorProto(name=name, syntax="proto3", dependency=imports)
    message = file.message_type.add(name=f"M{name}")
    for number, other in enumerate(imports, 1):
        message.field.add(
            name=f"f{number}", number=number, label=1, type=11, type_name=f".M{other}"
        )
    return file


def test_any_order_of_the_files_is_accepted() -> None:
    chooser = random.Random(5)
    names = [str(number) for number in range(50)]
    files = [
        file_of(name, *chooser.sample(names[:at], min(at, chooser.randrange(5))))
        for at, name in enumerate(names)
    ]
    for _ in range(20):
        chooser.shuffle(files)
        pool = pool_of(FileDescriptorSet(file=files))
        assert {pool.FindMessageTypeByName(f"M{name}").file.name for name in names} == set(names)


def test_a_long_chain_of_imports_is_accepted() -> None:
    count = 20_000
    files = [file_of(str(number), str(number + 1)) for number in range(count)]
    pool = pool_of(FileDescriptorSet(file=[*files, file_of(str(count))]))
    assert pool.FindMessageTypeByName("M0").file.name == "0"


def test_a_file_that_stands_twice_or_is_imported_twice_is_accepted() -> None:
    files = [file_of("a", "b", "b"), file_of("b"), file_of("b")]
    assert pool_of(FileDescriptorSet(file=files)).FindMessageTypeByName("Ma").name == "Ma"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([file_of("a", "b")], "the imported file 'b' is missing"),
        ([file_of("a", "a")], "the file 'a' imports itself"),
        ([file_of("a", "b"), file_of("b", "c"), file_of("c", "b")], r"the file '[bc]' imports"),
        (
            [file_of(str(number), str((number + 1) % 5000)) for number in range(5000)],
            "^the file '[0-9]+' imports itself$",
        ),
        ([file_of("a"), FileDescriptorProto(name="a", syntax="proto2")], "two files have the name"),
        ([FileDescriptorProto(name="a", syntax="proto9")], "proto9"),
    ],
)
def test_files_that_are_no_definition_raise_value_error(
    files: list[FileDescriptorProto], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        pool_of(FileDescriptorSet(file=files))
