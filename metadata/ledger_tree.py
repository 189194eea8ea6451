"""The ids of ledgers that have a node below one folder, streamed in ascending order.

A folder of leaves has 10,000 names at most (`paths.ledger`), and only one such folder is in memory
at a time. The walk returns each ledger that exists during the whole walk. It may return or miss a
ledger that is created or deleted meanwhile. A folder that is deleted during the walk counts as
empty.
"""

from collections.abc import AsyncIterator

from magnetar.metadata.model import LedgerId
from magnetar.metadata.store import MetadataStore

_LEVELS_BELOW_ROOT = 3


async def ledger_ids(
    store: MetadataStore, root: str, *, after: int = -1
) -> AsyncIterator[LedgerId]:
    """The ids greater than `after`. Raises the errors of the store."""
    async for ledger in _below(store, root, _LEVELS_BELOW_ROOT, 10**12, 0, after):
        yield ledger


async def _below(
    store: MetadataStore, path: str, levels: int, unit: int, base: int, after: int
) -> AsyncIterator[LedgerId]:
    """`base` is the least id below `path`; each child of `path` spans `unit` ids."""
    names = sorted((int(name), name) for name in await store.children(path) if name.isdecimal())
    for number, name in names:
        if levels == 0:
            if number > after:
                yield LedgerId(number)
        elif base + (number + 1) * unit - 1 > after:
            child = _below(
                store, f"{path}/{name}", levels - 1, unit // 10**4, base + number * unit, after
            )
            async for ledger in child:
                yield ledger
