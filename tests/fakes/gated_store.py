"""A metadata store whose requests a test delays, or lets raise CancelledError although no task was
cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes.stray import stray

from magnetar.metadata.memory import MemoryStore

if TYPE_CHECKING:
    import asyncio

    from magnetar.metadata.store import Versioned

Request = tuple[str, str]  # operation ("get", "put") and path


class GatedStore(MemoryStore):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.gates: dict[Request, asyncio.Event] = {}  # until the event is set, these requests wait
        # the next of each of these requests raises CancelledError
        self.strays: set[Request] = set()
        self.held: list[Request] = []  # requests that wait at a gate, or waited

    async def get(self, path: str) -> Versioned | None:
        await self._pass(("get", path))
        return await super().get(path)

    async def put(self, path: str, value: bytes, *, expected: int) -> int:
        await self._pass(("put", path))
        return await super().put(path, value, expected=expected)

    async def _pass(self, request: Request) -> None:
        if request in self.strays:
            self.strays.remove(request)
            await stray()
        if request in self.gates:
            self.held.append(request)
            await self.gates[request].wait()
