"""Runs of SENDs: the broker's form of the frames that one producer sends.

A run is a series of consecutive SENDs of one producer, in any form. One SEND is a run of one. This
module refuses no SEND. The run carries the stated checksums and the errors of SENDs (claims.py),
and later steps of the broker refuse SENDs.

Most SENDs are *plain*. The command of a plain SEND has a producer id, a sequence id, perhaps
`num_messages = 1`, and nothing else. The entry is one message with a checksum. Its metadata has
only the fields that clients write into each message (`plain_rest`), and perhaps a key
(`plain_key`). Consecutive plain SENDs differ little. So this module compares each plain SEND with
the fields that it expects after the previous SEND. This takes a sixth of the time of parsing.
`parse_command` and `parse_sent` parse every other SEND.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.claims import parse_sent
from magnetar.protos.entry import (
    CHECKED_HEAD_BYTES,
    PLAIN_METADATA_BYTES_MAX,
    EntryView,
    checksum_in,
    plain_key,
    plain_name,
    plain_rest,
    varint,
)
from magnetar.protos.errors import CommandError, EntryError, FrameError
from magnetar.protos.framing import Command, first_frame, parse_command


@dataclass(slots=True)
class SendRun:
    """SENDs of one producer, in order. Places in the run count from 0."""

    producer_id: int
    sequence_ids: list[int] = field(default_factory=list)
    highest_sequence_ids: list[int] = field(default_factory=list)  # 0: not stated
    entries: list[bytes] = field(default_factory=list)  # copies: the frames may be freed
    # The stated checksums; NO_CHECKSUM: not stated.
    checksums: list[int] = field(default_factory=list)
    # The views of entries, keyed by place. Plain entries have none.
    views: dict[int, EntryView] = field(default_factory=dict)
    # The errors of entries, keyed by place.
    errors: dict[int, EntryError] = field(default_factory=dict)
    end: int = 0  # the offset in the buffer after the last frame of the run
    parsed_bytes: int = 0  # the size of the SENDs that are not plain
    # The encoded fields of producer names in plain entries. None: not collected, because the run
    # begins with a SEND that is not plain.
    plain_names: set[bytes] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def part(self, start: int, stop: int) -> "SendRun":
        """Return the SENDs at the places `start` to `stop` - 1 as a new run."""
        return SendRun(
            self.producer_id,
            self.sequence_ids[start:stop],
            self.highest_sequence_ids[start:stop],
            self.entries[start:stop],
            self.checksums[start:stop],
            {place - start: view for place, view in self.views.items() if start <= place < stop},
            {place - start: error for place, error in self.errors.items() if start <= place < stop},
            self.end,
            self.parsed_bytes,
            self.plain_names,
        )


RUN_ENTRIES_MAX: Final = 250
"""The maximum number of entries of a run. The broker publishes a run in one step of the loop, which
takes 5 ms, or 15 ms on a busy machine."""

RUN_PARSED_BYTES_MAX: Final = 128 << 10
"""When the SENDs of a run that are not plain have this size, the run takes no further SEND that is
not plain: parsing its metadata may take 0.1 us a byte."""


def read_sends(buffer: memoryview, at: int) -> SendRun | None:
    """Return the longest run within the limits that begins with the frame at `at`. None: the frame
    is not a SEND that this module can read; the caller then uses `parse_command`."""
    run: SendRun | None = None
    size, parsed = len(buffer), 0
    while at < size and (run is None or len(run.entries) < RUN_ENTRIES_MAX):
        if run is not None and _is_of_another(buffer, at, run):
            break
        run, end = _read_plain(buffer, at, run)
        if end == at:
            if parsed >= RUN_PARSED_BYTES_MAX:
                break
            run, end = _read_other(buffer, at, run)
            parsed += end - at
        if end == at:
            break
        at = end
    if run is not None:
        run.end = at
        run.parsed_bytes = parsed
    return run


def run_of(command: Command) -> SendRun:
    """Return a run of one SEND, `command`. The `end` of this run has no meaning."""
    run = _add(None, command)
    assert run is not None, "a new run takes every producer"
    return run


# Mechanics

_IDS_AT: Final = 12
# The head of a plain SEND: total size, command size, type and tag, body size, ids (`_ids_of`). The
# key is the size of the ids.
_HEADS: Final = {size: struct.Struct(f">II3sB{size}s") for size in range(3, 13)}
_ENTRY_HEAD: Final = struct.Struct(">HII")
_SEND: Final = b"\x08\x06\x32"
_ONE_MESSAGE: Final = b"\x18\x01"  # num_messages = 1
_CHECKED: Final = 0x0E01


def _read_plain(buffer: memoryview, at: int, run: SendRun | None) -> tuple[SendRun | None, int]:
    """Add the plain SENDs from `at` on to the run. Returns the run, and the place of the first
    frame that is not added."""
    size = len(buffer)
    # The expected parts of the next SEND.
    ids = b"" if run is None else _ids_of(run.producer_id)
    head = _HEADS[len(ids) or _ids_bytes(buffer, at)]
    rest = name_field = rest_fields = b""
    # `high`: the sequence id without its lowest seven bits. `carry`: 0x80 if the sequence id is
    # encoded in more than one byte, otherwise 0.
    high = carry = 0
    spare = 0  # bytes after the sequence id that state num_messages = 1
    count = 0
    sequence_ids: list[int] = []
    entries: list[bytes] = []
    checksums: list[int] = []
    names: set[bytes] = set()
    most = RUN_ENTRIES_MAX if run is None else RUN_ENTRIES_MAX - len(run.entries)
    while size - at >= head.size and count < most:  # hot: about 1 us an entry
        total, command_size, send, body_size, own_ids = head.unpack_from(buffer, at)
        number_at, start, end = at + head.size, at + 8 + command_size, at + 4 + total
        if send != _SEND or command_size != body_size + 4 or not number_at < start < end <= size:
            break
        if own_ids != ids:
            if ids or not _are_ids(own_ids):
                break
            ids = own_ids
        number = bytes(buffer[number_at:start])
        if number[1:] != rest or not count:
            spare = len(_ONE_MESSAGE) if number[1:].endswith(_ONE_MESSAGE) else 0
            found = _high_bits(number[: len(number) - spare])
            if found is None:
                break
            rest, high, carry = number[1:], found, 0x80 if len(number) > 1 + spare else 0
        if number[0] & 0x80 != carry:
            break
        entry = bytes(buffer[start:end])
        if len(entry) < CHECKED_HEAD_BYTES:
            break
        magic, checksum, metadata_size = _ENTRY_HEAD.unpack_from(entry)
        payload_at = CHECKED_HEAD_BYTES + metadata_size
        if magic != _CHECKED or payload_at > len(entry):
            break
        if spare:
            number = number[:-spare]
        metadata = entry[CHECKED_HEAD_BYTES:payload_at]
        if metadata != name_field + number + rest_fields or not count:
            fields = _plain_fields(metadata, number)
            if fields is None:
                break
            name_field, rest_fields = fields
            names.add(name_field[:-1])
        sequence_ids.append(high | number[0] & 0x7F)
        entries.append(entry)
        checksums.append(checksum)
        count += 1
        at = end
    if not count:
        return run, at
    if run is None:
        highest = [0] * count
        run = SendRun(_id_in(ids), sequence_ids, highest, entries, checksums, plain_names=names)
        return run, at
    if run.plain_names is not None:
        run.plain_names |= names
    run.sequence_ids += sequence_ids
    run.highest_sequence_ids += [0] * count
    run.entries += entries
    run.checksums += checksums
    return run, at


def _read_other(buffer: memoryview, at: int, run: SendRun | None) -> tuple[SendRun | None, int]:
    """Add one SEND of any form. Returns the run, and the place of the next frame. This place is
    `at` if the frame is not a SEND of this producer, or cannot be parsed."""
    if buffer[at + 8 : at + 10] != _SEND[:2]:
        return run, at
    try:
        frame, end = first_frame(buffer, at)
        command = parse_command(frame)
    except (FrameError, CommandError):
        return run, at
    # The command begins with the type SEND. If a second type follows, the second one counts.
    if not isinstance(command.body, pb.CommandSend):
        return run, at
    extended = _add(run, command)
    return (run, at) if extended is None else (extended, end)


def _add(run: SendRun | None, command: Command) -> SendRun | None:
    """Return the run with one more SEND. None: the SEND is from another producer."""
    send = command.body
    assert isinstance(send, pb.CommandSend), send
    assert command.entry is not None, "a SEND without an entry does not parse"
    if run is None:
        run = SendRun(send.producer_id)
    elif run.producer_id != send.producer_id:
        return None
    # Copy the entry: it outlives its frame, and a view would keep the whole frame in memory.
    entry = bytes(command.entry)
    place = len(run.entries)
    try:
        run.views[place] = parse_sent(send, entry)
    except EntryError as error:
        run.errors[place] = error
    run.sequence_ids.append(send.sequence_id)
    run.highest_sequence_ids.append(send.highest_sequence_id)
    run.entries.append(entry)
    run.checksums.append(checksum_in(entry))
    return run


def _ids_of(producer_id: int) -> bytes:
    """Return the encoded id of a producer with its tag, and the tag of a sequence id."""
    if producer_id < 0x80:
        return bytes((8, producer_id, 0x10))
    return b"\x08" + varint(producer_id) + b"\x10"


def _ids_bytes(buffer: memoryview, at: int) -> int:
    """Return the size of the ids (`_ids_of`) of the SEND at `at`, if it is plain."""
    for size, byte in enumerate(buffer[at + _IDS_AT + 1 : at + _IDS_AT + 11], 3):
        if byte < 0x80:
            return size
    return 3


def _are_ids(ids: bytes) -> bool:
    """Return whether these bytes are a producer's id below 2^63 and the tag of a sequence id."""
    return ids[0] == 0x08 and _high_bits(ids[1:-1]) is not None and ids[-1] == 0x10


