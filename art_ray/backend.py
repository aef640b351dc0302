"""What a backend is: it trains, serves, saves, and deletes what it is told to. It remembers nothing else.

A backend has no logging, reads no `history.jsonl`, and knows nothing of reporters: whoever holds the model owns those.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from art_ray.types import TrainConfig

if TYPE_CHECKING:
    from art_ray.model import Model, TrainableModel

__all__ = ["Backend", "Call", "CommittedStep"]


@dataclass(frozen=True)
class CommittedStep:
    """The newest step of a backend, as it was committed."""

    step: int
    split: str
    """Under which its metrics are logged: "train" or "sft"."""
    request_id: str
    """Of the call that took it."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Call:
    """Which step a call takes, and whose it is: a step that another call has taken is not given out as this one's."""

    request_id: str
    step: int
    """The step before training."""


@runtime_checkable
class Backend(Protocol):
    """The interface between a model and whatever trains and serves it.

    Every method may be called again with the same arguments after a failure, and then has the effect of one call.
    """

    async def _open_ledger(self, model: Model) -> Any:
        """Returns where the ledger of `model` is reached (an `art_ray.ledger.port.LedgerPort`); None: in this process.

        It is the model's, whoever keeps it: a backend gives it a place and never reads or writes it.
        """
        ...

    async def _prepare_backend_for_training(self, model: TrainableModel) -> tuple[str, str]:
        """Makes `model` trainable and served; returns the base URL of its OpenAI API and the key for it.

        Starts from the newest complete checkpoint, or writes step 0. Idempotent.
        """
        ...

    async def _get_step(self, model: TrainableModel) -> int:
        """Returns the step of the newest complete checkpoint; 0 where there is none. Starts nothing."""
        ...

    async def _get_committed(self, model: TrainableModel) -> CommittedStep | None:
        """Returns the newest step that a call took, once none is being taken; None where there is none.

        A process that died between the commit and the line in the history left that line to its successor.
        """
        ...

    def _check_prepared(self, model: TrainableModel) -> None:
        """Raises `ConfigError` unless `model` can be trained now; asked before anything of a call is remembered."""
        ...

    def _train_model(
        self,
        model: TrainableModel,
        groups: Sequence[Any],
        config: TrainConfig,
        dev_config: Mapping[str, Any],
        *,
        call: Call,
    ) -> AsyncIterator[dict[str, float]]:
        """Trains one step on `groups` (groups, or references to them) and yields metrics as they come.

        When the iterator ends, the new checkpoint is committed and the next request is served by it.

        Args:
            model: the model to train.
            groups: trajectory groups in order.
            config: the options, complete; the learning rate is the one to use.
            dev_config: what the user passed as `_config`, already merged into `config`.
            call: which step to take. One that this very call has taken before is not taken again.
        """
        ...

    def _sft_model(
        self, model: TrainableModel, groups: Sequence[Any], config: TrainConfig, *, call: Call
    ) -> AsyncIterator[dict[str, float]]:
        """Like `_train_model`, but the trajectories' answers are examples to imitate, whatever their rewards."""
        ...

    def _holding(self, model: TrainableModel, step: int) -> AbstractAsyncContextManager[bool]:
        """Keeps version `step`, which is served, beside those that are published within the block.

        Gives whether it does: a backend that serves one version at a time serves this one until the next is published.
        """
        ...

    async def _delete_checkpoint_files(self, model: TrainableModel, steps_to_keep: Sequence[int]) -> None:
        """Deletes every checkpoint but those of `steps_to_keep` and those being served. Starts nothing."""
        ...
