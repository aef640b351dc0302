"""Runs many rollouts at once: a progress bar, a limit on failures, and nothing left running however it ends.

::

    gather_trajectory_groups ── one task per group ── one task per rollout
              ▲                        │                      │ raises: an entry of its group, and counted
              │                        ▼                      │ one failure too many: TooManyExceptionsError
        groups in order         after_each(group)             ▼
                                                   whoever fails or is cancelled cancels
                                                   its siblings and waits until they have ended
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Literal, TypeAlias, TypeVar, overload

from art_ray.errors import ConfigError, TooManyExceptionsError
from art_ray.progress import bar
from art_ray.trajectories import PendingTrajectoryGroup, RolloutFailure, Trajectory, TrajectoryGroup, as_number

__all__ = ["gather_trajectories", "gather_trajectory_groups"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROUNDING = 1e-9
"""As a share of a limit: 0.29 of 100 is a little less than 29 in floating point, and allows 29 all the same."""
AfterEachResult: TypeAlias = TrajectoryGroup | list[TrajectoryGroup] | None
AfterEach: TypeAlias = Callable[[TrajectoryGroup], AfterEachResult | Awaitable[AfterEachResult]]


async def gather_trajectory_groups(
    groups: Iterable[TrajectoryGroup | PendingTrajectoryGroup | Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Runs the rollouts of all groups at once and returns the finished groups in the order given.

    A rollout that raises becomes an entry of its group's `exceptions`; an awaitable that raises instead of giving a
    group becomes a group that holds nothing else. When this raises or is cancelled, all that still ran has been
    cancelled and has ended.

    Args:
        groups: groups, `TrajectoryGroup(...)` of coroutines, or other awaitables of a group.
        pbar_desc: what the progress bar says before its figures.
        max_exceptions: how many rollouts may fail in the whole gather; between 0 and 1 (both excluded), which share
            of all rollouts. A share is judged once the size of every group is known. Failures in groups that were
            finished beforehand do not count.
        max_metrics: how many mean metrics the progress bar shows beside reward and exceptions; None: all.
        after_each: called with each group as soon as it is finished; plain or async. The group or groups it returns
            take the place of its argument; None drops it. What it raises ends the gather.

    Raises:
        TooManyExceptionsError: more rollouts failed than allowed; its cause is the last failure.
        TypeError: an item that is no group or awaitable of one, or a rollout that returned no trajectory.
        ConfigError: `max_exceptions` is negative or not a number.

    Example:
        >>> async def rollout(reward: float) -> Trajectory:
        ...     return Trajectory([{"role": "user", "content": "yes or no?"}], reward=reward)
        >>> pending = [TrajectoryGroup(rollout(reward) for reward in rewards) for rewards in ([0.0, 1.0], [0.5])]
        >>> [[t.reward for t in group] for group in asyncio.run(gather_trajectory_groups(pending))]
        [[0.0, 1.0], [0.5]]
    """
    check_max_exceptions(max_exceptions)
    items = _checked_items(groups, (TrajectoryGroup,), "gather_trajectory_groups takes groups and awaitables of groups")
    sizes = [_known_size(item) for item in items]
    with _Progress(sizes, pbar_desc, max_exceptions, max_metrics) as progress:

        async def finished(item: Any) -> list[TrajectoryGroup]:
            group = await _group_of(item, progress)
            return [group] if after_each is None else await _applied(after_each, group)

        parts = await _together([finished(item) for item in items])
    if num_dropped := sum(not part for part in parts):
        logger.info("%s: after_each dropped %d of %d groups", pbar_desc or "gather", num_dropped, len(parts))
    return [group for part in parts for group in part]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[T]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: Literal[0] = 0,
    max_metrics: int | None = None,
) -> list[T]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[T]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float,
    max_metrics: int | None = None,
) -> list[T | Exception]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
) -> list[Any]:
    """Runs rollouts at once and returns what they gave, in the order given; a failed one's exception in its place.

    When this raises or is cancelled, all rollouts that still ran have been cancelled and have ended.

    Args:
        trajectories: awaitables of a trajectory, or of several (which stay together as a list).
        pbar_desc: what the progress bar says before its figures.
        max_exceptions: how many rollouts may fail; between 0 and 1 (both excluded), which share of them.
        max_metrics: how many mean metrics the progress bar shows beside reward and exceptions; None: all.

    Raises:
        TooManyExceptionsError: more rollouts failed than allowed; its cause is the last failure.
        TypeError: an item that cannot be awaited, or a rollout that returned no trajectory.
        ConfigError: `max_exceptions` is negative or not a number.
    """
    check_max_exceptions(max_exceptions)
    items = _checked_items(trajectories, (), "gather_trajectories takes awaitables of trajectories")
    with _Progress([1] * len(items), pbar_desc, max_exceptions, max_metrics) as progress:

        async def finished(item: Awaitable[Any]) -> Any:
            try:
                result = await item
            except Exception as error:
                progress.failed(error)
                return error
            several = None if isinstance(result, Trajectory) else _trajectories_in(result)
            progress.done(several if several is not None else [result], num_done=1)
            return result if several is None else several

        return await _together([finished(item) for item in items])


