"""How a model reaches its ledger: the same few calls, whether the ledger is in this process or behind an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from art_ray.ledger.ledger import Ledger, LedgerConfig, LogReceipt

__all__ = ["InProcessLedger", "LedgerPort"]

T = TypeVar("T")


class LedgerPort(Protocol):
    """What a model asks of its ledger. Nothing here blocks the caller's event loop."""

    is_closed: bool
    """Whether this way to the ledger is gone, so that another must be taken."""

    def is_reference(self, item: object) -> bool:
        """Returns whether `item` stands for a trajectory group that lies elsewhere."""
        ...

    async def share(self, groups: Sequence[Any]) -> list[Any]:
        """Returns `groups` in the form in which they can be passed to the ledger and the backend without a copy."""
        ...

    async def log(
        self,
        groups: Sequence[Any] | None,
        *,
        split: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        request_id: str,
    ) -> LogReceipt:
        """Logs what `share` returned; when it returns, everything is on disk. A repeated id writes nothing."""
        ...

    async def learning_rate_multiplier(self) -> float:
        """Returns the factor by which the trend of the rewards' spread scales the learning rate."""
        ...

    async def steps_to_keep(self, metric: str, latest_step: int) -> list[int]:
        """Returns the steps whose checkpoints must stay: the latest and the best by `metric`."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Gives the reporters up to `timeout_s` to send their backlog; what is left is sent at the next start."""
        ...


class InProcessLedger:
    """A ledger in this process, on a thread of its own: calls are carried out in order, off the event loop."""

    def __init__(self, config: LedgerConfig) -> None:
        self.is_closed = False
        self._ledger = Ledger(config)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"ledger-{config.name}")

    def is_reference(self, item: object) -> bool:
        """Returns False: without a cluster there are no references."""
        return False

    async def share(self, groups: Sequence[Any]) -> list[Any]:
        """Returns the groups themselves."""
        return list(groups)

    async def log(
        self,
        groups: Sequence[Any] | None,
        *,
        split: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        request_id: str,
    ) -> LogReceipt:
        """See `LedgerPort.log`."""
        return await self._run(
            lambda: self._ledger.log(groups, split=split, step=step, metrics=metrics, request_id=request_id)
        )

    async def learning_rate_multiplier(self) -> float:
        """See `LedgerPort.learning_rate_multiplier`."""
        return await self._run(self._ledger.learning_rate_multiplier)

    async def steps_to_keep(self, metric: str, latest_step: int) -> list[int]:
        """See `LedgerPort.steps_to_keep`."""
        return await self._run(lambda: self._ledger.steps_to_keep(metric, latest_step))

    async def close(self, timeout_s: float) -> None:
        """See `LedgerPort.close`."""
        self.is_closed = True
        await self._run(lambda: self._ledger.close(timeout_s))
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
