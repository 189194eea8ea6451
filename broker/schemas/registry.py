"""The schemas of topics: their versions in the metadata store.

One record holds all versions of a topic's schema. Each change is a compare-and-set of the record,
so that two brokers never give one number to two versions. Both domains and all partitions of a
topic share the record, also when different brokers serve them.

The deletion of a schema leaves a mark in the record. Version numbers continue after the mark, and
messages that were written with the earlier versions can still be decoded. A forced deletion removes
the record itself. The deletion of a topic removes it, too, unless the other domain has a topic of
this name.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakValueDictionary

from magnetar.broker.errors import IncompatibleSchema, NoSchema, TooManySchemas
from magnetar.broker.schemas.compatibility import for_consumer, require_compatible, to_compare
from magnetar.broker.schemas.schema import Schema, of_version, parse
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import Contended
from magnetar.metadata.model import SchemaRecord, SchemaVersion
from magnetar.metadata.node import VALUE_BYTES_MAX
from magnetar.metadata.policies import SchemaCompatibility
from magnetar.metadata.store import DELETE, KEEP, Verdict, update
from magnetar.runtime.turns import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.metadata.policies import EffectivePolicies
    from magnetar.metadata.store import Change, MetadataStore, Versioned
    from magnetar.protos.names import TopicName
    from magnetar.runtime.clock import Clock

VERSIONS_MAX: Final = 1_000
"""The maximum number of versions of one topic, including deleted ones and the marks of
deletions."""

RECORD_BYTES_MAX: Final = VALUE_BYTES_MAX - 1_024
"""The maximum size of one topic's record, which holds all its versions."""

LOST_RACES_MAX: Final = 20
"""The maximum number of attempts to add a schema. An attempt fails when another version was added
in the meantime."""

INLINE_BYTES_MAX: Final = 4 << 10
"""Larger definitions are parsed in a thread. A definition of 4 KiB takes 1 ms, or 6 ms if an
attacker made it slow to parse. A definition of 128 KiB takes 40 ms, or up to 200 ms."""

COMPARED_INLINE_BYTES_MAX: Final = 1 << 10
"""Larger definitions are compared in a thread. An attacker can make the number of steps grow with
the square of the number of pairs of types."""

METADATA_TIMEOUT_S: Final = 10.0
"""Time limit of one change while the metadata store does not answer."""

RECORDS_MAX: Final = 16
"""The maximum number of records that are read or written at the same time; further calls wait. The
limit bounds the memory: a request of only 60 bytes loads a record of up to 1,000 KiB."""

ACCEPTED_MAX: Final = 10_000
"""The maximum number of accepted consumers' schemas that are remembered, some 150 bytes each. To
compare a schema with all versions of a topic can take a second, and many consumers of a topic can
connect at once."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """The rules of a topic's policies for its schema."""

    compatibility: SchemaCompatibility
    auto_update: bool  # clients may add versions
    validation: bool  # a producer needs a schema if the topic has one

    @classmethod
    def of(cls, policies: EffectivePolicies) -> SchemaRules:
        return cls(
            policies.schema_compatibility, policies.schema_auto_update, policies.schema_validation
        )


