"""What the user holds: a model that samples (`Model`), and one that also learns (`TrainableModel`).

The model owns everything that is remembered. It drives a ledger (in this process, or an actor of the backend) and a
backend, and knows neither's kind.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import httpx
import openai
import pydantic

from art_ray.backend import Backend, Call, CommittedStep
from art_ray.errors import ConfigError, NotRegisteredError
from art_ray.inference import PolicyClient
from art_ray.ledger.history import History
from art_ray.ledger.ledger import LedgerConfig, checked_step
from art_ray.ledger.metrics import checked_metrics
from art_ray.ledger.paths import model_dir, validate_part
from art_ray.ledger.port import InProcessLedger, LedgerPort
from art_ray.ledger.reporters import checked_reporters
from art_ray.serving.pickup import Recording
from art_ray.trajectories import Trajectory, TrajectoryGroup, as_groups
from art_ray.types import TrainConfig, TrainResult, nearest

if TYPE_CHECKING:
    import polars

__all__ = ["Model", "TrainableModel"]


class Model(pydantic.BaseModel):
    """A model that samples: logged, compared, but not trained. It logs at step 0.

    `backend()` is not needed to log: what is remembered is written by this process below `base_path`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

    trainable: ClassVar[bool] = False

    name: str
    project: str
    config: Any = None
    """Whatever the user wants to carry along; kept in `model.json` where it is JSON."""
    inference_api_key: str | None = pydantic.Field(default=None, repr=False)
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    base_path: str = ".art"
    report_metrics: list[str] | None = None
    """Names of reporters; None: wandb if its key is in the environment; []: none."""

    _backend: Backend | None = pydantic.PrivateAttr(default=None)
    _ledger: LedgerPort | None = pydantic.PrivateAttr(default=None)
    _ledger_made_for: tuple[Any, ...] = pydantic.PrivateAttr(default=())
    _is_elsewhere: bool = pydantic.PrivateAttr(default=False)
    """Whether this is a copy that was sent to another process, where it has no backend."""
    _client: openai.AsyncOpenAI | None = pydantic.PrivateAttr(default=None)
    _client_made_for: tuple[Any, ...] = pydantic.PrivateAttr(default=())

    def __init__(self, **values: Any) -> None:
        # Not left to pydantic alone: it would wrap the errors in its own.
        for part in ("project", "name"):
            if part in values:
                validate_part(part, values[part])
        super().__init__(**values)
        checked_reporters(self.report_metrics)

    @pydantic.field_validator("name", "project")
    @classmethod
    def _is_path_part(cls, value: str, about: pydantic.ValidationInfo) -> str:
        return validate_part(str(about.field_name), value)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies the fields; backend, ledger and client are connections, and stay shared."""
        shared = self.__pydantic_private__
        object.__setattr__(self, "__pydantic_private__", None)
        try:
            copied = super().__deepcopy__(memo)
        finally:
            object.__setattr__(self, "__pydantic_private__", shared)
        object.__setattr__(copied, "__pydantic_private__", {**(shared or {}), **self._private_of_a_copy()})
        return copied

    def _private_of_a_copy(self) -> dict[str, Any]:
        """Returns what a deep copy does not share."""
        return {}

    def for_elsewhere(self) -> Self:
        """Returns a copy that can be sent to another process: it samples and can be asked, but holds no connection."""
        copy = self.model_copy()
        unconnected = {name: attribute.get_default() for name, attribute in type(self).__private_attributes__.items()}
        object.__setattr__(copy, "__pydantic_private__", unconnected | {"_is_elsewhere": True})
        return copy

    async def register(self, backend: Backend) -> None:
        """Connects the model to a backend. `base_path` is not touched, and no reporter is opened."""
        ledger = await backend._open_ledger(self)
        if ledger is not self._ledger:
            await self.close()
        self._ledger, self._ledger_made_for = ledger, self._remembered_as()
        self._backend = backend

    def backend(self) -> Backend:
        """Returns the backend.

        Raises:
            NotRegisteredError: there is none yet.
        """
        if self._backend is None:
            raise NotRegisteredError(f"model {self.name!r} has no backend: call `await model.register(backend)` first")
        return self._backend

    def get_inference_name(self, step: int | None = None) -> str:
        """Returns what to send as `model=`; for a hosted model its name there, whatever the step."""
        return self.inference_model_name or self.name

    def openai_client(self) -> openai.AsyncOpenAI:
        """Returns an OpenAI client on the model's own inference URL.

        Raises:
            ConfigError: there is no `inference_base_url`.
        """
        if self.inference_base_url is None:
            raise ConfigError(
                f"model {self.name!r} has no inference_base_url: give it one (and an inference_api_key), "
                "or use a TrainableModel and register a backend"
            )
        return self._client_of(openai.AsyncOpenAI, self.inference_base_url)

    def _client_of(self, kind: type[openai.AsyncOpenAI], base_url: str | None) -> openai.AsyncOpenAI:
        made_for = (base_url, self.inference_api_key)
        if self._client is None or self._client_made_for != made_for:
            # Without a key of its own, a server elsewhere must not get the one that OPENAI_API_KEY holds.
            at_openai = httpx.URL(base_url or "").host.endswith("openai.com")
            key = self.inference_api_key or (None if at_openai else "none")
            self._client, self._client_made_for = kind(base_url=base_url, api_key=key), made_for
        return self._client

    async def get_step(self) -> int:
        """Returns 0: a model that is not trained has one version."""
        return 0

    async def log(
        self,
        trajectories: Iterable[TrajectoryGroup] | Iterable[Trajectory | BaseException] | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Writes trajectories to a parquet file and their mean metrics to the history; on return both are on disk.

        Args:
            trajectories: groups (or references to groups), or trajectories and exceptions, which become one group.
            split: the part of the data they come from; becomes a folder and the metrics' prefix.
            metrics: values for the same line of the history; may stand alone.
            step: the step they belong to; None: `get_step()`.

        Raises:
            TypeError: a mixture, or something that is no trajectory; a metric that is no number, a step that is none.
            InvalidNameError: a split that cannot be a folder's name.
            LedgerWriteError: the disk did not take it; nothing earlier is harmed.
        """
        validate_part("split", split)
        if metrics is not None:
            metrics = checked_metrics(metrics, "metrics")
        ledger = self._remembering()
        groups = [] if trajectories is None else as_groups(trajectories, ledger.is_reference)
        if not groups and not metrics:
            return
        at = await self.get_step() if step is None else checked_step(step)
        await ledger.log(await ledger.share(groups), split=split, step=at, metrics=metrics, request_id=uuid.uuid4().hex)

    def history(self) -> polars.DataFrame:
        """Returns the history as a frame: one row per log call, one column per metric that ever appeared."""
        return self._history().frame()

    def best_step(self, metric: str = "val/reward", mode: Literal["max", "min"] = "max") -> int | None:
        """Returns the step with the best mean of `metric`, the later of equals; None where it was never logged."""
        return self._history().best_step(metric, mode=mode)

    async def close(self, timeout_s: float = 30.0) -> None:
        """Lets the reporters send what they still hold. The model can be used again afterwards."""
        if self._ledger is not None:
            ledger, self._ledger = self._ledger, None
            await ledger.close(timeout_s)

    def _history(self) -> History:
        return History(model_dir(self.base_path, self.project, self.name) / "history.jsonl")

    def _remembering(self) -> LedgerPort:
        if self._ledger is None or self._ledger.is_closed or self._ledger_made_for != self._remembered_as():
            self._ledger, self._ledger_made_for = InProcessLedger(self._ledger_config()), self._remembered_as()
        return self._ledger

    def _remembered_as(self) -> tuple[Any, ...]:
        """Returns the fields that say which ledger is this model's: they may change, in a copy for one."""
        return self.base_path, self.project, self.name, tuple(self.report_metrics or ()), self.report_metrics is None

    def _ledger_config(self) -> LedgerConfig:
        return LedgerConfig(
            base_path=self.base_path,
            project=self.project,
            name=self.name,
            report_metrics=self.report_metrics,
            model_json={"trainable": self.trainable, **self.model_dump(exclude={"inference_api_key", "config"})}
            | {"config": self.config.model_dump() if isinstance(self.config, pydantic.BaseModel) else self.config},
        )


