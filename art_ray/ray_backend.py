"""Wires the actors: a ledger on the driver's node, a trainer, and serving replicas, on a Ray cluster."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import ray

from art_ray.actors import calls
from art_ray.actors.deadlines import Deadlines
from art_ray.actors.fleet_actor import FleetActor, FleetSpec
from art_ray.actors.model_actor import ActorLedger
from art_ray.actors.placement import Placed, driver_node, ended, host_for_others, num_gpus, placed, require
from art_ray.actors.trainer_actor import TrainRequest
from art_ray.actors.trainer_group import TrainerGroup
from art_ray.backend import Call, CommittedStep
from art_ray.errors import ActorError, ConfigError, DeadlineError, ServingError
from art_ray.ledger.paths import model_dir
from art_ray.model import Model, TrainableModel
from art_ray.progress import bar, elapsed
from art_ray.serving.config import ServingConfig
from art_ray.serving.fleet import Address
from art_ray.serving.guard import Guard, variables_set
from art_ray.serving.listener import reserved_socket
from art_ray.serving.spec import EngineSpec
from art_ray.training import checkpoint
from art_ray.training.config import LoraSettings, TrainerConfig, TrainerSpec
from art_ray.types import TrainConfig

__all__ = ["Deadlines", "RayBackend"]

logger = logging.getLogger(__name__)

PEFT_NAMES = {"lora_alpha": "alpha", "lora_dropout": "dropout"}
"""PEFT's names of LoRA settings, as `peft_args` may give them, and ours."""
LOCAL_RUN = "ART_RAY_LOCAL_RUN"
"""Environment variable of the processes of a Ray instance that a backend started: a guard ends them with the driver."""