class SchemaRegistry:
    """All calls may raise MetadataError, besides the errors in their docstrings."""

    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._records = asyncio.Semaphore(RECORDS_MAX)
        self._turn = asyncio.Lock()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()  # keyed by `_digest`; LRU
        self._checks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def parsed(
        self, kind: int, data: bytes, name: str, properties: Mapping[str, str]
    ) -> Schema:
        """See `schema.parse`."""
        work = partial(parse, kind, data, name, properties)
        return await self._in_turn(work, inline=len(data) <= INLINE_BYTES_MAX)

    async def versions(self, topic: TopicName, *, fresh: bool = False) -> Sequence[SchemaVersion]:
        """The versions since the last deletion, oldest first. `fresh`: read the versions that other
        brokers added just now, too."""
        if fresh:
            await self._store.sync(_path(topic))
        return _live(await self._record(topic))

    async def get(self, topic: TopicName, version: int | None = None) -> SchemaVersion:
        """A version, also one from before a deletion. `version` None: the newest version since the
        last deletion. Raises NoSchema."""
        found = _version_in(await self._record(topic), version)
        if found is None:  # this broker's view may be older than the version
            await self._store.sync(_path(topic))
            found = _version_in(await self._record(topic), version)
        if found is None:
            raise NoSchema(str(topic.base), version)
        return found

    async def version_of(self, topic: TopicName, schema: Schema) -> int:
        """The number of the version that equals `schema`. Raises NoSchema."""
        found = _equal(await self.versions(topic), schema)
        if found is None:
            found = _equal(await self.versions(topic, fresh=True), schema)
        if found is None:
            raise NoSchema(str(topic.base))
        return found

    async def put(
        self, topic: TopicName, schema: Schema, compatibility: SchemaCompatibility
    ) -> int:
        """Add a version with this schema, unless an equal version exists. Returns the number of the
        version.

        Raises IncompatibleSchema, TooManySchemas.
        """
        for attempt in range(LOST_RACES_MAX):
            if attempt:
                await self._store.sync(_path(topic))
            record = await self._record(topic)
            found = _equal(_live(record), schema)
            if found is not None:
                return found
            try:
                await self._require_compatible(_live(record), schema, compatibility)
            except IncompatibleSchema:
                if attempt:
                    raise
                continue  # the view may be old: read the record again
            added = await self._add(topic, record, schema)
            if added is not None:
                return added
        raise Contended(_path(topic), LOST_RACES_MAX)

    async def check(
        self, topic: TopicName, schema: Schema, compatibility: SchemaCompatibility
    ) -> None:
        """Raise IncompatibleSchema if `put` would refuse the schema."""
        versions = await self.versions(topic, fresh=True)
        if _equal(versions, schema) is None:
            await self._require_compatible(versions, schema, compatibility)

    async def check_consumer(
        self,
        versions: Sequence[SchemaVersion],
        schema: Schema,
        compatibility: SchemaCompatibility,
    ) -> None:
        """Raise IncompatibleSchema if the strategy does not allow a consumer with this schema. The
        consumer must be able to read the newest version, or all `versions` if the strategy is
        BACKWARD_TRANSITIVE or FULL_TRANSITIVE. With FULL_TRANSITIVE, each version must also be able
        to read what the consumer's schema writes."""
        strategy = for_consumer(compatibility)
        others = [
            it for it in to_compare(versions, strategy) if it.fingerprint != schema.fingerprint
        ]
        if not others:
            return
        key = _digest(others, schema, strategy)
        # Identical calls compare one after the other. After the first acceptance, the others need
        # no comparison.
        lock = self._checks.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._accepted:
                await self._require_compatible(others, schema, strategy)
                self._accepted[key] = None
            self._accepted.move_to_end(key)
            if len(self._accepted) > ACCEPTED_MAX:
                self._accepted.popitem(last=False)

    async def delete(self, topic: TopicName, *, force: bool = False) -> int:
        """Add a mark to the record: the schema is deleted. Returns the version number of the mark.
        Raises NoSchema if there is no version since the last deletion.

        `force`: delete the record with all versions and marks, permanently. Returns the number of
        the record's last version or mark. Raises NoSchema if there is no record.
        """
        await self._store.sync(_path(topic))
        seen = (await self._record(topic)).versions
        if not (seen if force else _live(SchemaRecord(seen))):
            raise NoSchema(str(topic.base))
        newest = seen[-1].version
        if force:
            # `update` repeats this change after a lost reply. If the first attempt deleted the
            # record, producers may have made a new record since. The new record must stay, so
            # delete only a record that begins with the versions that were seen.
            await self._update(
                topic,
                lambda value: DELETE if _decoded(value).versions[: len(seen)] == seen else KEEP,
            )
            return newest
        mark = SchemaVersion(newest + 1, deleted=True, created_ms=self._clock.now_ms())

        def delete(value: bytes | None) -> bytes | Verdict:
            record = _decoded(value)
            if not _live(record) or mark in record.versions:
                return KEEP
            if record.versions[-1].version != newest:
                raise Contended(_path(topic), 1)
            return codec.encode_schema(replace(record, versions=(*record.versions, mark)))

        await self._update(topic, delete)
        return mark.version

    # ---- mechanics -------------------------------------------------------------------------------

    async def _add(self, topic: TopicName, record: SchemaRecord, schema: Schema) -> int | None:
        """Add a version to the record. Returns its number; None: another process has changed the
        versions meanwhile. Raises TooManySchemas."""
        number = record.versions[-1].version + 1 if record.versions else 0
        added = SchemaVersion(
            number,
            type=int(schema.type),
            name=schema.name,
            data=schema.data,
            properties=schema.properties,
            created_ms=self._clock.now_ms(),
            fingerprint=schema.fingerprint,
        )
        if len(record.versions) >= VERSIONS_MAX:
            raise TooManySchemas(str(topic.base), f"it has {VERSIONS_MAX}")
        value = codec.encode_schema(replace(record, versions=(*record.versions, added)))
        if len(value) > RECORD_BYTES_MAX:
            why = f"all of them have {len(value)} bytes; the limit is {RECORD_BYTES_MAX}"
            raise TooManySchemas(str(topic.base), why)
        expected = record.versions

        def add(stored: bytes | None) -> bytes | Verdict:
            return value if _decoded(stored).versions == expected else KEEP

        stored = await self._update(topic, add)
        return number if stored is not None and stored.value == value else None

    async def _record(self, topic: TopicName) -> SchemaRecord:
        async with self._records:
            found = await self._store.get(_path(topic))
            return _decoded(None if found is None else found.value)

    async def _update(self, topic: TopicName, change: Change) -> Versioned | None:
        async with self._records:
            deadline = asyncio.get_running_loop().time() + METADATA_TIMEOUT_S
            return await update(self._store, _path(topic), change, deadline=deadline)

    async def _require_compatible(
        self,
        versions: Sequence[SchemaVersion],
        schema: Schema,
        compatibility: SchemaCompatibility,
    ) -> None:
        for each in to_compare(versions, compatibility):
            earlier = of_version(each)
            size = max(len(schema.data), len(earlier.data))
            work = partial(require_compatible, schema, earlier, compatibility)
            await self._in_turn(work, inline=size <= COMPARED_INLINE_BYTES_MAX)

    async def _in_turn(self, work: Callable[[], T], *, inline: bool) -> T:
        """Run `work`, which parses or compares definitions; `inline` False: in a thread. Calls run
        one at a time, in FIFO order, and at most one in each iteration of the event loop. A burst
        of requests therefore neither blocks the loop nor starts many threads that compete with it.
        """
        if not inline:
            return await run_in_thread(self._turn, work)
        async with self._turn:
            found = work()
            await asyncio.sleep(0)
            return found