async def _group_of(item: Any, progress: _Progress) -> TrajectoryGroup:
    """Returns the group that `item` is, holds the rollouts of, or is an awaitable of."""
    if isinstance(item, TrajectoryGroup):
        progress.done(item.trajectories, num_done=_size(item))
        return item
    if isinstance(item, PendingTrajectoryGroup):
        return TrajectoryGroup(await _together([_outcome(r, progress) for r in item.items]), **item.values)
    try:
        group = await item
    except Exception as error:
        progress.size_known(1)
        progress.failed(error)
        return TrajectoryGroup([error])
    if not isinstance(group, TrajectoryGroup):
        raise TypeError(f"an awaitable gave {type(group).__name__} where a TrajectoryGroup was expected: {group!r:.80}")
    progress.size_known(_size(group))
    progress.done(group.trajectories)
    for failure in group.exceptions:
        progress.failed(failure)
    return group


async def _outcome(item: Any, progress: _Progress) -> Any:
    """Returns the trajectory, exception or failure that one item of a pending group is or becomes."""
    if not inspect.isawaitable(item):
        progress.done([item] if isinstance(item, Trajectory) else [], num_done=1)
        return item
    try:
        result = await item
    except Exception as error:
        result = error
    if isinstance(result, (Exception, RolloutFailure)):
        progress.failed(result)
    elif isinstance(result, Trajectory):
        progress.done([result])
    else:
        # A mistake in the rollout function, not a bad day of the rollout: every other one would end like this.
        raise TypeError(f"a rollout returned {type(result).__name__} where a Trajectory was expected: {result!r:.80}")
    return result


async def _applied(after_each: AfterEach, group: TrajectoryGroup) -> list[TrajectoryGroup]:
    result = after_each(group)
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return []
    listed = [result] if isinstance(result, TrajectoryGroup) else result
    if not isinstance(listed, (list, tuple)) or not all(isinstance(g, TrajectoryGroup) for g in listed):
        raise TypeError(f"after_each returns a TrajectoryGroup, a list of them or None; it returned {result!r:.80}")
    return list(listed)