class TrainableModel(Model):
    """A model that learns: its policy lives in a backend, its memory here.

    Args of the constructor beyond `Model`'s:
        base_model: a folder with a checkpoint, or a hub id.
        _internal_config: options of the backend for this model alone: `{"peft_args": {"r": 8, …}, "engine_args": {…}}`.
    """

    trainable: ClassVar[bool] = True

    base_model: str

    _internal_config: dict[str, Any] | None = pydantic.PrivateAttr(default=None)
    _unfinished: _UnfinishedTrain | None = pydantic.PrivateAttr(default=None)
    _learning: asyncio.Lock = pydantic.PrivateAttr(default_factory=asyncio.Lock)
    """Held by the call that takes a step: two at once would both start from the same one."""
    _pinned_step: int | None = pydantic.PrivateAttr(default=None)
    """The version that a pinned copy stays at."""

    def __init__(self, *, _internal_config: Mapping[str, Any] | None = None, **values: Any) -> None:
        super().__init__(**values)
        known = ["peft_args", "engine_args"]
        for key in _internal_config or {}:
            if key not in known:
                raise ConfigError(
                    f"_internal_config has no key {key!r}{nearest(key, known)}. Known: {', '.join(known)}."
                )
        self._internal_config = dict(_internal_config) if _internal_config else None

    async def register(self, backend: Backend) -> None:
        """Connects the model to a backend, which makes it trainable and starts to serve its newest version."""
        await super().register(backend)
        try:
            self.inference_base_url, self.inference_api_key = await backend._prepare_backend_for_training(self)
        except BaseException:
            self._backend = None
            raise
        await self._remember_committed(await backend._get_committed(self))

    def get_inference_name(self, step: int | None = None) -> str:
        """Returns the name to send as `model=`: of the current version, or of the one that `step` pins."""
        step = self._pinned_step if step is None else step
        return self.name if step is None else f"{self.name}@{step}"

    def pinned(self, step: int) -> Self:
        """Returns a copy that stays at `step`, whatever is trained meanwhile: to evaluate one version.

        Its `get_inference_name()` asks for that version, which must be served, its `get_step()` says `step`, so that it
        logs there, and it refuses to train.
        """
        self._remembering()  # one ledger for both
        copy = self.model_copy()
        copy._pinned_step = checked_step(step)
        return copy

    def openai_client(self) -> openai.AsyncOpenAI:
        """Returns an OpenAI client on the served policy; its answers carry what training needs (see `PolicyClient`)."""
        self._check_served()
        return self._client_of(PolicyClient, self.inference_base_url)

    def recording(self) -> Recording:
        """Returns a URL for one rollout of an agent of another framework, whose trajectory is picked up afterwards."""
        self._check_served()
        assert self.inference_base_url is not None
        assert self.inference_api_key is not None
        return Recording(self.inference_base_url, self.inference_api_key)

    async def get_step(self) -> int:
        """Returns the step of the backend's newest complete checkpoint; of a pinned copy, the step it is pinned at."""
        return await self.backend()._get_step(self) if self._pinned_step is None else self._pinned_step

    async def train(
        self,
        groups: Iterable[TrajectoryGroup] | Iterable[Trajectory | BaseException],
        config: TrainConfig | None = None,
        _config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> TrainResult:
        """Logs the groups, trains one step on them, and logs how that went.

        Repeated with the same groups after a failure it takes up where it stopped, and has the effect of one call.

        Args:
            groups: trajectory groups, or references to them.
            config: the options.
            _config: experimental options by name, which win over those of `config`.
            verbose: prints the step's metrics.

        Returns:
            The step after training, and the metrics that were logged there.

        Raises:
            NotRegisteredError: the model has no backend.
            ConfigError: an option that does not exist or cannot work.
            TrainingError, ActorError, DeadlineError: the step could not be taken.
        """
        self._check_trains()
        config = (config or TrainConfig()).updated(_config or {})
        async with self._learning:
            return await self._train(
                as_groups(groups, self._remembering().is_reference), config, _config or {}, verbose
            )

    async def _train(
        self, groups: list[Any], config: TrainConfig, dev_config: Mapping[str, Any], verbose: bool
    ) -> TrainResult:
        ledger = self._remembering()
        call = await self._logged(groups, "train")
        frontend_metrics: dict[str, float] = {}
        if config.scale_learning_rate_by_reward_std_dev:
            multiplier = await ledger.learning_rate_multiplier()
            config = config.updated({"learning_rate": config.learning_rate * multiplier})
            frontend_metrics["learning_rate_multiplier"] = multiplier
        if call.metrics is None:
            training = self.backend()._train_model(self, call.shared, config, dev_config, call=call.of_backend)
            collected = [metrics async for metrics in training]
            call.metrics = {**_means(collected), **frontend_metrics}
        return await self._finished(call, call.metrics, verbose)

    async def sft(
        self,
        trajectories: Iterable[Trajectory] | Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        verbose: bool = False,
    ) -> TrainResult:
        """Takes one supervised step on the trajectories' answers, whatever their rewards, for a warm start.

        Answers with token ids are trained as sampled, other assistant messages by the chat template. Of `config` the
        learning rate, `warmup_steps`, `optimizer_steps_per_train` and `max_grad_norm` play a part. The trajectories and
        the metrics are logged as split `sft`; repetition and errors are those of `train`.
        """
        self._check_trains()
        backend = self.backend()
        async with self._learning:
            call = await self._logged(as_groups(trajectories, self._remembering().is_reference), "sft")
            if call.metrics is None:
                training = backend._sft_model(self, call.shared, config or TrainConfig(), call=call.of_backend)
                call.metrics = _means([metrics async for metrics in training])
            return await self._finished(call, call.metrics, verbose)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> None:
        """Deletes every checkpoint but the latest, the best by `best_checkpoint_metric`, and those being served.

        Raises:
            UnknownMetricError: the metric is not the default and was never logged; nothing is deleted.
        """
        backend, ledger = self.backend(), self._remembering()
        async with self._learning:
            steps = await ledger.steps_to_keep(best_checkpoint_metric, await backend._get_step(self))
            await backend._delete_checkpoint_files(self, steps)

    def _check_served(self) -> None:
        if not (self._is_elsewhere and self.inference_base_url):
            self.backend()

    def _check_trains(self) -> None:
        if self._pinned_step is not None:
            raise ConfigError(f"a copy of {self.name!r} that is pinned at step {self._pinned_step} trains nothing")
        self.backend()._check_prepared(self)

    def for_elsewhere(self) -> Self:
        """See `Model.for_elsewhere`; a pinned copy stays pinned."""
        copy = super().for_elsewhere()
        copy._pinned_step = self._pinned_step
        return copy

    def _private_of_a_copy(self) -> dict[str, Any]:
        return {"_learning": asyncio.Lock(), "_unfinished": None}

    async def _remember_committed(self, committed: CommittedStep | None) -> None:
        """Logs the metrics of the newest step, where the process that took it died before it could."""
        if committed is None:
            return
        known = self._history().column(f"{committed.split}/num_groups_submitted")
        if await asyncio.to_thread(lambda: any(step == committed.step for step, _ in known)):
            return
        await self._remembering().log(
            None,
            split=committed.split,
            step=committed.step,
            metrics=committed.metrics,
            request_id=f"{committed.request_id}-metrics",
        )

    async def _logged(self, groups: list[Any], split: str) -> _UnfinishedTrain:
        """Takes up the unfinished call with these very groups, or begins one at the backend's step; logs its groups."""
        ledger, call = self._remembering(), self._unfinished
        if call is None or (call.split, _identity(call.groups)) != (split, _identity(groups)):
            if call is not None:  # given up by its caller, but perhaps not by the backend
                await self._remember_committed(await self.backend()._get_committed(self))
            call = _UnfinishedTrain(groups, split, await self.get_step(), f"{split}-{uuid.uuid4().hex}")
        self._unfinished = call
        call.shared = call.shared or await ledger.share(call.groups)
        if call.groups:
            await ledger.log(call.shared, split=split, step=call.step, metrics=None, request_id=call.request_id)
        return call

    async def _finished(self, call: _UnfinishedTrain, metrics: dict[str, float], verbose: bool) -> TrainResult:
        """Logs the metrics at the step after training."""
        step = call.step + 1
        await self._remembering().log(
            None, split=call.split, step=step, metrics=metrics, request_id=f"{call.request_id}-metrics"
        )
        self._unfinished = None
        if verbose:
            print(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        return TrainResult(step=step, metrics=metrics)


@dataclass
class _UnfinishedTrain:
    """A train call until it returns: repeated after a failure, it must not count twice."""

    groups: list[Any]
    split: str
    step: int
    """The step before training."""
    request_id: str
    shared: list[Any] = field(default_factory=list)
    """The groups in the form in which ledger and backend take them."""
    metrics: dict[str, float] | None = None
    """Once the backend has taken the step."""

    @property
    def of_backend(self) -> Call:
        """What the backend needs to know of it."""
        return Call(self.request_id, self.step)


def _identity(groups: Sequence[Any]) -> list[Any]:
    """Returns what is equal for two lists of the very same trajectories, or of references to the same groups."""
    return [
        (*map(id, group), *((f.type, f.message, f.traceback) for f in group.exceptions))
        if isinstance(group, TrajectoryGroup)
        else group
        for group in groups
    ]


def _means(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each key over the dicts that have it."""
    keys = dict.fromkeys(key for metrics in dicts for key in metrics)
    return {key: math.fsum(d[key] for d in dicts if key in d) / sum(key in d for d in dicts) for key in keys}
