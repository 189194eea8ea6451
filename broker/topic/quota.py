"""The backlog quotas of a topic, by size and by age, and the actions when a quota is exceeded.

The backlog of the topic is that of the slowest durable subscription. Non-durable subscriptions keep
no messages and do not count. The size is estimated from the sizes of the ledgers. The age is that
of the oldest entry in the backlog.

- producer_request_hold and producer_exception: the topic disconnects producers, and refuses them
  until the backlog is below its quota. With producer_request_hold, their clients wait; with
  producer_exception, their sends fail.
- consumer_backlog_eviction: the topic acknowledges the oldest entries for the durable subscriptions
  that have not acknowledged them. The backlog then has at most EVICTION_TARGET of the size limit,
  or no entry older than the age limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from magnetar.broker.cursor.backlog import bytes_after, position_with
from magnetar.broker.errors import (
    BacklogQuotaHeld,
    BacklogQuotaRefused,
    ReadFailed,
    SubscriptionFenced,
)
from magnetar.metadata.policies import BacklogAction
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position
    from magnetar.broker.policies.source import PolicySource
    from magnetar.broker.topic.subscription import Subscription
    from magnetar.metadata.policies import BacklogQuota
    from magnetar.runtime.clock import Clock

EVICTION_TARGET: Final = 0.9
"""The share of the size limit that remains after an eviction: Pulsar's figure. If the topic evicted
only down to the limit, it would evict again at each check."""

log = get_logger(__name__)

QuotaError = BacklogQuotaHeld | BacklogQuotaRefused


class BacklogQuotas:
    __slots__ = ("_clock", "_exceeded", "_log", "_policies", "_subscriptions", "evicted")

    def __init__(
        self,
        topic_log: Log,
        policies: PolicySource,
        clock: Clock,
        subscriptions: Callable[[], Iterable[Subscription]],
        exceeded: Callable[[], None],
    ) -> None:
        """`exceeded` disconnects the producers."""
        self.evicted = 0  # the number of evicted entries since the topic was opened here
        self._log = topic_log
        self._policies = policies
        self._clock = clock
        self._subscriptions = subscriptions
        self._exceeded = exceeded

    async def check(self) -> None:
        """Evict entries or disconnect the producers if a quota is exceeded. Raises LogError,
        PoliciesUnavailable."""
        error = await self._find()
        if error is not None:
            self._exceeded()

    async def require(self) -> None:
        """Raise BacklogQuotaHeld or BacklogQuotaRefused if the quotas refuse producers. Evicts
        entries like `check`. Raises LogError, PoliciesUnavailable."""
        error = await self._find()
        if error is not None:
            raise error

    async def _find(self) -> QuotaError | None:
        """Evict entries if the policies ask for it. Returns the error for producers. None: the
        quotas admit them."""
        policies = self._policies.effective
        by_size, by_age = policies.backlog_quota_bytes, policies.backlog_quota_age_s
        if by_size.limit < 0 and by_age.limit < 0:
            return None
        mark = self._slowest()
        if mark is None:
            return None
        error: QuotaError | None = None
        if by_size.limit >= 0:
            size = bytes_after(self._log, mark)
            if size >= by_size.limit and size > 0:
                if by_size.action is BacklogAction.EVICT_BACKLOG:
                    target = int(by_size.limit * EVICTION_TARGET)
                    await self._evict(position_with(self._log, target))
                else:
                    error = self._error(by_size, f"its backlog has {size} bytes", "bytes")
        if error is None and by_age.limit >= 0:
            try:
                error = await self._find_by_age(by_age)
            except ReadFailed as failure:  # entries that cannot be read must not stop producers
                topic, why = str(self._log.name), str(failure)
                log.warning("the age of a backlog is not known", topic=topic, error=why)
        return error

    async def _find_by_age(self, quota: BacklogQuota) -> QuotaError | None:
        """Do the part of `_find` for the age of the backlog. Raises ReadFailed, LogError."""
        mark = self._slowest()  # read it here: an eviction by size has just moved it
        age_s = 0.0 if mark is None else await self._age_s(mark)
        if age_s <= quota.limit:
            return None
        if quota.action is not BacklogAction.EVICT_BACKLOG:
            return self._error(quota, f"its oldest message is {age_s:.0f} s old", "s")
        since_ms = self._clock.now_ms() - quota.limit * 1_000
        first = await self._log.search(lambda it: it.broker_timestamp_ms >= since_ms)
        end = self._log.chain.ceiling(first)
        await self._evict(self._log.chain.previous_position(end))
        return None

    def _slowest(self) -> Position | None:
        """The lowest mark-delete position of the durable subscriptions. None: there is none."""
        durable = [it.cursor for it in self._subscriptions() if it.cursor.durable]
        return min((cursor.mark_delete for cursor in durable), default=None)

    async def _age_s(self, mark: Position) -> float:
        """The age in seconds of the oldest entry after `mark`. 0: there is no entry."""
        chain = self._log.chain
        entries = await self._log.read(chain.next_position(mark), entries_max=1, bytes_max=1)
        if not entries:
            return 0.0
        return (self._clock.now_ms() - entries[0].broker_timestamp_ms) / 1_000

    async def _evict(self, through: Position) -> None:
        """Acknowledge every entry up to `through` for each durable subscription whose mark-delete
        position is lower. The acknowledgements are durable on return. Does nothing while the
        policies are not up to date. Raises LogError."""
        if not self._policies.is_fresh:
            return
        for subscription in list(self._subscriptions()):
            cursor = subscription.cursor
            if not cursor.durable or cursor.mark_delete >= through:
                continue
            try:
                skipped = await subscription.skip_through(through)
            except SubscriptionFenced:
                continue  # it is being moved or deleted: the next check finds it
            self.evicted += skipped
            log.warning(
                "backlog evicted",
                topic=str(self._log.name),
                subscription=subscription.name,
                entries=skipped,
            )

    def _error(self, quota: BacklogQuota, found: str, unit: str) -> QuotaError:
        why = f"{found}, its quota is {quota.limit} {unit}"
        if quota.action is BacklogAction.HOLD_PRODUCERS:
            return BacklogQuotaHeld(str(self._log.name), why)
        return BacklogQuotaRefused(str(self._log.name), why)
