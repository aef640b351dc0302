"""The trainer behind Ray: one thread that computes, and an event loop that answers how far it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from art_ray.actors import calls
from art_ray.serving.adapter import AdapterVersion
from art_ray.training.checkpoint import step_dir
from art_ray.training.config import RankSettings, TrainerSpec
from art_ray.training.memory import keep_freed_memory
from art_ray.training.policy import check_base_model
from art_ray.training.ranks import served_store
from art_ray.training.trainer import Trainer
from art_ray.types import TrainConfig

__all__ = ["TrainRequest", "TrainerActor"]

T = TypeVar("T")


# driver -> trainer actor
@dataclass(frozen=True)
class TrainRequest:
    """One train call. A request for a step that is already committed returns what was committed."""

    step: int
    """The step before training."""
    groups: tuple[Any, ...]
    """References to trajectory groups, in order."""
    config: TrainConfig
    fetch_timeout_s: float
    request_id: str
    """Kept with the step: another call for the same step is refused."""
    supervised: bool = False
    """Whether the groups' answers are examples to imitate, instead of attempts to compare."""


@ray.remote
class TrainerActor:
    """A `Trainer`, reached through Ray. It decides nothing.

    The trainer is made when it is first needed, not in `__init__`: what goes wrong then reaches the caller as the error
    it is. It resumes from the newest checkpoint.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        keep_freed_memory()
        self._spec = _with_all_cores(spec)
        # torch keeps its number of threads per calling thread: everything runs on this one.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._trainer: Trainer | None = None
        self._store: Any = None
        self._progress: dict[str, Any] = {}

    async def check(self) -> str:
        """Checks the specification against the base model, without loading weights; returns the node's address."""
        await self._run(lambda: check_base_model(self._spec.base_model, self._spec.lora))
        return ray.util.get_node_ip_address()

    async def open_meeting(self) -> str:
        """Returns where the ranks find each other; the first rank keeps it open while it lives."""
        host = ray.util.get_node_ip_address()
        self._store = await asyncio.to_thread(served_store, host)
        return f"store://{host}:{self._store.port}"

    async def start(self, place: RankSettings) -> int:
        """Loads the policy and returns the step it stands at."""
        self._spec = self._spec.updated({"place": place})
        return await self._run(lambda: self._made().step)

    async def train(self, request: TrainRequest) -> dict[str, float]:
        """Trains one step and commits it; returns its metrics."""
        return await self._run(lambda: self._train(request))

    async def progress(self) -> dict[str, Any]:
        """Returns how far the current train call is, as the trainer last reported it."""
        return self._progress

    async def settled(self) -> int:
        """Returns the step of the newest commit, once no step is being taken any more."""
        return await self._run(lambda: self._made().step)

    async def adapter(self, step: int) -> AdapterVersion:
        """Returns the adapter of a committed step, as the serving actors take it."""
        path = step_dir(self._spec.checkpoints_dir, step)
        return await asyncio.to_thread(AdapterVersion.from_directory, step, path)

    def _train(self, request: TrainRequest) -> dict[str, float]:
        self._progress = {}
        what = f"the {len(request.groups)} trajectory groups of step {request.step}"
        groups = calls.fetch(list(request.groups), what, request.fetch_timeout_s)
        trainer = self._made()
        how: dict[str, Any] = {"progress": self._report, "request_id": request.request_id}
        if request.supervised:
            trajectories = [trajectory for group in groups for trajectory in group]
            return trainer.sft(trajectories, request.config, request.step, **how)
        return trainer.train(groups, request.config, request.step, **how)

    def _report(self, progress: Mapping[str, Any]) -> None:
        self._progress = dict(progress)

    def _made(self) -> Trainer:
        if self._trainer is None:
            self._trainer = Trainer(self._spec)
        return self._trainer

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _with_all_cores(spec: TrainerSpec) -> TrainerSpec:
    """Returns `spec` with a number of threads: Ray limits an actor to as many as the CPUs it reserves.

    The trainer computes while the engine idles, so that both may use every core of the node.
    """
    if spec.trainer.num_threads is not None:
        return spec
    share = max(1, len(os.sched_getaffinity(0)) // spec.trainer.ranks)
    return spec.updated({"trainer": spec.trainer.updated({"num_threads": share})})
