"""The rollout workers of one gather, spread over the nodes: which runs what, and what becomes of those that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from art_ray.actors import calls
from art_ray.actors.model_actor import ActorLedger
from art_ray.actors.placement import Placed, placed
from art_ray.actors.rollout_worker import RolloutFunction, RolloutWorker, Summary
from art_ray.errors import ActorDiedError, ActorError, ConfigError, DeadlineError
from art_ray.serving.routing import Rotation

if TYPE_CHECKING:
    from art_ray.model import Model

__all__ = ["FinishedGroup", "RolloutPool"]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 3600.0
GROUPS_AT_ONCE = 16
"""Of each worker, where `max_concurrency` does not say."""
GRACE_S = 60.0
"""For a worker to answer, beyond the time that its rollouts may take."""
KEPT_STEPS = 8
"""Groups of older steps than this many before the newest are not kept on disk any more."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class FinishedGroup:
    """One group that was rolled out: a reference to it, and what the driver needs to know of it."""

    ref: Any
    """To a `TrajectoryGroup`, which stays in the object store of the node that made it."""
    key: str
    versions: tuple[int, int] | None
    """The oldest and the newest policy version that sampled a token of it; None where no token names one."""
    num_trajectories: int
    num_exceptions: int
    reward_sum: float
    """Over the trajectories that have a finite reward."""
    num_scored: int
    num_tokens: int
    """Sampled ones."""


