"""A single add, as a writer encodes it: a run of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.protos.envelope import encode_adds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.runtime.frames import Buffer


def encode_add(
    *,
    ledger: int,
    entry: int,
    confirmed: int,
    length: int,
    payload: Sequence[Buffer],
    master_key: int,
    flags: int = 0,
) -> tuple[bytes, bytes]:
    """`length`: payload bytes of the ledger's entries 0 to this one."""
    [add] = encode_adds(
        ledger=ledger,
        first_entry=entry,
        confirmed=confirmed,
        length=length - sum(map(len, payload)),
        payloads=[payload],
        master_key=master_key,
        flags=flags,
    )
    return add
