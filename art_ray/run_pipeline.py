"""Training while sampling: `art_ray.pipeline` samples for the next steps while a step is trained.

::

    scenarios ──> Overlap.start ──> one task per group ──> RolloutPool.group   (the user's function, on the workers)
                      ▲                     │ a group is finished: wakes the loop
                      │ has room again      ▼
                      │               Overlap.finish ── too old ──> logged as split "stale"; its scenario starts again
                      │                     │
                      │                     ▼ enough for a step, and no group that was late before would be late again
                      │               Overlap.begin_step ──> what it consumes is on disk ──> model.train
                      │                                                                          │ publishes the version
                      └──────────────── Overlap.end_step <───────────────────────────────────────┘
                                            │
                 evaluation of the version <┤ every n steps, beside all of this
                                            ▼
                                     yield PipelineResult ──> the caller's block; the next step waits until it has ended

One loop, in the caller's task, makes every decision: it waits for whichever comes first, a finished group or the end of
the step, and passes that on to `Overlap`, which knows no clock. Groups, the step and the evaluation are tasks that
decide nothing; whichever way the loop ends, it cancels them and sees them end.

While the caller's block runs, groups go on being sampled (with `max_steps_off_policy` above 0), but no step begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from art_ray.actors.rollout_pool import FinishedGroup, RolloutPool
from art_ray.errors import ConfigError, ServingError, TooManyExceptionsError, TrainingError
from art_ray.gather import check_max_exceptions, ended, too_many
from art_ray.ledger.consumed import ConsumedScenarios
from art_ray.ledger.ledger import STALE_SPLIT
from art_ray.ledger.paths import model_dir
from art_ray.model import TrainableModel
from art_ray.rollouts.overlap import Attempt, FinishedAttempt, Overlap
from art_ray.types import TrainConfig, TrainResult

__all__ = ["PipelineResult", "pipeline"]

FAILED_SPLIT = "failed"
"""Of groups with so many failures that a step was not taken."""
Evaluate = Callable[[TrainableModel], Awaitable[Any]]


class PipelineResult(TrainResult):
    """What one step of `art_ray.pipeline` did."""

    num_groups_stale: int
    """Groups that were found to be too old since the step before and dropped; with `when_stale="train"`, groups of this
    step that were too old and trained all the same."""
    staleness_mean: float
    """By how many versions the step's groups were behind, on average."""
    seconds_sampling: float
    """From a group's start to its end, averaged over the step's groups."""
    seconds_waiting: float
    """For which nothing was trained because groups, or an evaluation, had to end first."""
    seconds_training: float
    """Of the train call: logging, training, and publishing the new version."""


@dataclass(frozen=True)
class _Options:
    """The arguments of `pipeline` that say what is done when."""

    groups_per_step: int
    max_steps_off_policy: int
    num_steps: int | None
    config: TrainConfig
    when_stale: Literal["drop", "train"]
    evaluate_every: int | None
    evaluate: Evaluate | None
    max_exceptions: int | float
    name: str

    def check(self) -> None:
        """Raises `ConfigError` where a value cannot work."""
        limits = {"groups_per_step": 1, "max_steps_off_policy": 0, "num_steps": 0, "evaluate_every": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"pipeline: {name} is at least {least}, got {value}")
        check_max_exceptions(self.max_exceptions)
        if self.when_stale not in ("drop", "train"):
            raise ConfigError(f"pipeline: when_stale is 'drop' or 'train', got {self.when_stale!r}")
        if self.when_stale == "train" and self.config.truncated_importance_sampling is None:
            raise ConfigError(
                "pipeline: when_stale='train' trains on groups of any age, whose weights have to be bounded: set "
                "TrainConfig(truncated_importance_sampling=…), for instance 2.0, or leave when_stale at 'drop'"
            )
        if (self.evaluate is None) != (self.evaluate_every is None):
            raise ConfigError("pipeline: evaluate and evaluate_every belong together, got one of them alone")