class RolloutPool:
    """Runs the user's function on workers all over the cluster; within its block, and nothing of it after that.

    A finished group is on disk before `group` returns, so that neither a node nor the driver that dies costs it. A
    worker that dies costs the groups that were running there, which are run again elsewhere.

    Args:
        model: registered with a backend on Ray; the function gets a copy that can sample.
        rollout_fn: `rollout_fn(model, scenario) -> Trajectory`, plain or async.
        group_size: attempts at each scenario.
        max_concurrency: rollouts at a time, on all workers together; None: 16 groups on each.
        timeout_s: how long one rollout may take; None: an hour.
        max_attempts: how many workers one group may see die.
        workers: their number; None: one for each CPU of the cluster.
    """

    def __init__(
        self,
        model: Model,
        rollout_fn: RolloutFunction,
        *,
        group_size: int,
        max_concurrency: int | None = None,
        timeout_s: float | None = None,
        max_attempts: int = 3,
        workers: int | None = None,
    ) -> None:
        wrong = [
            f"{name}={value}"
            for name, value in (("group_size", group_size), ("max_attempts", max_attempts), ("workers", workers))
            if value is not None and value < 1
        ]
        if max_concurrency is not None and max_concurrency < group_size:
            wrong.append(f"max_concurrency={max_concurrency}, with group_size={group_size}: a group runs at once")
        if wrong:
            raise ConfigError(f"rollouts need at least 1 of each: {'; '.join(wrong)}")
        ledger = model._remembering()
        if not isinstance(ledger, ActorLedger):
            raise ConfigError(
                f"model {model.name!r} is not registered with a backend on Ray, which rollouts on a cluster need: "
                "`await model.register(art_ray.RayBackend())` first, or use `gather_trajectory_groups` in this process"
            )
        self._ledger = ledger
        self._model, self._rollout_fn = model.for_elsewhere(), rollout_fn
        self._group_size, self._max_attempts, self._num_workers = group_size, max_attempts, workers
        self._timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._groups_at_once = None if max_concurrency is None else max_concurrency // group_size
        self._workers: dict[str, Placed] = {}
        self._rotation = Rotation(1)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._newest_step = 0

    async def __aenter__(self) -> Self:
        nodes = _nodes()
        number = self._num_workers or max(1, int(sum(cpus for _, cpus in nodes)))
        share = GROUPS_AT_ONCE if self._groups_at_once is None else -(-self._groups_at_once // number)
        self._per_worker = share
        self._limit = asyncio.Semaphore(self._groups_at_once or share * number)
        self._rotation = Rotation(share)
        for index in range(number):
            self._add_worker(nodes[index % len(nodes)][0])
        return self

    async def __aexit__(self, *_: object) -> None:
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            ray.kill(worker.handle)

    async def group(self, scenario: Any, key: str, step: int | None = None) -> FinishedGroup:
        """Runs the attempts at one scenario, and returns when the group is on disk.

        Args:
            scenario: what the function gets.
            key: tells this group from all others of its step; one that a process which died had finished is not run
                again.
            step: the version that samples; None: the group is not kept.

        Raises:
            ConfigError: the function returned something else than a trajectory.
            ActorDiedError: as many workers died of this group as may.
            LedgerError: the group could not be written.
        """
        if step is not None:
            await self._forget_old(step)
            if (ref := await self._ledger.recall(step, key)) is not None:
                return await self._finished(ref, key)
        async with self._limit:
            for attempt in range(1, self._max_attempts + 1):
                try:
                    ref, summary = await self._run(scenario)
                    if step is not None:
                        await self._ledger.keep(step, key, ref)
                    return FinishedGroup(ref, key, **vars(summary))
                except (ActorError, DeadlineError) as error:  # a worker died, or its node with the finished group
                    logger.warning("group %s was lost (attempt %d of %d): %s", key, attempt, self._max_attempts, error)
                    last = error
        raise ActorDiedError(f"{self._max_attempts} workers were lost while they ran group {key!r}; the last: {last}")

    async def _run(self, scenario: Any) -> tuple[Any, Summary]:
        async with self._worker() as worker:
            what = f"{self._group_size} rollouts"
            wait = worker.wait("group", what, self._timeout_s + GRACE_S)
            method = worker.handle.group.options(num_returns=2)
            ref, summary = method.remote(scenario, self._group_size, self._timeout_s)
            try:
                return ref, await calls.answer(summary, wait)
            except asyncio.CancelledError:
                ray.cancel(summary, force=False)
                raise
            except (ActorDiedError, DeadlineError):
                self._replace(worker)
                raise

    async def _finished(self, ref: Any, key: str) -> FinishedGroup:
        """Returns a kept group; one of the workers looks at it, so that the driver need not fetch it."""
        async with self._worker() as worker:
            wait = worker.wait("summary", f"a look at the kept group {key!r}", GRACE_S)
            summary: Summary = await calls.answer(worker.handle.summary.remote(ref), wait)
        return FinishedGroup(ref, key, **vars(summary))

    async def _forget_old(self, step: int) -> None:
        if step > self._newest_step:
            self._newest_step = step
            await self._ledger.forget_before(step - KEPT_STEPS)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[Placed]:
        """Gives the worker with the least to do, once one has room."""
        while (name := self._rotation.choose()) is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        self._rotation.begin(name)
        try:
            yield self._workers[name]
        finally:
            self._rotation.end(name)
            self._admit()

    def _admit(self) -> None:
        if self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    def _replace(self, worker: Placed) -> None:
        """Ends a worker that is dead or stands still, and starts another one, once."""
        if self._workers.pop(worker.name, None) is None:
            return
        self._rotation.remove(worker.name)
        ray.kill(worker.handle)
        nodes = _nodes()
        self._add_worker(nodes[next(_NUMBERS) % len(nodes)][0])

    def _add_worker(self, node_id: str) -> None:
        name = f"rollouts:{self._model.project}/{self._model.name}:{os.getpid()}.{next(_NUMBERS)}"
        self._workers[name] = placed(
            RolloutWorker,
            name,
            self._model,
            self._rollout_fn,
            self._per_worker * self._group_size,
            max_concurrency=self._per_worker + 1,
            # Soft: a node may die before its worker is there.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
        )
        self._rotation.add(name)
        for _ in range(self._per_worker):
            self._admit()


def _nodes() -> list[tuple[str, float]]:
    """Returns id and number of CPUs of the nodes that are alive."""
    return [(node["NodeID"], node["Resources"].get("CPU", 0.0)) for node in ray.nodes() if node["Alive"]]
