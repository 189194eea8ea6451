"""The cluster's id. The first bookie that starts makes the id. Each bookie compares the id with the
one in its data directory."""

import random

from magnetar.metadata import paths
from magnetar.metadata.codec import decode_cluster, encode_cluster
from magnetar.metadata.store import KEEP, MetadataStore, Verdict, update


async def cluster_id(store: MetadataStore, *, chance: random.Random, deadline: float) -> str:
    """The id of the cluster to which this store belongs: 32 hex digits. Makes the id if there is
    none. Raises the errors of `update`."""
    candidate = encode_cluster(f"{chance.getrandbits(128):032x}")

    def create_if_absent(stored: bytes | None) -> bytes | Verdict:
        return candidate if stored is None else KEEP

    stored = await update(store, paths.CLUSTER, create_if_absent, deadline=deadline)
    assert stored is not None, "an absent record is created, and no record is deleted"
    return decode_cluster(stored.value)