def pipeline(
    model: TrainableModel,
    rollout_fn: Callable[[TrainableModel, Any], Any],
    scenarios: Iterable[Any],
    *,
    groups_per_step: int,
    group_size: int = 8,
    max_steps_off_policy: int = 1,
    num_steps: int | None = None,
    config: TrainConfig | None = None,
    when_stale: Literal["drop", "train"] = "drop",
    evaluate_every: int | None = None,
    evaluate: Evaluate | None = None,
    max_exceptions: int | float = 0,
    name: str = "scenarios",
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    max_attempts: int = 3,
    workers: int | None = None,
) -> AsyncGenerator[PipelineResult, None]:
    """Samples and trains at the same time; yields what each step did. Goes on after the last committed step.

    Scenarios are taken in order, `groups_per_step` for each step. With `max_steps_off_policy=0` sampling and training
    take turns: that is `art_ray.rollout` and `model.train`, step after step. With k, groups for the next k steps are
    sampled while a step is trained, and no group is trained by a version more than k above the one that sampled its
    oldest token. A group that comes too late is logged as split "stale" and its scenario sampled again before any
    other, this time with training waiting for it: a slow scenario is trained, too (see `art_ray.rollouts.overlap`).

    A run that was stopped, or killed, and is started again with the same arguments skips no scenario and trains none
    twice: what a step consumed counts once its checkpoint is committed. Leaving the loop early cancels whatever was
    being sampled; `contextlib.aclosing` around the generator makes that happen before the next statement.

    Args:
        model: registered with a backend.
        rollout_fn: `rollout_fn(model, scenario)` returns one trajectory; async or plain, run on the workers.
        scenarios: in the same order whenever the run is started. Read as needed, so that it may be endless:
            `itertools.cycle(items)`.
        groups_per_step: scenarios that a step is trained on.
        group_size: attempts at each.
        max_steps_off_policy: by how many versions a group may be behind the version that is trained on it. Agents that
            are recorded (`model.recording()`) keep their version: `ServingConfig.max_versions` must be above it then.
        num_steps: ends when the model has reached this step; None: when there are no scenarios left.
        config: of every train call.
        when_stale: "drop", or "train" for groups that are trained however old they are, their weights bounded by
            `TrainConfig.truncated_importance_sampling`, which must be set.
        evaluate_every: evaluates every version whose step is a multiple of it, step 0 included.
        evaluate: `await evaluate(pinned)` with a copy of the model that samples from that version alone and logs at its
            step; groups that it returns are logged as split "val". It runs beside sampling and training. Where the
            backend serves one version at a time (merged weights), the next step waits for its end.
        max_exceptions: how many rollouts of one step's groups may fail; between 0 and 1 (both excluded), which share.
        name: of these scenarios, where it is remembered which were consumed; another set for the same model needs
            another.
        max_concurrency: rollouts that run at once, on all workers together; None: 16 groups on each.
        timeout_s: seconds that one rollout may take; None: an hour.
        max_attempts: how many workers one group may see die.
        workers: actors that run rollouts; None: one for each CPU of the cluster.

    Raises:
        NotRegisteredError: the model has no backend.
        ConfigError: a value that cannot work, or fewer scenarios than the steps that were asked for need: before the
            first step where their number is known, otherwise after the last that could be taken.
        ServingError: groups of one scenario were too old twice, which happens only where old versions are served.
        TooManyExceptionsError: more rollouts of a step's groups failed than allowed; that step is not taken, and the
            groups with failures are logged as split "failed".
        ArtRayError: what a rollout worker, a step or the evaluation raised.
    """
    options = _Options(
        groups_per_step=groups_per_step,
        max_steps_off_policy=max_steps_off_policy,
        num_steps=num_steps,
        config=config or TrainConfig(),
        when_stale=when_stale,
        evaluate_every=evaluate_every,
        evaluate=evaluate,
        max_exceptions=max_exceptions,
        name=name,
    )
    options.check()
    model.backend()._check_prepared(model)
    pool = RolloutPool(
        model,
        rollout_fn,
        group_size=group_size,
        max_concurrency=max_concurrency,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        workers=workers,
    )
    return _Pipeline(model, pool, scenarios, options).steps()


@dataclass(frozen=True)
class _Sampled:
    """A group, and how long it took."""

    group: FinishedGroup
    seconds: float


