"""A stub of a backend, for tests of what stands in front of one."""

from __future__ import annotations

import contextlib

import art_ray
from art_ray.backend import CommittedStep
from art_ray.errors import ConfigError


async def at_once(step: int) -> None:
    pass


class StubBackend:
    """A backend that trains nothing: it takes a step in its head, and fails where a test tells it to."""

    def __init__(self) -> None:
        self.step = 0
        self.seen: list[tuple[list, art_ray.TrainConfig]] = []
        self.kept: list[int] | None = None
        self.fail_before = self.fail_after = False
        self.during = lambda: None
        self.training = at_once
        """Awaited before a step is taken, with the step before it."""
        self.committed: CommittedStep | None = None
        self.prepared = True
        self.held: list[int] = []
        self.holds_versions = False

    async def _open_ledger(self, model):
        return None

    async def _prepare_backend_for_training(self, model):
        if not self.prepared:
            raise ConfigError("cannot be prepared")
        return "http://127.0.0.1:9/v1", "a-secret-key"

    async def _get_step(self, model):
        return self.step

    async def _get_committed(self, model):
        return self.committed

    def _check_prepared(self, model):
        if not self.prepared:
            raise ConfigError("not prepared")

    async def _train_model(self, model, groups, config, dev_config, *, call):
        self.seen.append((list(groups), config))
        await self.training(self.step)
        if self.fail_before:
            raise RuntimeError("lost before the step")
        self._take(call, "train")
        if self.fail_after:
            raise RuntimeError("lost after the step")
        self.during()
        yield {"loss": 1.0, "seconds": 2.0, "num_groups_submitted": 1.0}
        yield {"loss": 3.0}

    async def _sft_model(self, model, groups, config, *, call):
        self.seen.append((list(groups), config))
        self._take(call, "sft")
        yield {"loss": 0.5}

    def _take(self, call, split):
        if self.committed is None or self.committed.request_id != call.request_id:
            assert call.step == self.step
            self.step += 1
            metrics = {"loss": 2.0, "num_groups_submitted": 1.0}
            self.committed = CommittedStep(self.step, split, call.request_id, metrics)

    @contextlib.asynccontextmanager
    async def _holding(self, model, step):
        self.held.append(step)
        try:
            yield self.holds_versions
        finally:
            self.held.remove(step)

    async def _delete_checkpoint_files(self, model, steps_to_keep):
        self.kept = sorted(steps_to_keep)


class StubBackendOnRay(StubBackend):
    """The same with the ledger on an actor, so that rollouts on workers can be logged."""

    async def _open_ledger(self, model):
        from art_ray.actors.model_actor import ActorLedger

        return ActorLedger(model._ledger_config(), timeout_s=60)