async def admit_producer(
    registry: SchemaRegistry, topic: TopicName, schema: Schema | None, rules: SchemaRules
) -> int | None:
    """The number of the version with which a producer writes. `schema` None: the producer has no
    schema, and the answer is None.

    Raises IncompatibleSchema, TooManySchemas, MetadataError.
    """
    if schema is None:
        if rules.validation and await registry.versions(topic):
            raise IncompatibleSchema(
                "Producers cannot connect or send message without a schema to topics with a schema"
                " when SchemaValidationEnforced is enabled"
            )
        return None
    if rules.auto_update:
        return await registry.put(topic, schema, rules.compatibility)
    try:
        return await registry.version_of(topic, schema)
    except NoSchema:
        raise IncompatibleSchema("Schema not found and schema auto updating is disabled.") from None


async def admit_consumer(
    registry: SchemaRegistry,
    topic: TopicName,
    schema: Schema,
    rules: SchemaRules,
    *,
    in_use: bool,
) -> None:
    """Check that a consumer with this schema can read the topic. If the topic has no schema and is
    not `in_use`, the schema becomes its first version, as in Pulsar. `in_use`: the topic has
    messages, a producer, or a consumer that does not use AUTO_CONSUME.

    Raises IncompatibleSchema, TooManySchemas, MetadataError.
    """
    try:
        await _admit_consumer(registry, topic, schema, rules, in_use=in_use, fresh=False)
    except IncompatibleSchema:  # the view may be old, and a client does not retry after this error
        await _admit_consumer(registry, topic, schema, rules, in_use=in_use, fresh=True)


async def _admit_consumer(
    registry: SchemaRegistry,
    topic: TopicName,
    schema: Schema,
    rules: SchemaRules,
    *,
    in_use: bool,
    fresh: bool,
) -> None:
    versions = await registry.versions(topic, fresh=fresh)
    if versions:
        await registry.check_consumer(versions, schema, rules.compatibility)
    elif not in_use:
        await admit_producer(registry, topic, schema, rules)
    elif rules.compatibility is not SchemaCompatibility.ALWAYS_COMPATIBLE:
        raise IncompatibleSchema(
            "Failed to add schema to an active topic with empty(BYTES) schema: new schema type"
            f" {schema.type.name}"
        )


def _live(record: SchemaRecord) -> Sequence[SchemaVersion]:
    """The versions since the last deletion."""
    last = max((place for place, it in enumerate(record.versions) if it.deleted), default=-1)
    return record.versions[last + 1 :]


def _version_in(record: SchemaRecord, version: int | None) -> SchemaVersion | None:
    if version is None:
        live = _live(record)
        return live[-1] if live else None
    return next((it for it in record.versions if it.version == version and not it.deleted), None)


def _equal(versions: Sequence[SchemaVersion], schema: Schema) -> int | None:
    return next((it.version for it in versions if it.fingerprint == schema.fingerprint), None)


def _digest(
    versions: Sequence[SchemaVersion], schema: Schema, strategy: SchemaCompatibility
) -> bytes:
    """A hash of all that decides a comparison. The fingerprints are not enough: they leave out
    aliases."""
    found = hashlib.sha256(strategy.name.encode())
    for it in (schema, *map(of_version, versions)):
        properties = sorted(it.properties.items())
        found.update(f" {it.type.name} {properties} {len(it.data)} ".encode())
        found.update(it.data)
    return found.digest()


def _decoded(value: bytes | None) -> SchemaRecord:
    return SchemaRecord() if value is None else codec.decode_schema(value)


def _path(topic: TopicName) -> str:
    base = topic.base
    return paths.schema(base.tenant, base.namespace, base.topic)