def _id_in(ids: bytes) -> int:
    high = _high_bits(ids[1:-1])
    assert high is not None, "they are ids"
    return high | ids[1] & 0x7F


def _is_of_another(buffer: memoryview, at: int, run: SendRun) -> bool:
    """Return whether the frame at `at` is a SEND of another producer, which ends the run. False:
    the caller must parse the frame. This function only compares ids. So the end of a run is cheap,
    even if each SEND ends a run because the producers alternate."""
    ids = _ids_of(run.producer_id)
    ids_at = at + _IDS_AT
    is_send = bytes(buffer[at + 8 : at + 11]) == _SEND and ids_at < len(buffer)
    return is_send and buffer[ids_at - 1] < 0x80 and buffer[ids_at : ids_at + len(ids)] != ids


def _high_bits(number: bytes) -> int | None:
    """Return the value of a varint without its lowest seven bits. None: `number` is not exactly one
    varint below 2^63."""
    if not number or len(number) > 9:  # below 2^63
        return None
    value = 0
    for place, byte in enumerate(number[1:], 1):
        if byte < 0x80 and place != len(number) - 1:
            return None
        value |= (byte & 0x7F) << 7 * place
    return value if number[-1] < 0x80 else None


def _plain_fields(metadata: bytes, number: bytes) -> tuple[bytes, bytes] | None:
    """Return the field of the producer's name with the tag after it, and the fields after the
    sequence id `number`. None: the metadata is not plain."""
    if not 2 <= len(metadata) <= PLAIN_METADATA_BYTES_MAX:
        return None
    name_end = 2 + metadata[1]
    rest_at = name_end + 1 + len(number)
    if metadata[name_end:rest_at] != b"\x10" + number:
        return None
    name, rest = metadata[:name_end], metadata[rest_at:]
    keyed = plain_key(rest)
    if keyed is None or plain_name(name) is None or plain_rest(keyed[0]) is None:
        return None
    return name + b"\x10", rest
