"""Lets requests in: each on the version it asks for, in order, and none while the weights are being changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from art_ray.errors import ServingError
from art_ray.serving.leases import VersionTable

__all__ = ["BusyError", "VersionGate"]


class BusyError(ServingError):
    """More requests than the front may hold at once."""


class VersionGate:
    """The asynchronous side of a `VersionTable`. Everything here runs in one event loop.

    A request enters, is counted on its version until it leaves, and keeps that version loaded meanwhile.
    """

    def __init__(self, table: VersionTable, max_requests: int) -> None:
        self.table = table
        self.max_requests = max_requests
        self.waiting = 0
        """Requests that wait for a change of weights to end."""
        self._closed = False
        self._changed = asyncio.Condition()

    async def enter(self, model: object, holder: str | None = None) -> int:
        """Returns the version that will answer, and counts the request on it; `leave` must follow.

        Raises:
            VersionNotServedError: no version that is held goes by that name.
            BusyError: too many requests are inside.
        """
        self.table.resolve(model, holder)  # a name that cannot be served does not wait
        if self.table.requests + self.waiting >= self.max_requests:
            raise BusyError(
                f"{self.max_requests} requests are being answered or waiting (ServingConfig.max_requests); try again"
            )
        if self._closed:
            self.waiting += 1
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._closed)
            finally:
                self.waiting -= 1
        step = self.table.resolve(model, holder)
        self.table.begin(step)
        return step

    async def leave(self, step: int) -> None:
        """Ends what `enter` began."""
        self.table.end(step)
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[None]:
        """Holds new requests back, waits until the running ones are done, and lets the new ones in at the end."""
        self._closed = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.table.requests == 0)
            yield
        finally:
            self._closed = False
            async with self._changed:
                self._changed.notify_all()

    async def until_room(self, capacity: int) -> None:
        """Waits until fewer than `capacity` versions are held or one of them may be unloaded."""
        async with self._changed:
            while len(self.table) >= capacity and not self.table.removable():
                try:  # a lease may also end by its time, which nobody announces
                    await asyncio.wait_for(self._changed.wait(), 1.0)
                except TimeoutError:
                    continue
