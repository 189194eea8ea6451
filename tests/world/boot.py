"""The start of a bookie on its simulated disk: the steps of `magnetar.bookie.storage.directory`,
with the real rules (`plan_start`). Each step is durable before the next one begins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from magnetar.bookie.errors import DirectoryRolledBack
from magnetar.bookie.storage.format import DirectoryState
from magnetar.bookie.storage.identity import Found, Wanted, plan_start, replace_incarnation
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_cookie, encode_bookie_cookie
from magnetar.metadata.errors import Contended, MetadataError
from magnetar.metadata.model import BookieCookie, BookieId
from magnetar.metadata.store import KEEP, update

if TYPE_CHECKING:
    from random import Random

    from world.nodes import BookieNode

    from magnetar.bookie.storage.format import Identity
    from magnetar.metadata.store import MetadataStore, Verdict

RETRY_S = 0.2  # the pause before the supervisor starts the process again
UPDATE_S = 3.0
CLUSTER = "c1" * 16


async def boot(node: BookieNode, store: MetadataStore, random: Random) -> Identity:
    """Return the identity under which the bookie serves.

    Tries again while the metadata store cannot be reached, or while a copy of the directory may be
    in use. Raises StartRefused."""
    while True:
        try:
            return await _enter(node, store, random)
        except (MetadataError, DirectoryRolledBack) as error:
            node.world.trace.note(node.name, "cannot start yet", type(error).__name__)
            await asyncio.sleep(RETRY_S)


async def _enter(node: BookieNode, store: MetadataStore, random: Random) -> Identity:
    disk, path = node.disk, paths.bookie_cookie(BookieId(node.name))
    await store.sync(path)
    stored = await store.get(path)
    cookie = None if stored is None else decode_bookie_cookie(stored.value)
    wanted = Wanted(
        bookie=node.name,
        cluster=CLUSTER,
        fresh_incarnation=f"{random.getrandbits(128):032x}",
        fresh_start=f"{random.getrandbits(128):032x}",
        new_incarnation=node.may_format_anew,
    )
    found = Found(disk.identity, () if disk.image is None else ("store",))
    start = plan_start(Path(node.name), found, cookie, wanted)
    identity = start.identity
    if start.rolled_back is not None:
        await _check_alone(node, store, start.rolled_back)
        node.world.trace.note(node.name, "finds an older image of its disk")
    elif identity.state is DirectoryState.READY and not disk.whole:
        assert cookie is not None
        node.world.trace.note(node.name, "finds its store damaged")
        identity = replace_incarnation(identity, cookie, wanted)
    disk.identity = identity
    await _write_cookie(node, store, identity, cookie)
    if identity.state is DirectoryState.REPLACING:
        assert identity.former is not None
        disk.set_aside(identity.former)
        identity = disk.identity = replace(identity, state=DirectoryState.FORMATTING)
    if identity.state is DirectoryState.FORMATTING:
        disk.format()
        identity = disk.identity = replace(identity, state=DirectoryState.READY)
    node.may_format_anew = False
    return identity


async def _check_alone(
    node: BookieNode, store: MetadataStore, rolled_back: DirectoryRolledBack
) -> None:
    path = paths.bookie_available(BookieId(node.name))
    await store.sync(path)
    if await store.get(path) is not None:
        raise rolled_back


async def _write_cookie(
    node: BookieNode, store: MetadataStore, identity: Identity, known: BookieCookie | None
) -> None:
    cookie = BookieCookie(
        bookie=BookieId(node.name),
        incarnation=identity.incarnation,
        boot_epoch=identity.boot_epoch,
        cluster=CLUSTER,
        start=identity.start,
        unknown=b"" if known is None else known.unknown,
    )

    path = paths.bookie_cookie(BookieId(node.name))

    def change(value: bytes | None) -> bytes | Verdict:
        stored = None if value is None else decode_bookie_cookie(value)
        if stored == cookie:
            return KEEP
        if stored != known:
            raise Contended(path, 1)  # a write of an earlier start arrives now
        return encode_bookie_cookie(cookie)

    await update(store, path, change, deadline=node.world.loop.time() + UPDATE_S)
