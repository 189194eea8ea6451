"""Moves a client between clusters: when its present cluster is down, when its primary cluster is
back, or when a provider asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from magnetar.client.blocking import in_thread
from magnetar.client.callbacks import call
from magnetar.client.errors import PulsarException, WrongType
from magnetar.client.service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.client.options import ClientOptions

log = get_logger(__name__)

Probe = Callable[[str, float], Awaitable[bool]]
"""Called as `probe(service_url, timeout_s)`; returns whether a broker accepts connections."""


class ClusterChoice:
    """A machine that chooses a cluster by the results of probes.

    1. The primary cluster has number 0. The secondary clusters follow in their order.
    2. The client fails over only after `failover_threshold` failed probes of its cluster in a row.
       ClusterWatch then chooses the first other cluster whose probe succeeds.
    3. The client returns to the primary cluster after `switch_back_threshold` successful probes of
       it in a row, or by rule 2 after one, if the client's secondary cluster has failed.
    4. `current` changes only with `move`, after the client has moved: a client can refuse a cluster
       that answers, for example because the file of the certificates that the client trusts for
       this cluster cannot be read.
    """

    def __init__(self, failover: AutoClusterFailover) -> None:
        self.clusters = [failover.primary, *failover.secondary]
        self.current = 0
        self._failover_threshold = failover.failover_threshold
        self._switch_back_threshold = failover.switch_back_threshold
        self._failures = 0  # consecutive failures of the current cluster
        # Consecutive successes of the primary, while another cluster is current.
        self._primary_successes = 0

    def on_probed(self, *, current: bool, primary: bool) -> list[int]:
        """Note the results of one round of probes. Returns the clusters to try, in order. Empty:
        stay.

        `current`, `primary`: True if the probe of that cluster succeeded. While the primary cluster
        is the current one, the machine ignores `primary`.
        """
        self._failures = 0 if current else self._failures + 1
        if self.current != 0:
            self._primary_successes = self._primary_successes + 1 if primary else 0
        if self._failures >= self._failover_threshold:
            return [number for number in range(len(self.clusters)) if number != self.current]
        if self._primary_successes >= self._switch_back_threshold:
            return [0]
        return []

    def move(self, number: int) -> None:
        """Note that the client has moved to this cluster."""
        self.current = number
        self._failures = self._primary_successes = 0


class ClusterWatch:
    """Tells a client which cluster to use, and when to move. `run` lasts as long as the client."""

    def __init__(
        self,
        source: AutoClusterFailover | ServiceInfoProvider,
        move: Callable[[ServiceInfo], bool],
        probe: Probe,
        timeout_s: float,
    ) -> None:
        """`move` returns False if the client is closed. `timeout_s`: the time limit of one
        probe."""
        self._source = source
        self._move = move
        self._probe = probe
        self._timeout_s = timeout_s
        if isinstance(source, AutoClusterFailover):
            self.initial = source.primary
        else:
            self.initial = _checked(source.initial_service_info())
        self._current = self.initial

    async def run(self) -> None:
        if isinstance(self._source, AutoClusterFailover):
            await self._fail_over(self._source)
        else:
            await self._follow(self._source)

    async def _fail_over(self, failover: AutoClusterFailover) -> None:
        choice = ClusterChoice(failover)
        while True:
            here = await self._answers(choice.clusters[choice.current])
            primary = here if choice.current == 0 else await self._answers(choice.clusters[0])
            for number in choice.on_probed(current=here, primary=primary):
                info = choice.clusters[number]
                if await self._answers(info) and self._use(info):
                    choice.move(number)
                    break
            await asyncio.sleep(failover.check_interval_ms / 1000)

    async def _follow(self, provider: ServiceInfoProvider) -> None:
        loop = asyncio.get_running_loop()

        def update(info: ServiceInfo) -> None:
            checked = _checked(info)  # raises in the provider's call
            with suppress(RuntimeError):  # the client's loop has ended
                loop.call_soon_threadsafe(self._use, checked)

        try:
            await in_thread(call, provider.initialize, update)  # `initialize` may wait
            await asyncio.Event().wait()  # until the client cancels this task
        finally:
            call(provider.close)

    async def _answers(self, info: ServiceInfo) -> bool:
        try:
            return await self._probe(info.service_url, self._timeout_s)
        except PulsarException as error:  # the client cannot use the URL of the cluster
            log.error("the cluster cannot be used", service=repr(info), error=str(error))
            return False

    def _use(self, info: ServiceInfo) -> bool:
        """Move to the cluster unless it is in use. Returns False if the client cannot use it, or is
        closed."""
        if info is self._current:
            return True
        try:
            if not self._move(info):
                return False
        except PulsarException as error:  # the cluster's URL or certificates are unusable
            log.error("the cluster cannot be used", service=repr(info), error=str(error))
            return False
        log.warning("moved to another cluster", service=repr(info))
        self._current = info
        return True


def in_cluster(options: ClientOptions, info: ServiceInfo) -> ClientOptions:
    """Return the options of a client for one of its clusters."""
    return replace(
        options,
        service_url=info.service_url,
        authentication=info.authentication,
        tls_trust_certs_file_path=info.tls_trust_certs_file_path,
    )


def service_info_of(options: ClientOptions) -> ServiceInfo:
    """Return the cluster that a client with these options uses."""
    return ServiceInfo(options.url, options.authentication, options.tls_trust_certs_file_path)


def _checked(info: object) -> ServiceInfo:
    if not isinstance(info, ServiceInfo):
        raise WrongType(f"expected a ServiceInfo, not {type(info).__name__}")
    return info