@dataclass
class _Running:
    """The actors of one model, and what they were last told."""

    trainer: TrainerGroup
    spec: TrainerSpec
    serving: ServingConfig
    sleeps: bool = False
    """Whether the engine gives its memory back while the trainer works."""
    fleet: Placed | None = None
    port: socket.socket | None = None
    """Keeps the fleet's port for it, whatever becomes of its actor."""
    serves: Any = None
    """Reference to the fleet's service, which Ray takes up again if it has to restart the actor."""
    address: Address | None = None
    key: str = field(default="", repr=False)
    published: set[int] = field(default_factory=set)
    """Steps that replicas were given."""
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each of its actors asked of Ray."""


class RayBackend:
    """Trains and serves on a Ray cluster: a trainer actor and vLLM actors for each model, its ledger beside the driver.

    Uses the Ray that the process is connected to; otherwise the cluster that `address` or the environment's
    `RAY_ADDRESS` names; otherwise a local instance of its own, which ends with it.

    Args:
        trainer: how the trainer computes.
        lora: the adapter that is trained.
        serving: how the policy is served.
        path: base path of the checkpoints; None: each model's own `base_path`.
        address: a Ray address, "auto" for the cluster that runs on this machine, or "local" for an instance of its own.
        deadlines: how long each answer may take.
    """

    def __init__(
        self,
        *,
        trainer: TrainerConfig | None = None,
        lora: LoraSettings | None = None,
        serving: ServingConfig | None = None,
        path: str | None = None,
        address: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._trainer_config = trainer or TrainerConfig()
        self._lora = lora or LoraSettings()
        self._serving = serving or ServingConfig()
        self._path = path
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._deadlines = deadlines or Deadlines()
        self._owns_ray = False
        self._guard: Guard | None = None
        self._registered_exit = False
        self._models: dict[tuple[str, str, str], _Running] = {}
        self._ledgers: dict[tuple[str, str, str], ActorLedger] = {}
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the actors of this backend, and the Ray instance if it is its own. Committed steps stay."""
        models, self._models = list(self._models.values()), {}
        ledgers, self._ledgers = list(self._ledgers.values()), {}
        async with contextlib.AsyncExitStack() as ending:  # in reverse order, each whatever became of the others
            if self._guard is not None:
                guard, self._guard = self._guard, None
                ending.push_async_callback(asyncio.to_thread, guard.end)
            if self._owns_ray:
                self._owns_ray = False
                ending.callback(ray.shutdown)
            for ledger in ledgers:
                ending.push_async_callback(ledger.close, self._deadlines.stop_s)
            for running in models:
                ending.push_async_callback(self._stop, running)

    # ── the Backend protocol ─────────────────────────────────────────────────────────────────────────────────────

    async def _open_ledger(self, model: Model) -> ActorLedger:
        """Returns the ledger of `model` as an actor on this node."""
        self._connect()
        config = model._ledger_config()
        config = config.updated({"base_path": _absolute(config.base_path)})
        ledger = self._ledgers.get(_key(model))
        if ledger is None or ledger.is_closed:
            ledger = self._ledgers[_key(model)] = ActorLedger(config, timeout_s=self._deadlines.ledger_s)
        if ledger.config.report_metrics != config.report_metrics:
            raise ConfigError(
                f"model {model.name!r} is registered with report_metrics={ledger.config.report_metrics}, and now with "
                f"{config.report_metrics}: close that model first"
            )
        return ledger

    async def _prepare_backend_for_training(self, model: TrainableModel) -> tuple[str, str]:
        """Starts trainer and replicas from the newest complete checkpoint; returns the API's base URL and key.

        Where they run already, sees to it that the newest step is what they serve.
        """
        self._connect()
        async with self._starting:
            running = self._models.get(_key(model))
            spec, serving = self._options_of(model)
            if running is not None and (running.spec, running.serving) != (spec, serving):
                raise ConfigError(
                    f"model {model.name!r} is registered already, on {running.spec.base_model!r} or with other "
                    "options: give this one another name, or close the backend first"
                )
            if running is not None and not await self._answers(running):
                await self._stop(self._models.pop(_key(model)))
                running = None
            if running is None:
                running = self._models[_key(model)] = await self._start(model, spec, serving)
            else:
                await self._publish_newest(running)
        assert running.address is not None
        return running.address.base_url, running.key

    async def _get_step(self, model: TrainableModel) -> int:
        """Returns the newest complete checkpoint's step; reads the disk only."""
        return checkpoint.newest_step(self._checkpoints_dir(model)) or 0

    async def _get_committed(self, model: TrainableModel) -> CommittedStep | None:
        """Returns the newest step with its metrics, from its manifest."""
        if (running := self._models.get(_key(model))) is not None:
            await running.trainer.settled()
        step = await self._get_step(model)
        if step == 0:
            return None
        manifest = checkpoint.read_manifest(self._checkpoints_dir(model), step)
        if manifest.request_id is None:
            return None
        split = manifest.request_id.split("-", 1)[0]
        return CommittedStep(step, split, manifest.request_id, dict(manifest.metrics))

    def _check_prepared(self, model: TrainableModel) -> None:
        """Raises `ConfigError` unless trainer and replicas of `model` were started here."""
        self._running(model)

    async def _train_model(
        self,
        model: TrainableModel,
        groups: Sequence[Any],
        config: TrainConfig,
        dev_config: Mapping[str, Any],
        *,
        call: Call,
    ) -> AsyncIterator[dict[str, float]]:
        """Trains one step, then publishes it to every replica; yields the step's metrics."""
        async for metrics in self._learn(model, self._request(groups, config, call, supervised=False)):
            yield metrics

    async def _sft_model(
        self, model: TrainableModel, groups: Sequence[Any], config: TrainConfig, *, call: Call
    ) -> AsyncIterator[dict[str, float]]:
        """Trains one step on the groups' answers as examples, then publishes it; yields the step's metrics."""
        async for metrics in self._learn(model, self._request(groups, config, call, supervised=True)):
            yield metrics

    @contextlib.asynccontextmanager
    async def _holding(self, model: TrainableModel, step: int) -> AsyncIterator[bool]:
        """Leases version `step` within the block and gives True.

        Gives False where weights are merged, and where the engine sleeps during a step and answers for no version.
        """
        running = self._running(model)
        assert running.address is not None
        if running.address.weights == "merged" or running.sleeps:
            yield False
            return
        fleet, holder = _fleet_of(running), f"hold-{uuid.uuid4().hex}"
        await self._lease(running, step, holder)
        renewing = asyncio.create_task(self._renew(running, step, holder))
        try:
            yield True
        finally:
            renewing.cancel()
            wait = fleet.wait("release", f"version {step} to be let go", self._deadlines.stop_s)
            try:
                await calls.answer(fleet.handle.release.remote(holder), wait)
            except (ActorError, DeadlineError) as error:  # the lease ends by its time
                logger.warning("%s", error)

    async def _delete_checkpoint_files(self, model: TrainableModel, steps_to_keep: Sequence[int]) -> None:
        """Deletes the other checkpoints' directories; those that a replica serves stay."""
        directory, keep = self._checkpoints_dir(model), set(steps_to_keep)
        if (running := self._models.get(_key(model))) is not None:
            keep |= await self._held(running)
        await asyncio.to_thread(checkpoint.delete_all_but, directory, keep)

    # ── its parts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        # In the caller's own thread: only the main thread can take over SIGTERM, which ends a job in order.
        if not self._registered_exit:
            self._registered_exit = True
            atexit.register(self._end_at_exit)
        if ray.is_initialized():
            return
        local = self._address == "local"
        options: dict[str, Any] = {"log_to_driver": True, "logging_level": "error"}
        if local:
            # Trainer and engine take turns, so that a logical core for each is there even on one real one.
            options |= {"include_dashboard": False, "num_cpus": max(2, os.cpu_count() or 1)}
            self._guard = Guard()
            # Process titles are written over the environment otherwise, by which the guard finds a run's processes.
            marks: dict[str, str | None] = {LOCAL_RUN: self._guard.run, "SPT_NOENV": "1"}
        else:
            marks = {}
        with variables_set(marks):
            ray.init(address=self._address, **options)
        self._owns_ray = True

    def _end_at_exit(self) -> None:
        """Ends what a script that never called `close` left running."""
        if (self._models or self._ledgers) and ray.is_initialized():
            asyncio.run(self.close())

    async def _start(self, model: TrainableModel, spec: TrainerSpec, serving: ServingConfig) -> _Running:
        name = f"{model.project}/{model.name}"
        sleeps = self._sleeps(spec, serving)
        trainer, replica = self._resources(serving, sleeps)
        resources = {f"trainer:{name}:{rank}": trainer for rank in range(spec.trainer.ranks)}
        resources |= {f"vllm:{name}:{index}": replica for index in range(serving.replicas)}
        require(resources, beside=[running.resources for running in self._models.values()])
        group = TrainerGroup(f"trainer:{name}", spec, trainer, self._deadlines)
        running = _Running(group, spec, serving, sleeps=sleeps, key=secrets.token_urlsafe(32), resources=resources)
        try:
            await group.place()
            await self._fill(running, model, replica)
        except BaseException:
            await self._stop(running)
            raise
        return running

    async def _fill(self, running: _Running, model: TrainableModel, resources: Mapping[str, float]) -> None:
        """Starts trainer and replicas side by side, and publishes the newest step."""
        name, spec = f"{model.project}/{model.name}", running.spec
        host = host_for_others()
        running.port = reserved_socket(host)
        fleet_spec = FleetSpec(
            name=f"vllm:{name}",
            engine=EngineSpec(
                base_model=spec.base_model,
                name=model.name,
                api_key=running.key,
                max_lora_rank=spec.lora.r,
                serving=running.serving,
                host=host,
                sleeps=running.sleeps,
                seed=secrets.randbits(31),
            ),
            port=running.port.getsockname()[1],
            checkpoints_dir=spec.checkpoints_dir,
            resources=resources,
            place_s=self._deadlines.check_s,
            stop_s=self._deadlines.stop_s,
        )
        fleet = running.fleet = placed(FleetActor, f"fleet:{name}", fleet_spec, scheduling_strategy=driver_node())
        starting = fleet.wait("start", "the first answer of the engines", self._deadlines.start_s)
        async with elapsed(f"starting trainer and engines of {name}"):
            step, running.address = await calls.together(
                running.trainer.start(), calls.answer(fleet.handle.start.remote(), starting)
            )
            if checkpoint.newest_step(spec.checkpoints_dir) != step:
                raise ConfigError(
                    f"the trainer stands at step {step}, which the driver does not see in "
                    f"{spec.checkpoints_dir}: give RayBackend(path=…) a folder that all nodes share"
                )
            await self._publish(running, step)
        running.serves = fleet.handle.serve.remote()

    def _request(self, groups: Sequence[Any], config: TrainConfig, call: Call, *, supervised: bool) -> TrainRequest:
        return TrainRequest(
            call.step, tuple(groups), config, self._deadlines.ledger_s, call.request_id, supervised=supervised
        )

    async def _learn(self, model: TrainableModel, request: TrainRequest) -> AsyncIterator[dict[str, float]]:
        running = self._running(model)
        async with self._awake_afterwards(running):
            metrics = await self._train(running, request)
        yield metrics
        yield {"seconds_weight_sync": await self._publish(running, request.step + 1)}

    @contextlib.asynccontextmanager
    async def _awake_afterwards(self, running: _Running) -> AsyncIterator[None]:
        """Has the engine sleep within the block, where it shares the trainer's GPU."""
        if not running.sleeps:
            yield
            return
        fleet = _fleet_of(running)
        for_sleep = fleet.wait("sleep", "the engine's memory", self._deadlines.publish_s)
        await calls.answer(fleet.handle.sleep.remote(), for_sleep)
        try:
            yield
        finally:
            waking = fleet.wait("wake", "the engine's weights", self._deadlines.publish_s)
            await calls.answer(fleet.handle.wake.remote(), waking)

    async def _train(self, running: _Running, request: TrainRequest) -> dict[str, float]:
        with bar(desc=f"train step {request.step + 1}", unit="row", leave=False) as shown:

            def report(progress: Mapping[str, float]) -> None:
                shown.total = progress.get("num_rows")
                shown.update(progress.get("row", 0) - shown.n)

            return await running.trainer.train(request, report)

    async def _publish(self, running: _Running, step: int) -> float:
        """Has every replica load the adapter of `step`; returns the seconds until the last has answered."""
        started = asyncio.get_running_loop().time()
        await running.trainer.settled()
        running.published.add(step)
        fleet = _fleet_of(running)
        loading = fleet.wait("publish", f"version {step} to be served", self._deadlines.publish_s)
        loaded = await calls.answer(fleet.handle.publish.remote(step, (running.trainer.adapter(step),)), loading)
        if loaded.step != step:
            raise ServingError(f"{fleet.name} was given version {step} and answered {loaded.step}")
        return asyncio.get_running_loop().time() - started

    async def _publish_newest(self, running: _Running) -> None:
        """Publishes the newest step, where a call that was given up after taking it did not."""
        step = await running.trainer.settled()
        if (await self._status(running))["current"] != step:
            await self._publish(running, step)

    async def _lease(self, running: _Running, step: int, holder: str) -> None:
        """Has the replicas keep the adapter of `step` for `holder`, for `pin_ttl_s` seconds from now."""
        fleet = _fleet_of(running)
        leasing = fleet.wait("publish", f"version {step} to be kept", self._deadlines.publish_s)
        await calls.answer(fleet.handle.publish.remote(step, (running.trainer.adapter(step),), holder), leasing)

    async def _renew(self, running: _Running, step: int, holder: str) -> None:
        while True:
            await asyncio.sleep(running.serving.pin_ttl_s / 3)
            try:
                await self._lease(running, step, holder)
            except (ActorError, DeadlineError, ServingError) as error:
                logger.warning("version %d could not be leased anew: %s", step, error)

    async def _held(self, running: _Running) -> set[int]:
        """Returns the steps that replicas hold; where nobody says, all that they were ever given."""
        try:
            return set((await self._status(running))["versions"])
        except (ActorError, DeadlineError):
            return set(running.published)

    async def _answers(self, running: _Running) -> bool:
        """Returns whether the policy is served, or will be again."""
        try:
            return bool((await self._status(running))["state"] != "failed")
        except (ActorError, DeadlineError):
            return False

    async def _status(self, running: _Running) -> dict[str, Any]:
        fleet = _fleet_of(running)
        wait = fleet.wait("status", "a sign of life", self._deadlines.stop_s)
        status: dict[str, Any] = await calls.answer(fleet.handle.status.remote(), wait)
        return status

    async def _stop(self, running: _Running) -> None:
        try:
            if running.fleet is not None:
                await ended(running.fleet, 2 * self._deadlines.stop_s)  # each replica has its own share of it
        finally:
            running.trainer.stop()
            if running.port is not None:
                running.port.close()

    def _sleeps(self, spec: TrainerSpec, serving: ServingConfig) -> bool:
        """Returns whether engine and trainer share a GPU.

        Raises:
            ConfigError: they are to, and cannot.
        """
        sleeps = num_gpus() == 1 if serving.sleeps is None else serving.sleeps
        if sleeps and num_gpus() == 0:
            raise ConfigError("ServingConfig(sleeps=True) needs a GPU to share; the cluster has none")
        if sleeps and (spec.trainer.ranks, serving.replicas, serving.tensor_parallel) != (1, 1, 1):
            raise ConfigError(
                "a GPU is shared by one trainer rank and one replica of one device; asked for "
                f"ranks={spec.trainer.ranks}, replicas={serving.replicas}, tensor_parallel={serving.tensor_parallel} "
                f"on {num_gpus():g} GPU"
            )
        return sleeps

    def _resources(self, serving: ServingConfig, sleeps: bool) -> tuple[dict[str, float], dict[str, float]]:
        """Returns what a trainer rank and a replica ask of Ray: GPUs where the cluster has any, otherwise CPUs."""
        devices = float(serving.tensor_parallel)
        if sleeps:
            return {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.5}
        if num_gpus() > 0:
            return {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": devices}
        return {"CPU": 1.0}, {"CPU": devices}

    def _running(self, model: TrainableModel) -> _Running:
        try:
            return self._models[_key(model)]
        except KeyError:
            raise ConfigError(
                f"model {model.name!r} is not registered with this backend: `await model.register(backend)`"
            ) from None

    def _options_of(self, model: TrainableModel) -> tuple[TrainerSpec, ServingConfig]:
        own = model._internal_config or {}
        lora = self._lora.updated({PEFT_NAMES.get(key, key): v for key, v in own.get("peft_args", {}).items()})
        engine_args = {**self._serving.engine_args, **own.get("engine_args", {})}
        spec = TrainerSpec(
            base_model=_resolved(model.base_model),
            checkpoints_dir=self._checkpoints_dir(model),
            lora=lora,
            trainer=self._trainer_config,
        )
        return spec, self._serving.updated({"engine_args": engine_args})

    def _checkpoints_dir(self, model: TrainableModel) -> Path:
        base = _absolute(self._path or model.base_path)
        return Path(model_dir(base, model.project, model.name)) / "checkpoints"


def _fleet_of(running: _Running) -> Placed:
    assert running.fleet is not None, "it is started before anything is asked of it"
    return running.fleet


def _key(model: Model) -> tuple[str, str, str]:
    return _absolute(model.base_path), model.project, model.name


def _absolute(path: str) -> str:
    """Returns `path` as the driver sees it, since actors have other working directories."""
    return os.path.abspath(os.path.expanduser(path))


def _resolved(base_model: str) -> str:
    """Returns a folder as an absolute path; a hub id unchanged."""
    path = _absolute(base_model)
    return path if os.path.isdir(path) else base_model
