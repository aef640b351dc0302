"""The trainer actors of one policy: placed together, started together, replaced together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art_ray.actors import calls
from art_ray.actors.deadlines import Deadlines
from art_ray.actors.placement import Placed, placed
from art_ray.actors.trainer_actor import TrainerActor, TrainRequest
from art_ray.errors import ActorDiedError, ArtRayError, DeadlineError, ResourcesError
from art_ray.training.config import RankSettings, TrainerSpec

__all__ = ["TrainerGroup"]

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a step is begun before the death of a trainer becomes the caller's error."""


class TrainerGroup:
    """One trainer actor per rank. The first one reads and writes checkpoints, and answers for all.

    When an actor dies in the middle of a step, all are replaced: the new ones resume from the newest checkpoint, and
    the step is taken again from the same references. What was committed is found done.

    Args:
        name: of the first actor; the others carry their rank behind it.
        spec: what each is made with, but for its place.
        resources: what each asks of Ray.
        deadlines: how long each answer may take.
    """

    def __init__(self, name: str, spec: TrainerSpec, resources: Mapping[str, float], deadlines: Deadlines) -> None:
        self._name = name
        self._spec = spec
        self._resources = dict(resources)
        self._deadlines = deadlines
        self._together: PlacementGroup | None = None
        self._ranks: list[Placed] = []

    async def place(self) -> None:
        """Creates the actors, and has the first one look at the base model before a weight is loaded.

        Raises:
            UnknownBaseModelError, UnsupportedLoraError: what it found.
            ResourcesError: the ranks do not fit side by side.
        """
        size = self._spec.trainer.ranks
        options: dict[str, Any] = {"num_cpus": self._resources["CPU"], "num_gpus": self._resources.get("GPU", 0)}
        if size > 1:
            self._together = placement_group([self._resources] * size, strategy="PACK")
            wait = calls.Wait("placement group", "ready", "any", f"room for {size} ranks", self._deadlines.check_s)
            try:
                await calls.answer(self._together.ready(), wait)
            except ArtRayError as error:
                raise ResourcesError(f"{size} trainer ranks of {self._resources} find no place: {error}") from error
        for rank in range(size):
            name = self._name if rank == 0 else f"{self._name}:{rank}"
            if self._together is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._together, rank)
            self._ranks.append(placed(TrainerActor, name, self._spec, **options))
        first = self._ranks[0]
        wait = first.wait("check", f"a look at the base model {self._spec.base_model!r}", self._deadlines.check_s)
        node = await calls.answer(first.handle.check.remote(), wait)
        self._ranks[0] = Placed(first.handle, first.name, node)

    async def start(self) -> int:
        """Loads the policy on every rank; returns the step it stands at."""
        first = self._ranks[0]
        meeting = None
        if len(self._ranks) > 1:
            wait = first.wait("open_meeting", "a place for the ranks to meet", self._deadlines.check_s)
            meeting = await calls.answer(first.handle.open_meeting.remote(), wait)
        places = [
            RankSettings(rank=rank, world_size=len(self._ranks), init_method=meeting)
            for rank in range(len(self._ranks))
        ]
        what = f"the weights of {self._spec.base_model!r}"
        steps: list[int] = await calls.together(
            *(
                calls.answer(actor.handle.start.remote(place), actor.wait("start", what, self._deadlines.start_s))
                for actor, place in zip(self._ranks, places, strict=True)
            )
        )
        return steps[0]

    async def train(self, request: TrainRequest, report: Callable[[Any], None]) -> dict[str, float]:
        """Takes one step on every rank; returns its metrics. A trainer that dies is replaced, and the step repeated.

        Raises:
            ActorDiedError: trainers died in each of several attempts.
            DeadlineError: no progress for too long.
            ArtRayError: what the trainer raised.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._train(request, report)
            except (ActorDiedError, DeadlineError) as error:
                # One that stands still is lost as well: its thread would keep whoever comes next waiting.
                await self._replace(f"lost in step {request.step + 1} (attempt {attempt} of {ATTEMPTS}): {error}")
        return await self._train(request, report)

    async def settled(self) -> int:
        """Returns the step of the newest commit, once a step that is still being taken, by a call that was given up,
        has ended. Actors that are gone or stand still are replaced.
        """
        try:
            first = self._ranks[0]
            wait = first.wait("settled", "the end of a step", self._deadlines.standstill_s)
            return int(await calls.answer(first.handle.settled.remote(), wait))
        except (IndexError, ActorDiedError, DeadlineError) as error:
            return await self._replace(f"gone: {error}")

    def adapter(self, step: int) -> Any:
        """Returns a reference to the adapter of a committed step."""
        return self._ranks[0].handle.adapter.remote(step)

    def stop(self) -> None:
        """Ends the actors."""
        for actor in self._ranks:
            ray.kill(actor.handle)
        self._ranks = []
        if self._together is not None:
            remove_placement_group(self._together)
            self._together = None

    async def _train(self, request: TrainRequest, report: Callable[[Any], None]) -> dict[str, float]:
        await self.settled()
        first = self._ranks[0]
        alive = first.wait("progress", "a sign of life", self._deadlines.standstill_s)

        def waits(actor: Placed) -> calls.Wait:
            return actor.wait("train", f"progress of step {request.step + 1}", self._deadlines.standstill_s)

        async def rank(actor: Placed) -> dict[str, float]:
            return await calls.watch(
                actor.handle.train.remote(request),
                waits(actor),
                lambda: calls.answer(first.handle.progress.remote(), alive),
                report if actor is first else lambda _: None,
            )

        results = await asyncio.gather(*(rank(actor) for actor in self._ranks), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        # A rank that died explains what the others say of it.
        for failure in sorted(failures, key=lambda failure: not isinstance(failure, ActorDiedError)):
            raise failure
        return cast(dict[str, float], results[0])

    async def _replace(self, why: str) -> int:
        logger.warning("trainer %s was %s. Starting again from the newest checkpoint.", self._name, why)
        self.stop()
        await self.place()
        return await self.start()