class _Pipeline:
    """One run of `pipeline`, from its first step to its end."""

    def __init__(self, model: TrainableModel, pool: RolloutPool, scenarios: Iterable[Any], options: _Options) -> None:
        self._model, self._pool, self._options = model, pool, options
        self._items = scenarios
        folder = model_dir(model.base_path, model.project, model.name)
        self._consumed = ConsumedScenarios(folder, options.name)
        self._sampling: dict[asyncio.Task[_Sampled], Attempt] = {}
        self._sampled: dict[Attempt, _Sampled] = {}
        self._training: asyncio.Task[TrainResult] | None = None
        self._first_step = 0
        """The version from which the first scenario was trained, or would have been."""
        self._num_dropped = 0
        """Groups that were too old, since the last step."""
        self._late: set[int] = set()
        """Scenarios that had such groups, since the start."""

    async def steps(self) -> AsyncGenerator[PipelineResult, None]:
        """Yields the results of the steps."""
        await self._resume()
        if self._overlap.is_over and not self._evaluation.is_due(self._overlap.version):
            return
        async with self._pool:
            try:
                await self._evaluation.begin(self._overlap.version)
                while (result := await self._next_step()) is not None:
                    await self._evaluation.begin(result.step)
                    if self._options.max_steps_off_policy:
                        self._start_groups()  # they are sampled while the caller looks at the result
                    yield result
                await self._evaluation.end()
            finally:
                await self._cancel()
        self._check_ended()

    async def _resume(self) -> None:
        """Finds out where the run stands: at the newest step, once none is being taken any more and it is served."""
        backend = self._model.backend()
        await backend._prepare_backend_for_training(self._model)
        await backend._get_committed(self._model)
        options, version = self._options, await self._model.get_step()
        consumed = await asyncio.to_thread(self._consumed.at, version)
        self._scenarios = _Scenarios(self._items, consumed.first_unread, consumed.waiting)
        num_trained = consumed.first_unread - len(consumed.waiting)
        self._first_step = max(0, version - num_trained // options.groups_per_step)
        self._overlap = Overlap(
            groups_per_step=options.groups_per_step,
            max_steps_off_policy=options.max_steps_off_policy,
            version=version,
            last_version=options.num_steps,
            first_unread=consumed.first_unread,
            waiting=consumed.waiting,
            drops_stale=options.when_stale == "drop",
        )
        self._evaluation = _Evaluation(
            self._model, self._consumed, options.evaluate, options.evaluate_every, consumed.evaluated
        )
        if (left := self._scenarios.num_left) is not None and options.num_steps is not None:
            reached = version + -(-left // options.groups_per_step)
            if reached < options.num_steps:
                raise self._too_few(reached)

    async def _next_step(self) -> PipelineResult | None:
        """Takes one step, as soon as it can be; None: there is nothing left to train, or the last step was taken."""
        started = time.monotonic()
        await self._take_up()
        while (chosen := self._overlap.begin_step()) is None:
            if self._overlap.is_over:
                return None
            await self._until_news()
        sampled = [self._sampled.pop(group.attempt) for group in chosen]
        await self._check_failures(chosen, sampled)
        await self._evaluation.before_publishing()
        seconds_waiting = time.monotonic() - started
        result = await self._trained(chosen, sampled)
        seconds_training = time.monotonic() - started - seconds_waiting
        staleness = [self._overlap.staleness(group) for group in chosen]
        is_dropping = self._options.when_stale == "drop"
        num_stale = self._num_dropped if is_dropping else sum(map(self._overlap.is_stale, chosen))
        self._num_dropped = 0
        self._overlap.end_step()
        found = {
            "staleness_mean": sum(staleness) / len(staleness),
            "seconds_sampling": sum(one.seconds for one in sampled) / len(sampled),
            "seconds_waiting": seconds_waiting,
            "seconds_training": seconds_training,
        }
        counted = {
            f"groups_{'dropped' if is_dropping else 'trained'}_stale": num_stale,
            "staleness_max": max(staleness),
        }
        await self._model.log(split="train", step=result.step, metrics={**found, **counted})
        return PipelineResult(step=result.step, metrics=result.metrics, num_groups_stale=num_stale, **found)

    async def _trained(self, chosen: Sequence[FinishedAttempt], sampled: Sequence[_Sampled]) -> TrainResult:
        """Trains on the chosen groups, and meanwhile keeps the sampling going."""
        step = self._overlap.version + 1
        positions = [group.attempt.position for group in chosen]
        await asyncio.to_thread(self._consumed.begin, step, positions)
        refs = [one.group.ref for one in sampled]
        self._training = asyncio.create_task(self._model.train(refs, self._options.config))
        while not self._training.done():
            await self._until_news(self._training)
        result = self._training.result()
        self._training = None
        if result.step != step:
            raise TrainingError(
                f"the pipeline trained {self._model.name!r} to step {result.step}, where it expected {step}: "
                "is it trained by something else at the same time?"
            )
        self._scenarios.forget(positions)
        return result

    async def _until_news(self, *others: asyncio.Task[Any]) -> None:
        """Starts what there is room for, waits until something is finished, and takes it up."""
        self._start_groups()
        waiting = {*others, *self._sampling, *self._evaluation.tasks}
        if waiting:  # none: the scenarios have just turned out to have ended
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await self._take_up()

    async def _take_up(self) -> None:
        """Tells `Overlap` of the groups that are finished, and lets go of those that are too old."""
        for task in [task for task in self._sampling if task.done()]:
            attempt = self._sampling.pop(task)
            sampled = self._sampled[attempt] = task.result()
            versions = sampled.group.versions
            self._overlap.finish(attempt, None if versions is None else versions[0])
        if stale := self._overlap.take_stale():
            await self._log_stale(stale)
        await self._evaluation.take_up()

    def _start_groups(self) -> None:
        while (attempt := self._overlap.start()) is not None:
            try:
                scenario = self._scenarios.at(attempt.position)
            except IndexError:
                self._overlap.ran_out(attempt)
            else:
                self._sampling[asyncio.create_task(self._sample(attempt, scenario))] = attempt

    async def _sample(self, attempt: Attempt, scenario: Any) -> _Sampled:
        started = time.monotonic()
        # Kept on disk under the step that would train it were no scenario slow: the same one after a restart.
        step = self._first_step + attempt.position // self._options.groups_per_step
        group = await self._pool.group(scenario, f"{self._options.name}-{attempt.key}", step)
        return _Sampled(group, time.monotonic() - started)

    async def _log_stale(self, stale: Sequence[FinishedAttempt]) -> None:
        refs = [self._sampled.pop(group.attempt).group.ref for group in stale]
        version, positions = self._overlap.version, [group.attempt.position for group in stale]
        await self._model.log(refs, split=STALE_SPLIT, step=version)
        await asyncio.to_thread(self._consumed.drop, version, positions)
        self._num_dropped += len(stale)
        if again := self._late.intersection(positions):
            oldest = min(group.oldest_version for group in stale)
            raise ServingError(
                f"groups of scenario {min(again)} were too old twice, although training waits for the second one: it "
                f"was sampled by version {oldest}, and the newest is {version}. Does something serve old versions?"
            )
        self._late.update(positions)

    async def _cancel(self) -> None:
        """Ends whatever still runs."""
        tasks = [*self._sampling, *([self._training] if self._training is not None else [])]
        try:
            await _cancelled(tasks)
        finally:
            await self._evaluation.cancel()

    async def _check_failures(self, chosen: Sequence[FinishedAttempt], sampled: Sequence[_Sampled]) -> None:
        num_failed = sum(one.group.num_exceptions for one in sampled)
        num_rollouts = num_failed + sum(one.group.num_trajectories for one in sampled)
        if not too_many(num_failed, num_rollouts, self._options.max_exceptions):
            return
        failed = [(group, one) for group, one in zip(chosen, sampled, strict=True) if one.group.num_exceptions]
        version = self._overlap.version
        await self._model.log([one.group.ref for _, one in failed], split=FAILED_SPLIT, step=version)
        # Once what ails them is mended, they are to be sampled again.
        await asyncio.to_thread(self._consumed.drop, version, [group.attempt.position for group, _ in failed])
        raise TooManyExceptionsError(
            f"{num_failed} of the {num_rollouts} rollouts for step {version + 1} failed, more than "
            f"max_exceptions={self._options.max_exceptions} allows. The step was not taken; how they failed is logged "
            f"as split {FAILED_SPLIT!r} of step {version}"
        )

    def _check_ended(self) -> None:
        last = self._options.num_steps
        if last is not None and self._overlap.version < last:
            raise self._too_few(self._overlap.version)

    def _too_few(self, reached: int) -> ConfigError:
        return ConfigError(
            f"the scenarios of {self._options.name!r}, {self._options.groups_per_step} to a step, last until step "
            f"{reached}, but num_steps={self._options.num_steps}: give more of them (itertools.cycle(items) repeats a "
            "list), or ask for fewer steps"
        )


class _Evaluation:
    """The evaluation of one version at a time, beside everything else."""

    def __init__(
        self,
        model: TrainableModel,
        consumed: ConsumedScenarios,
        evaluate: Evaluate | None,
        every: int | None,
        done: frozenset[int],
    ) -> None:
        self._model, self._consumed, self._evaluate, self._every, self._done = model, consumed, evaluate, every, done
        self._held = contextlib.AsyncExitStack()
        self._is_held = False
        """Whether its version stays served when another is published."""
        self.tasks: list[asyncio.Task[None]] = []
        """The evaluation that runs, if there is one."""

    def is_due(self, step: int) -> bool:
        """Returns whether version `step` is to be evaluated, and was not, in this run or one before it."""
        return self._every is not None and step % self._every == 0 and step not in self._done

    async def begin(self, step: int) -> None:
        """Begins to evaluate version `step`, which is the current one, if it is due."""
        if self.is_due(step):
            await self.end()
            self._is_held = await self._held.enter_async_context(self._model.backend()._holding(self._model, step))
            self.tasks = [asyncio.create_task(self._evaluated(step))]

    async def before_publishing(self) -> None:
        """Returns once another version may be published."""
        if not self._is_held:
            await self.end()

    async def take_up(self) -> None:
        """Raises what an evaluation raised that has ended."""
        if self.tasks and self.tasks[0].done():
            await self.end()

    async def end(self) -> None:
        """Waits until no evaluation runs; raises what it raised."""
        if self.tasks:
            await asyncio.wait(self.tasks)
            [task], self.tasks = self.tasks, []
            await self._held.aclose()
            task.result()

    async def cancel(self) -> None:
        """Cancels an evaluation that runs, and sees it end."""
        try:
            await _cancelled(self.tasks)
        finally:
            await self._held.aclose()

    async def _evaluated(self, step: int) -> None:
        assert self._evaluate is not None
        groups = await self._evaluate(self._model.pinned(step))
        if groups is not None:
            await self._model.log(groups, split="val", step=step)
        await asyncio.to_thread(self._consumed.evaluated, step)


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and sees them end; whatever they raise comes too late to matter."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains if none looks
    await ended(list(tasks))


class _Scenarios:
    """The scenarios by their positions; of an iterable, only those that are still needed are kept."""

    def __init__(self, items: Iterable[Any], first_unread: int, waiting: Iterable[int]) -> None:
        self._sequence = items if isinstance(items, Sequence) else None
        self._rest = iter(()) if self._sequence is not None else iter(items)
        self._first_unread, self._waiting = first_unread, frozenset(waiting)
        self._num_read = 0
        self._kept: dict[int, Any] = {}

    @property
    def num_left(self) -> int | None:
        """How many are still to be trained, as the run begins; None where only reading them all would tell."""
        if self._sequence is None:
            return None
        return max(0, len(self._sequence) - self._first_unread) + len(self._waiting)

    def at(self, position: int) -> Any:
        """Returns a scenario.

        Raises:
            IndexError: there are not so many.
        """
        if self._sequence is not None:
            return self._sequence[position]
        while self._num_read <= position:
            try:
                item = next(self._rest)
            except StopIteration:
                raise IndexError(position) from None
            if self._num_read >= self._first_unread or self._num_read in self._waiting:
                self._kept[self._num_read] = item
            self._num_read += 1
        return self._kept[position]

    def forget(self, positions: Iterable[int]) -> None:
        """Lets go of scenarios that were trained."""
        for position in positions:
            self._kept.pop(position, None)
