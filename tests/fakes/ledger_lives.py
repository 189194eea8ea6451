"""Helpers for the tests of the ledgers' shells: bookies and their client, appends and reads."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from support import wait_until

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import MetadataStore

QUICK = LedgerConfig(
    add_timeout_s=0.3,
    quorum_timeout_s=1.5,
    read_timeout_s=0.3,
    speculative_read_s=0.05,
    connect_timeout_s=0.3,
    metadata_timeout_s=2.0,
    health_half_life_s=5.0,
)


async def create(ledgers: Ledgers) -> LedgerAppender:
    return await ledgers.create(newer_than=LedgerId(-1), custom={})


def payload(number: int) -> bytes:
    return b"payload %d" % number


def append(appender: LedgerAppender, count: int = 1) -> None:
    for _ in range(count):
        data = payload(appender.appended + 1)
        appender.append_nowait([[data[:3], memoryview(data)[3:]]])


async def confirmed(appender: LedgerAppender) -> None:
    """Wait until all appended entries are confirmed."""
    await wait_until(lambda: appender.confirmed == appender.appended or appender.failure)
    if appender.failure is not None:
        raise appender.failure


async def read_all(ledgers: Ledgers, ledger: LedgerId) -> list[bytes]:
    metadata = await ledgers.metadata(ledger)
    assert metadata is not None
    assert metadata.last_entry is not None
    reader, found = ledgers.reader(metadata), list[bytes]()
    while len(found) <= metadata.last_entry:
        entries = await reader.read(len(found), metadata.last_entry, bytes_max=50)
        assert [e.entry for e in entries] == list(range(len(found), len(found) + len(entries)))
        found += [bytes(entry.payload) for entry in entries]
    return found


@asynccontextmanager
async def ledger_cluster(
    bookies: int,
    config: LedgerConfig = QUICK,
    *,
    directory_of: Callable[[MetadataStore], BookieRegistry] = BookieRegistry,
) -> AsyncIterator[tuple[BookieCluster, Ledgers]]:
    async with (
        bookie_cluster(bookies) as nodes,
        nodes.process(config, directory_of=directory_of) as ledgers,
    ):
        yield nodes, ledgers


def seated(nodes: BookieCluster, appender: LedgerAppender) -> list[FakeBookie]:
    return [nodes.bookie(member) for member in appender.metadata.last_segment.members]


def spare(nodes: BookieCluster, appender: LedgerAppender) -> FakeBookie:
    return next(each for each in nodes.bookies if each not in seated(nodes, appender))
