"""Runs the user's rollouts somewhere on the cluster, many at a time."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

from art_ray.errors import ConfigError
from art_ray.trajectories import Choice, Sampling, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from art_ray.model import Model

__all__ = ["RolloutFunction", "RolloutWorker", "Summary"]

RolloutFunction: TypeAlias = Callable[[Any, Any], Trajectory | Awaitable[Trajectory]]
"""Takes the model and a scenario, returns a trajectory; plain or async."""


# rollout worker -> driver
@dataclass(frozen=True)
class Summary:
    """What the driver needs to know of a group that it never fetches."""

    versions: tuple[int, int] | None
    """The oldest and the newest policy version that sampled a token of it; None where no token names one."""
    num_trajectories: int
    num_exceptions: int
    reward_sum: float
    """Over the trajectories that have a finite reward."""
    num_scored: int
    num_tokens: int
    """Sampled ones."""

    @classmethod
    def of(cls, group: TrajectoryGroup) -> Summary:
        """Returns the summary of `group`."""
        conversations = [
            items
            for trajectory in group
            for items in (
                trajectory.messages_and_choices,
                *(history.messages_and_choices for history in trajectory.additional_histories),
            )
        ]
        choices = [item for items in conversations for item in items if isinstance(item, Choice)]
        samplings = [sampling for choice in choices if (sampling := Sampling.of(choice)) is not None]
        versions = [version for sampling in samplings for version in sampling.policy_versions]
        rewards = [trajectory.reward for trajectory in group if trajectory.is_scored]
        return cls(
            versions=(min(versions), max(versions)) if versions else None,
            num_trajectories=len(group.trajectories),
            num_exceptions=len(group.exceptions),
            reward_sum=math.fsum(rewards),
            num_scored=len(rewards),
            num_tokens=len(versions),
        )


@ray.remote(num_cpus=0)
class RolloutWorker:
    """Runs the user's function. What it raises becomes an entry of its group; siblings go on."""

    def __init__(self, model: Model, rollout_fn: RolloutFunction, threads: int) -> None:
        self._model, self._rollout_fn = model, rollout_fn
        # Plain functions block; as many may do so as rollouts run here.
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rollout")

    async def group(self, scenario: Any, size: int, timeout_s: float) -> tuple[TrajectoryGroup, Summary]:
        """Runs the attempts at one scenario, all at once."""
        attempts = [asyncio.ensure_future(self._attempt(scenario, timeout_s)) for _ in range(size)]
        try:
            group = TrajectoryGroup(await asyncio.gather(*attempts))
        except BaseException:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.wait(attempts)
            raise
        return group, Summary.of(group)

    async def summary(self, group: TrajectoryGroup) -> Summary:
        """Returns the summary of a group that was finished before."""
        return Summary.of(group)

    async def _attempt(self, scenario: Any, timeout_s: float) -> Trajectory | Exception:
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._rolled_out(scenario)
        except TimeoutError as error:
            return error if str(error) else TimeoutError(f"the rollout did not end within {timeout_s:g} s (timeout_s)")
        except Exception as error:
            return error
        if not isinstance(result, Trajectory):
            # A mistake in the function, not a bad day of the rollout: every other one would end like this.
            raise ConfigError(
                f"rollout_fn returned {type(result).__name__} where a Trajectory was expected: {result!r:.80}"
            )
        return result

    async def _rolled_out(self, scenario: Any) -> Any:
        if inspect.iscoroutinefunction(self._rollout_fn):
            return await self._rollout_fn(self._model, scenario)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, self._rollout_fn, self._model, scenario)
        return await result if inspect.isawaitable(result) else result
