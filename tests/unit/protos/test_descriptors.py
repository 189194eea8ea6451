"""Files of Protobuf definitions, as a client of another language may order them."""

from __future__ import annotations

import random

import pytest
from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

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


def with_uninterpreted_option() -> FileDescriptorProto:
    """A file whose option lacks a required field: protobuf reads the file, but cannot write it."""
    file = FileDescriptorProto(name="a")
    file.options.uninterpreted_option.add().name.add()
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
        ([with_uninterpreted_option()], "required fields"),
    ],
)
def test_files_that_are_no_definition_raise_value_error(
    files: list[FileDescriptorProto], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        pool_of(FileDescriptorSet(file=files))


def file_with_map(*fields: FieldDescriptorProto, depth: int = 1) -> FileDescriptorProto:
    """A file with a message that has a map, whose entries have these fields."""
    file = FileDescriptorProto(name="map.proto", syntax="proto3")
    outer, name = file.message_type.add(name="M"), ".M"
    for _ in range(depth):
        outer, name = outer.nested_type.add(name="N"), f"{name}.N"
    entry = outer.nested_type.add(name="FEntry", field=fields)
    entry.options.map_entry = True
    outer.field.add(name="f", number=1, type=11, label=3, type_name=f"{name}.FEntry")
    return file


def field_of(number: int, **others: object) -> FieldDescriptorProto:
    given = {"name": f"f{number}", "type": FieldDescriptorProto.TYPE_STRING, "label": 1} | others
    return FieldDescriptorProto(number=number, **given)  # type: ignore[arg-type]


KEY, VALUE = field_of(1), field_of(2)
REPEATED = FieldDescriptorProto.LABEL_REPEATED


def test_a_map_is_accepted() -> None:
    file = file_with_map(VALUE, KEY)
    message = pool_of(FileDescriptorSet(file=[file])).FindMessageTypeByName("M.N")
    assert [it.name for it in message.fields] == ["f"]


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (KEY,),
        (VALUE,),
        (KEY, field_of(3)),
        (KEY, VALUE, field_of(3)),
        (field_of(1, label=REPEATED), VALUE),
        (KEY, field_of(2, label=REPEATED)),
        (field_of(1, type=FieldDescriptorProto.TYPE_BYTES), VALUE),
        (field_of(1, type=FieldDescriptorProto.TYPE_MESSAGE, type_name=".M"), VALUE),
    ],
)
@pytest.mark.parametrize("depth", [0, 1, 50])
def test_a_type_of_map_entries_without_a_valid_key_and_value_is_refused(
    fields: tuple[FieldDescriptorProto, ...], depth: int
) -> None:
    """Protobuf's pool accepts such a type. A read of the map would end the process."""
    file = file_with_map(*fields, depth=depth)
    with pytest.raises(ValueError, match="'FEntry' is not a valid type of map entries"):
        pool_of(FileDescriptorSet(file=[file]))
