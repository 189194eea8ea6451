"""SENDs whose entries carry their producer's name and sequence ids, as those of real clients do."""

from __future__ import annotations

from magnetar.protos import pulsar_pb2 as pb
from magnetar.protos.entry import checksums_of, parse_entry
from magnetar.protos.message import (
    EntryHeader,
    OutgoingMessage,
    encode_batch,
    encode_message,
)
from magnetar.protos.sends import SendRun

TIME_MS = 1_700_000_000_000


def numbered(name: str, *numbers: int | tuple[int, ...], producer_id: int = 1) -> SendRun:
    """One message for each number, a batch for each tuple of numbers."""
    run = SendRun(producer_id)
    for place, number in enumerate(numbers):
        batch = (number,) if isinstance(number, int) else number
        header = EntryHeader(name, TIME_MS)
        messages = [OutgoingMessage(b"%d" % each, sequence_id=each) for each in batch]
        parts = (
            encode_message(messages[0], header)
            if len(messages) == 1
            else encode_batch(messages, header)
        )
        entry = b"".join(parts)
        if len(messages) > 1:
            run.views[place] = parse_entry(entry)
        run.sequence_ids.append(batch[0])
        run.highest_sequence_ids.append(batch[-1] if len(batch) > 1 else 0)
        run.entries.append(entry)
    run.checksums += checksums_of(run.entries)
    if not run.views:
        encoded = name.encode()
        # `read_sends` notes the name like this.
        run.plain_names = {b"\x0a" + bytes([len(encoded)]) + encoded}
    return run


def chunks(
    name: str, number: int, count: int, *, uuid: str = "", which: tuple[int, ...] = ()
) -> SendRun:
    """The chunks of one large message, all or those at `which`."""
    run = SendRun(1)
    for index in which or range(count):
        metadata = pb.MessageMetadata(
            producer_name=name,
            sequence_id=number,
            publish_time=TIME_MS,
            uuid=uuid or f"{name}-{number}",
            num_chunks_from_msg=count,
            total_chunk_msg_size=10 * count,
            chunk_id=index,
        ).SerializeToString()
        body = len(metadata).to_bytes(4, "big") + metadata + b"%d/%d" % (number, index)
        (checksum,) = checksums_of([bytes(6) + body])
        entry = b"\x0e\x01" + checksum.to_bytes(4, "big") + body
        run.views[len(run.entries)] = parse_entry(entry)
        run.sequence_ids.append(number)
        run.highest_sequence_ids.append(0)
        run.entries.append(entry)
        run.checksums.append(checksum)
    return run
