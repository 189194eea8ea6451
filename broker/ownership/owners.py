"""Bundle ownership: one record per bundle, and takeover from dead brokers.

The record {owner, incarnation, epoch} is persistent. Brokers change it by compare-and-set. When a
client asks a broker for a bundle whose owner is dead, the asked broker may write the next record.
If several brokers write at once, one of them succeeds.

Ownership only keeps brokers from fencing each other. The topic record's epoch and the fencing at
the bookies ensure that two brokers never both append. So a wrong decision of this module loses no
data.

An owner counts as dead in each of these cases: its registration is gone; the registration belongs
to another incarnation; its port refuses connections; its port is silent, and so are its beats to
the bookies (liveness.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.errors import BundleUnavailable
from magnetar.broker.ownership.census import Census, owner_of
from magnetar.metadata import codec, paths
from magnetar.metadata.errors import BadVersion, MetadataError, OutcomeUnknown
from magnetar.metadata.model import BrokerRegistration, Ownership
from magnetar.metadata.store import ABSENT, SessionState
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from magnetar.broker.ownership.brokers import BrokerDirectory
    from magnetar.broker.ownership.bundle import Bundle
    from magnetar.broker.ownership.census import Owner
    from magnetar.broker.ownership.liveness import Liveness
    from magnetar.metadata.model import BrokerId
    from magnetar.metadata.store import MetadataStore, Versioned

RACES_MAX: Final = 10  # rounds of one lookup; after the last one, the client must retry

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Located:
    """The broker to which a client goes for a bundle. `serves` False: the bundle is free, and the
    client asks this broker with `authoritative` to take it."""

    broker: BrokerRegistration
    serves: bool


class Owners:
    """This broker's view of the ownership records, and the bundles that it holds itself."""

    def __init__(
        self,
        store: MetadataStore,
        brokers: BrokerDirectory,
        me: BrokerRegistration,
        *,
        liveness: Liveness,
        on_lost: Callable[[Bundle], Coroutine[Any, Any, None]],
    ) -> None:
        self.census = Census()  # may be a minute old
        self._store = store
        self._brokers = brokers
        self._me = me
        self._liveness = liveness
        self._on_lost = on_lost
        self._held: dict[Bundle, Callable[[], None]] = {}  # bundle -> ends the watch on its record
        self._releasing: dict[Bundle, BrokerRegistration | None] = {}  # bundle -> its next owner
        self._released = asyncio.Event()  # set when `_releasing` becomes empty
        self._suspects: set[Bundle] = set()  # held bundles whose record `run` reads again
        self._suspected = asyncio.Event()
        self._settled = asyncio.Event()  # `run` sets it when no suspects are left
        # Held bundles of which a log has failed since `run` last read the bundle's record.
        self._doubted: set[Bundle] = set()
        # The decisions of `locate` under way: after a failover, thousands of clients ask for topics
        # of one bundle. The outcome None: the call that decided was cancelled.
        self._deciding: dict[tuple[Bundle, bool], asyncio.Future[Located | Exception | None]] = {}
        self._stopping = False

    @property
    def held(self) -> frozenset[Bundle]:
        """The bundles that this broker serves."""
        return frozenset(self._held.keys() - self._releasing.keys())

    def holds(self, bundle: Bundle) -> bool:
        """Return whether this broker, as far as it knows, may open the bundle's topics."""
        return bundle in self._held and bundle not in self._releasing

    async def locate(self, bundle: Bundle, *, authoritative: bool) -> Located:
        """Return the broker that serves `bundle`. If the bundle has no live owner, this broker
        chooses the next owner. It takes the bundle if it chooses itself.

        `authoritative`: another broker has chosen this one, so this broker does not choose again.
        Raises BundleUnavailable while the bundle is being unloaded or no broker can take it. Raises
        MetadataError.
        """
        if bundle in self._releasing:
            raise BundleUnavailable(str(bundle), "it is being unloaded")
        if bundle in self._held:
            self._require_known(bundle)
            return Located(self._me, serves=True)
        key = bundle, authoritative
        before = self._deciding.get(key)
        while (deciding := self._deciding.get(key)) is not None:
            await asyncio.wait({deciding})
            if self.holds(bundle):
                return Located(self._me, serves=True)
            outcome = deciding.result()
            if deciding is before or outcome is None:  # begun before this call, or cancelled
                continue
            if isinstance(outcome, Exception):
                raise outcome.with_traceback(None)
            return outcome
        return await self._decide_for_all(bundle, authoritative=authoritative)

    async def owner_of(self, bundle: Bundle) -> BrokerRegistration | None:
        """Return the registered broker that owns the bundle. None: the bundle has no owner, or its
        owner is not registered. Raises MetadataError."""
        stored = await self._store.get(_path(bundle))
        if stored is None:
            return None
        record = codec.decode_ownership(stored.value)
        owner = await self._brokers.registration(record.owner)
        return owner if owner is not None and owner.incarnation == record.incarnation else None

    async def run(self) -> None:
        """Give up the bundles that another broker has taken. Supervised, until cancelled."""
        self._suspected.set()  # a round that failed may have left suspects
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            failure: MetadataError | None = None
            # An unload may take seconds. Meanwhile this broker reads the records of the other
            # suspects: it would open topics of a lost bundle again and so fence their new owner.
            async with asyncio.TaskGroup() as unloads:
                for bundle in sorted(self._suspects, key=str):
                    try:
                        is_lost = await self._has_lost(bundle)
                    except MetadataError as error:
                        failure = error
                        break
                    if is_lost:
                        self._forget(bundle)
                        unloads.create_task(self._on_lost(bundle))
            if failure is not None:
                raise failure
            if not self._suspects:
                self._settled.set()

    async def _has_lost(self, bundle: Bundle) -> bool:
        """Read the record of a suspect. Returns True if this broker holds the bundle, and another
        broker has taken it, or its namespace was deleted. Raises MetadataError; the bundle is then
        a suspect again."""
        self._suspects.discard(bundle)  # a change during the read makes it a suspect again
        try:
            stored = await self._store.get(_path(bundle))
        except BaseException:
            self._suspects.add(bundle)
            raise
        if bundle not in self._suspects:
            self._doubted.discard(bundle)
        if not self.holds(bundle) or self._is_mine(stored):
            return False
        if stored is None:
            log.info("the record of a bundle was deleted", bundle=str(bundle))
        else:
            log.warning("another broker has taken a bundle", bundle=str(bundle))
        return True

    async def verify(self) -> None:
        """Read the records of all held bundles again. Returns when `run` has given up the bundles
        that another broker has taken. Raises MetadataError."""
        await self._store.sync(paths.CLUSTER)
        self._settled.clear()
        self._suspects.update(self._held)
        self._suspected.set()
        await self._settled.wait()

    def doubt(self, bundle: Bundle) -> None:
        """A log of this bundle has failed, so another broker may own the bundle. `run` reads the
        bundle's record again."""
        if bundle in self._held:
            self._doubted.add(bundle)
            self._suspect(bundle)

    def begin_stop(self) -> None:
        """Take no more bundles. The caller then hands over the held bundles by `release`."""
        self._stopping = True

    def next_owner_of(self, bundle: Bundle) -> BrokerRegistration | None:
        """Return the next owner of a bundle that is being released. None: the bundle is not being
        released, or has no next owner (yet)."""
        return self._releasing.get(bundle)

    def recount(self, owners: Mapping[Bundle, Owner]) -> None:
        """Replace the census by `owners`, the owners of all bundles as just read. A bundle that
        this broker holds counts for this broker."""
        self.census.replace(owners)
        for bundle in self.held:
            self.census.note(bundle, owner_of(self._me))

    async def wait_released(self) -> None:
        """Wait until no bundle is being released."""
        while self._releasing:
            self._released.clear()
            await self._released.wait()

    async def release(
        self,
        bundle: Bundle,
        unload: Callable[[Bundle], Awaitable[None]],
        *,
        to: BrokerRegistration | None = None,
    ) -> bool:
        """Hand a bundle over: choose its next owner, unload the bundle, and write the next owner
        into the record. Returns False if the record was not written or the reply was lost.

        `to`: the next owner; None: the live broker with the fewest bundles. If no next owner is
        found, the bundle becomes free. If the metadata store fails, the record stays unchanged;
        another broker takes the bundle when this broker is gone.
        """
        if not self.holds(bundle):
            return False
        self._releasing[bundle] = None
        try:
            if to is not None:
                self.census.note(bundle, owner_of(to))  # so that the next move counts this one
            next_owner = to or await self._choose_next_owner(bundle)
            self._releasing[bundle] = next_owner
            await unload(bundle)
            return await self._give(bundle, next_owner)
        finally:
            del self._releasing[bundle]
            if not self._releasing:
                self._released.set()
            self._forget(bundle)

    def _require_known(self, bundle: Bundle) -> None:
        """Raise BundleUnavailable if a log of the bundle has failed and the metadata session is not
        connected. Another broker has then probably replaced this one. If only the session is not
        connected, this broker still serves its bundles."""
        state = self._store.session_state
        if bundle in self._doubted and state is not SessionState.CONNECTED:
            raise BundleUnavailable(
                str(bundle), f"its log failed and the metadata session is {state.value}"
            )

    def _require_running(self, bundle: Bundle) -> None:
        if self._stopping:
            raise BundleUnavailable(str(bundle), "this broker is stopping")

    async def _decide_for_all(self, bundle: Bundle, *, authoritative: bool) -> Located:
        """Decide for this call of `locate`, and for the calls that come meanwhile."""
        key = bundle, authoritative
        self._deciding[key] = deciding = asyncio.get_running_loop().create_future()
        outcome: Located | Exception | None = None
        try:
            for _ in range(RACES_MAX):
                outcome = await self._decide(bundle, authoritative=authoritative)
                if outcome is not None:
                    return outcome
            raise BundleUnavailable(str(bundle), "its owner keeps changing")
        except Exception as error:
            outcome = error
            raise
        finally:
            del self._deciding[key]
            deciding.set_result(outcome)

    async def _decide(self, bundle: Bundle, *, authoritative: bool) -> Located | None:
        """One round of `locate`. None: the record changed meanwhile, so the caller tries again."""
        stored = await self._store.get(_path(bundle))
        record = codec.decode_ownership(stored.value) if stored is not None else None
        if record is not None:
            if self._is_mine(stored):  # handed over to this broker, or a reply was lost
                self._require_running(bundle)
                return self._hold(bundle)
            owner = await self._brokers.registration(record.owner)
            if owner is not None and owner.incarnation != record.incarnation:
                owner = None  # the broker has restarted since it took the bundle
            if owner is not None and not await self._liveness.is_gone(owner):
                self.census.note(bundle, owner_of(owner))
                return Located(owner, serves=True)
        if not authoritative:
            chosen = await self._choose(bundle)
            if chosen.broker != self._me.broker:
                return Located(chosen, serves=False)
        return await self._take(bundle, stored, record)

    async def _choose(self, bundle: Bundle) -> BrokerRegistration:
        """Return the broker with the fewest bundles, among the brokers whose ports answer."""
        await self._brokers.refresh()
        live = {**self._brokers.live}
        if not self._stopping:
            live[self._me.broker] = self._me
        chosen = await self._choose_among(bundle, live)
        if chosen is None:
            raise BundleUnavailable(str(bundle), "no broker can take it")
        return chosen

    async def _choose_next_owner(self, bundle: Bundle) -> BrokerRegistration | None:
        """Return the broker that gets the bundle next. None: no other broker answers, or the
        metadata store fails."""
        try:
            await self._brokers.refresh()
        except MetadataError as error:
            log.warning("no next owner was found", bundle=str(bundle), error=str(error))
            return None
        others = {id_: it for id_, it in self._brokers.live.items() if id_ != self._me.broker}
        return await self._choose_among(bundle, others)

    async def _choose_among(
        self, bundle: Bundle, brokers: Mapping[BrokerId, BrokerRegistration]
    ) -> BrokerRegistration | None:
        """Return the first broker, in the census's order, whose port answers. None: no port
        answers. The census counts a candidate before the port answers, so that concurrent choices
        take it into account."""
        left = dict(brokers)
        while left:
            chosen = left.pop(self.census.order(bundle, left)[0])
            self.census.note(bundle, owner_of(chosen))
            if chosen == self._me or await self._liveness.responds(chosen):
                return chosen
        self.census.note(bundle, None)
        return None

    async def _take(
        self, bundle: Bundle, stored: Versioned | None, record: Ownership | None
    ) -> Located | None:
        self._require_running(bundle)
        if self._store.session_state is not SessionState.CONNECTED:
            raise BundleUnavailable(
                str(bundle), f"the metadata session is {self._store.session_state.value}"
            )
        epoch = record.epoch + 1 if record is not None else 0
        mine = Ownership(self._me.broker, self._me.incarnation, epoch)
        if record is not None:
            mine = replace(mine, unknown=record.unknown)
        expected = stored.version if stored is not None else ABSENT
        try:
            await self._store.put(_path(bundle), codec.encode_ownership(mine), expected=expected)
        except (BadVersion, OutcomeUnknown):
            return None
        if self._stopping:  # the stop began meanwhile, and does not release this bundle
            await self._give(bundle, None)
            self._require_running(bundle)
        log.info("took a bundle", bundle=str(bundle), epoch=epoch)
        return self._hold(bundle)

    async def _give(self, bundle: Bundle, next_owner: BrokerRegistration | None) -> bool:
        try:
            stored = await self._store.get(_path(bundle))
            if stored is None or not self._is_mine(stored):
                return False
            if next_owner is None:
                await self._store.delete(_path(bundle), expected=stored.version)
                return True
            ours = codec.decode_ownership(stored.value)
            record = replace(
                ours,
                owner=next_owner.broker,
                incarnation=next_owner.incarnation,
                epoch=ours.epoch + 1,
            )
            await self._store.put(
                _path(bundle), codec.encode_ownership(record), expected=stored.version
            )
        except MetadataError as error:
            # Another broker has taken the bundle, or will take it when this broker is gone.
            log.info("a bundle was not handed over", bundle=str(bundle), error=str(error))
            return False
        return True

    def _is_mine(self, stored: Versioned | None) -> bool:
        if stored is None:
            return False
        record = codec.decode_ownership(stored.value)
        return record.owner == self._me.broker and record.incarnation == self._me.incarnation

    def _hold(self, bundle: Bundle) -> Located:
        self.census.note(bundle, owner_of(self._me))
        if bundle not in self._held:
            self._held[bundle] = self._store.watch(_path(bundle), lambda: self._suspect(bundle))
            self._suspect(bundle)  # the record may have changed between the read and the watch
        return Located(self._me, serves=True)

    def _suspect(self, bundle: Bundle) -> None:
        self._suspects.add(bundle)
        self._suspected.set()

    def _forget(self, bundle: Bundle) -> None:
        self._doubted.discard(bundle)
        unwatch = self._held.pop(bundle, None)
        if unwatch is not None:
            unwatch()


def _path(bundle: Bundle) -> str:
    return paths.ownership(bundle.tenant, bundle.namespace, bundle.range)
