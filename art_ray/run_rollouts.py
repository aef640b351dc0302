"""Rollouts on every node: the user's function on workers all over the cluster, and references to what it gave."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from ray import cloudpickle

from art_ray.actors.rollout_pool import FinishedGroup, RolloutPool
from art_ray.actors.rollout_worker import RolloutFunction
from art_ray.errors import TooManyExceptionsError
from art_ray.gather import check_max_exceptions, ended, too_many
from art_ray.model import Model
from art_ray.progress import bar

__all__ = ["rollout"]


async def rollout(
    model: Model,
    rollout_fn: RolloutFunction,
    scenarios: Iterable[Any],
    *,
    group_size: int = 8,
    max_exceptions: int | float = 0,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    max_attempts: int = 3,
    workers: int | None = None,
    pbar_desc: str | None = "rollout",
) -> list[Any]:
    """Runs `rollout_fn(model, scenario)` a group of times for each scenario, on workers all over the cluster.

    A rollout that raises becomes an entry of its group's `exceptions`, and costs its siblings nothing. Each finished
    group is on disk before it counts: called again after a crash, at the same step with the same scenarios, only the
    missing ones are run. When this raises or is cancelled, nothing keeps running.

    Args:
        model: registered with a `RayBackend`. The function gets a copy of it that can sample.
        rollout_fn: plain or async. It is sent to the workers by value, or by name where they can import it.
        scenarios: one for each group; whatever can be pickled.
        group_size: attempts at each.
        max_exceptions: how many rollouts may fail in all; between 0 and 1 (both excluded), which share of them.
        max_concurrency: rollouts at a time, on all workers together; None: 16 groups on each worker.
        timeout_s: how long one rollout may take before it counts as failed; None: an hour.
        max_attempts: how many workers one group may see die before that is an error.
        workers: their number; None: one for each CPU of the cluster.
        pbar_desc: what the progress bar says before its figures; None: nothing.

    Returns:
        References to the groups, in the order of the scenarios. `model.log` and `model.train` take them; the
        trajectories stay on the nodes that made them.

    Raises:
        TooManyExceptionsError: more rollouts failed than allowed.
        ConfigError: a value that cannot work, a model that is not registered, or a function that gave no trajectory.
        ActorDiedError: `max_attempts` workers died of one group.
    """
    check_max_exceptions(max_exceptions)
    listed = list(scenarios)
    step = await model.get_step()
    gather = _identity(rollout_fn, listed, group_size)
    pool = RolloutPool(
        model,
        rollout_fn,
        group_size=group_size,
        max_concurrency=max_concurrency,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        workers=None if workers is None else min(workers, max(1, len(listed))),
    )
    progress = _Progress(len(listed) * group_size, max_exceptions, pbar_desc)

    async def finished(position: int, scenario: Any) -> FinishedGroup:
        group = await pool.group(scenario, f"{gather}-{position:05d}", step)
        progress.done(group)
        return group

    async with pool:
        tasks = [asyncio.create_task(finished(*item)) for item in enumerate(listed)]
        try:
            return [group.ref for group in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
            await ended(tasks)
            progress.close()


def _identity(rollout_fn: RolloutFunction, scenarios: Sequence[Any], group_size: int) -> str:
    """Returns what is equal for the same gather, started again in another process."""
    name = getattr(rollout_fn, "__qualname__", type(rollout_fn).__qualname__)
    return hashlib.sha256(cloudpickle.dumps((name, group_size, list(scenarios)))).hexdigest()[:16]


class _Progress:
    """One bar for all workers, and the count of failures."""

    def __init__(self, num_rollouts: int, max_exceptions: int | float, desc: str | None) -> None:
        self._num_rollouts, self._max_exceptions = num_rollouts, max_exceptions
        self._num_exceptions = self._num_scored = self._num_tokens = 0
        self._reward_sum = 0.0
        self._bar = bar(desc=desc, total=num_rollouts, unit="traj", disable=desc is None)

    def done(self, group: FinishedGroup) -> None:
        """Counts a finished group.

        Raises:
            TooManyExceptionsError: more rollouts failed than allowed.
        """
        self._num_exceptions += group.num_exceptions
        self._num_scored += group.num_scored
        self._num_tokens += group.num_tokens
        self._reward_sum += group.reward_sum
        shown: dict[str, Any] = {"exceptions": self._num_exceptions}
        if self._num_scored:
            shown = {"reward": self._reward_sum / self._num_scored, **shown}
        if seconds := self._bar.format_dict["elapsed"]:
            shown["tokens/s"] = round(self._num_tokens / seconds)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(group.num_trajectories + group.num_exceptions)
        if too_many(self._num_exceptions, self._num_rollouts, self._max_exceptions):
            raise TooManyExceptionsError(
                f"{self._num_exceptions} of {self._num_rollouts} rollouts failed, more than "
                f"max_exceptions={self._max_exceptions} allows; the groups' `exceptions` say how"
            )

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()
