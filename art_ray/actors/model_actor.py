"""The ledger behind Ray: on the driver's node, for everyone on the cluster who logs to one model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from art_ray.actors import calls
from art_ray.actors.placement import Placed, driver_node, placed
from art_ray.ledger.ledger import Ledger, LedgerConfig, LogReceipt
from art_ray.ledger.paths import model_dir
from art_ray.ledger.rollouts import KeptRollouts
from art_ray.trajectories import TrajectoryGroup

__all__ = ["ActorLedger", "LogRequest", "ModelActor"]

REPORTERS_VARIABLES = ("WANDB_",)
FETCHED_AT_ONCE = 8
"""Groups in the model actor's memory at one time while it writes a parquet file."""


# driver -> model actor
@dataclass(frozen=True)
class LogRequest:
    """One call of `log`. A request that comes twice is carried out once."""

    request_id: str
    groups: tuple[Any, ...] | None
    """References to trajectory groups, in order; None: only metrics are logged."""
    split: str
    step: int
    metrics: Mapping[str, Any] | None
    fetch_timeout_s: float


# driver -> model actor
@dataclass(frozen=True)
class Environment:
    """What reporters read from the environment, as the driver has it: keys among them, so it is shown nowhere."""

    variables: dict[str, str] = field(repr=False)

    @classmethod
    def of_driver(cls) -> Environment:
        """Returns the variables of this process that reporters may need, and no others."""
        return cls({name: value for name, value in os.environ.items() if name.startswith(REPORTERS_VARIABLES)})


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)
class ModelActor:
    """A `Ledger`, reached through Ray. It decides nothing."""

    def __init__(self, config: LedgerConfig, environment: Environment) -> None:
        os.environ.update(environment.variables)
        self._ledger = Ledger(config)
        self._kept = KeptRollouts(model_dir(config.base_path, config.project, config.name))

    def log(self, request: LogRequest) -> LogReceipt:
        """Carries out `request`; when it returns, everything is on disk."""
        return self._ledger.log(
            None if request.groups is None else _fetched(request),
            split=request.split,
            step=request.step,
            metrics=request.metrics,
            request_id=request.request_id,
        )

    def learning_rate_multiplier(self) -> float:
        """See `Ledger.learning_rate_multiplier`."""
        return self._ledger.learning_rate_multiplier()

    def steps_to_keep(self, metric: str, latest_step: int) -> list[int]:
        """See `Ledger.steps_to_keep`."""
        return self._ledger.steps_to_keep(metric, latest_step)

    def keep(self, step: int, key: str, group: tuple[Any], timeout_s: float) -> None:
        """Writes a finished group, given as a reference in a tuple, so that it outlives every process."""
        [kept] = calls.fetch(list(group), f"the finished group {key!r}", timeout_s)
        self._kept.keep(step, key, kept)

    def recall(self, step: int, key: str) -> tuple[TrajectoryGroup | None, bool]:
        """Returns a kept group, and whether there is one."""
        group = self._kept.recall(step, key)
        return group, group is not None

    def forget_before(self, step: int) -> None:
        """Deletes the groups that were kept for earlier steps."""
        self._kept.forget_before(step)

    def close(self, timeout_s: float) -> None:
        """Drains the reporters for up to `timeout_s` seconds."""
        self._ledger.close(timeout_s)


def _fetched(request: LogRequest) -> Iterator[TrajectoryGroup]:
    refs = list(request.groups or ())
    for start in range(0, len(refs), FETCHED_AT_ONCE):
        part = refs[start : start + FETCHED_AT_ONCE]
        what = f"trajectory groups {start} to {start + len(part) - 1} of split {request.split!r}, step {request.step}"
        yield from calls.fetch(part, what, request.fetch_timeout_s)


class ActorLedger:
    """An `art_ray.ledger.port.LedgerPort` whose ledger is a `ModelActor` on the caller's node."""

    def __init__(self, config: LedgerConfig, *, timeout_s: float) -> None:
        self.config = config
        self._timeout_s = timeout_s
        self._actor: Placed | None = None
        self.is_closed = False

    def is_reference(self, item: object) -> bool:
        """Returns whether `item` is a Ray object reference."""
        return isinstance(item, ray.ObjectRef)

    async def share(self, groups: Sequence[Any]) -> list[Any]:
        """Puts the groups into the object store, off the event loop; references stay as they are."""
        return await asyncio.to_thread(
            lambda: [group if self.is_reference(group) else ray.put(group) for group in groups]
        )

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
        refs = None if groups is None else tuple(groups)
        request = LogRequest(request_id, refs, split, step, metrics, fetch_timeout_s=self._timeout_s)
        return await self._answer("log", self._placed().handle.log.remote(request), f"split {split!r} of step {step}")

    async def learning_rate_multiplier(self) -> float:
        """See `LedgerPort.learning_rate_multiplier`."""
        ref = self._placed().handle.learning_rate_multiplier.remote()
        return await self._answer("learning_rate_multiplier", ref, "the trend of train/reward_std_dev")

    async def steps_to_keep(self, metric: str, latest_step: int) -> list[int]:
        """See `LedgerPort.steps_to_keep`."""
        ref = self._placed().handle.steps_to_keep.remote(metric, latest_step)
        return await self._answer("steps_to_keep", ref, f"the best step by {metric}")

    async def keep(self, step: int, key: str, group: Any) -> None:
        """Has the group behind a reference written, so that it outlives every process."""
        ref = self._placed().handle.keep.remote(step, key, (group,), self._timeout_s)
        await self._answer("keep", ref, f"the group {key!r} of step {step}")

    async def recall(self, step: int, key: str) -> Any:
        """Returns a reference to a kept group; None where there is none. The group itself stays where it is."""
        group, is_there = self._placed().handle.recall.options(num_returns=2).remote(step, key)
        return group if await self._answer("recall", is_there, f"the group {key!r} of step {step}") else None

    async def forget_before(self, step: int) -> None:
        """Has the groups deleted that were kept for earlier steps."""
        await self._answer("forget_before", self._placed().handle.forget_before.remote(step), "old groups to go")

    async def close(self, timeout_s: float) -> None:
        """Drains the reporters, then ends the actor, for good."""
        self.is_closed = True
        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        try:
            wait = actor.wait("close", "the reporters' backlog", timeout_s + 5)
            await calls.answer(actor.handle.close.remote(timeout_s), wait)
        finally:
            ray.kill(actor.handle)

    def _placed(self) -> Placed:
        if self._actor is None:
            self._actor = placed(
                ModelActor,
                f"model:{self.config.project}/{self.config.name}",
                self.config,
                Environment.of_driver(),
                node=ray.util.get_node_ip_address(),
                scheduling_strategy=driver_node(),
            )
        return self._actor

    async def _answer(self, method: str, ref: Any, waiting_for: str) -> Any:
        return await calls.answer(ref, self._placed().wait(method, waiting_for, self._timeout_s))