async def _together(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results in order. On the first error, or when cancelled, cancels the rest and sees them end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    gathered = asyncio.gather(*tasks)
    gathered.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains if none looks
    try:
        # Awaiting `gathered` itself would hand each cancellation on, the second one into the clean-up of the rollouts.
        await asyncio.wait([gathered])
        return gathered.result()
    finally:
        for task in tasks:
            task.cancel()
        await ended(tasks)


async def ended(tasks: list[asyncio.Task[T]]) -> None:
    """Waits until all have ended. A cancellation meanwhile is passed on afterwards, so that none is left behind."""
    cancellation: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


class _Progress:
    """The counts of one gather: shows them, and raises once more rollouts failed than are allowed to."""

    def __init__(
        self, sizes: list[int | None], desc: str | None, max_exceptions: int | float, max_metrics: int | None
    ) -> None:
        self._num_expected = sum(size for size in sizes if size is not None)
        self._num_sizes_unknown = sizes.count(None)
        self._max_exceptions = max_exceptions
        self._max_metrics = max_metrics
        self._num_failed = 0
        self._last_failure: Exception | RolloutFailure | None = None
        self._sums: dict[str, tuple[float, int]] = {"reward": (0.0, 0)}
        # A group of unknown size stands in the bar as one until it is finished.
        self._bar = bar(desc=desc, total=self._num_expected + self._num_sizes_unknown, unit="traj")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def size_known(self, size: int) -> None:
        """Counts the rollouts of a group that is finished and whose size was unknown until then."""
        self._num_expected += size
        self._num_sizes_unknown -= 1
        self._bar.total += size - 1
        self._raise_if_too_many()

    def done(self, trajectories: list[Trajectory], num_done: int | None = None) -> None:
        """Counts finished trajectories. `num_done` is by how much the bar moves, where it is not their number."""
        for trajectory in trajectories:
            for name, value in [("reward", trajectory.reward), *trajectory.metrics.items()]:
                number = as_number(value)
                if isinstance(number, (int, float)) and math.isfinite(number):
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = (total + number, count + 1)
        self._show(len(trajectories) if num_done is None else num_done)

    def failed(self, failure: Exception | RolloutFailure) -> None:
        """Counts a failed rollout.

        Raises:
            TooManyExceptionsError: that was one more than allowed.
        """
        self._num_failed += 1
        self._last_failure = failure
        self._show(1)
        self._raise_if_too_many()

    def _show(self, num_done: int) -> None:
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        shown = {"reward": means.pop("reward")} if "reward" in means else {}
        shown["exceptions"] = self._num_failed
        shown.update(list(means.items())[: self._max_metrics])
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(num_done)

    def _raise_if_too_many(self) -> None:
        if 0 < self._max_exceptions < 1 and self._num_sizes_unknown:
            return  # the share of a total that is not known yet
        is_over = too_many(self._num_failed, self._num_expected, self._max_exceptions)
        if not is_over or self._last_failure is None:
            return
        last = self._last_failure
        failure = last if isinstance(last, RolloutFailure) else RolloutFailure.of(last)
        raise TooManyExceptionsError(
            f"{self._num_failed} of {self._num_expected + self._num_sizes_unknown} rollouts failed, "
            f"more than max_exceptions={self._max_exceptions} allows; the last with {failure.type}: {failure.message}"
        ) from (last if isinstance(last, Exception) else None)


def _size(group: TrajectoryGroup) -> int:
    return len(group.trajectories) + len(group.exceptions)


def _known_size(item: Any) -> int | None:
    """Returns the number of rollouts of a group that is finished or pending, and None for any other awaitable."""
    if isinstance(item, TrajectoryGroup):
        return _size(item)
    return len(item.items) if isinstance(item, PendingTrajectoryGroup) else None


def _trajectories_in(result: Any) -> list[Trajectory]:
    listed = list(result) if isinstance(result, Iterable) else [result]
    for item in listed:
        if not isinstance(item, Trajectory):
            raise TypeError(f"a rollout returned {type(item).__name__} where a Trajectory was expected: {item!r:.80}")
    return listed


def _checked_items(items: Iterable[Any], ready: tuple[type, ...], expected: str) -> list[Any]:
    """Returns `items` as a list of awaitables and instances of `ready`; closes what is refused unstarted."""
    listed = list(items)
    for position, item in enumerate(listed):
        if not (isinstance(item, ready) or inspect.isawaitable(item)):
            _close(listed)
            raise TypeError(f"{expected}; item {position} is {type(item).__name__}: {item!r:.80}")
    return listed


def _close(items: list[Any]) -> None:
    """Ends coroutines that never started, so that Python does not warn of them beside the real error."""
    for item in items:
        if isinstance(item, PendingTrajectoryGroup):
            _close(item.items)
        elif inspect.iscoroutine(item):
            item.close()


def too_many(num_failed: int, num_rollouts: int, max_exceptions: int | float) -> bool:
    """Returns whether more of the rollouts failed than `max_exceptions` allows, which is a count or a share."""
    is_share = 0 < max_exceptions < 1
    return num_failed > (max_exceptions * num_rollouts * (1 + ROUNDING) if is_share else max_exceptions)


def check_max_exceptions(max_exceptions: int | float) -> None:
    """Raises `ConfigError` where `max_exceptions` is neither a count nor a share."""
    if math.isnan(max_exceptions) or max_exceptions < 0:
        raise ConfigError(
            f"max_exceptions={max_exceptions}: give a count of failures (0 or more), or a share between 0 and 1"
        )
