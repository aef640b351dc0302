"""The small values that every part shares: training options, results, outcomes and versions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, NewType, Self

import pydantic

from art_ray.errors import ConfigError, UnknownKeyError

__all__ = ["FrozenConfig", "Outcome", "PolicyVersion", "TrainConfig", "TrainResult", "nearest"]

PolicyVersion = NewType("PolicyVersion", int)
"""The training step that made a set of weights: 0 is the untrained policy. On every token, adapter and checkpoint."""


def nearest(word: str, known: list[str]) -> str:
    """Returns " (nearest: 'x')" for the known word most like `word`, or an empty string."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (nearest: {matches[0]!r})" if matches else ""


class FrozenConfig(pydantic.BaseModel):
    """Base of all configurations: immutable, validated, and an unknown key is an error.

    Raises:
        UnknownKeyError: a key that does not exist; names the nearest one that does.
        ConfigError: a value of the wrong type or out of range; says which and what was given.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)

    def __init__(self, **values: Any) -> None:
        known = list(type(self).model_fields)
        for key in values:
            if key not in known:
                raise UnknownKeyError(
                    f"{type(self).__name__} has no key {key!r}{nearest(key, known)}. Known keys: {', '.join(known)}."
                )
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {_shown(e['input'])}" for e in error.errors()
            )
            raise ConfigError(f"{type(self).__name__}: {details}") from None

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy with `values` in place of the fields of those names, validated like a new one."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **values})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy; `update` is validated as by `updated`."""
        copy = super().model_copy(deep=deep)
        return copy.updated(update) if update else copy


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class TrainConfig(FrozenConfig):
    """How one call of `model.train` learns.

    The keys after `beta` are experimental: they may also be given in `model.train(..., _config={...})`, which wins.
    """

    learning_rate: float = pydantic.Field(default=5e-6, ge=0, allow_inf_nan=False)
    """Step size of AdamW."""
    beta: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL divergence to the base model; 0 leaves it out, and its forward pass too."""

    loss: Literal["cispo", "ppo"] = "cispo"
    """The policy-gradient surrogate; see `art_ray.training.loss`."""
    epsilon: float | None = pydantic.Field(default=None, ge=0, allow_inf_nan=False)
    """The importance ratio is clipped below 1 - epsilon. None: 1.0 for cispo, 0.2 for ppo."""
    epsilon_high: float | None = pydantic.Field(default=None, ge=0, allow_inf_nan=False)
    """The importance ratio is clipped above 1 + epsilon_high. None: 4.0 for cispo, 0.2 for ppo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One importance ratio per token, or one (the geometric mean) per sequence."""
    truncated_importance_sampling: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """Upper bound on the sampler-to-trainer weight of each token; None leaves the weight out."""
    scale_rewards: bool = True
    """Whether advantages are divided by the spread of rewards in their group."""
    allow_training_without_logprobs: bool = False
    """Whether assistant messages without sampled token ids are tokenized by the template and trained with ratio 1."""
    scale_learning_rate_by_reward_std_dev: bool = False
    """Whether the learning rate follows the trend of `train/reward_std_dev`; applied by the model."""
    optimizer_steps_per_train: int = pydantic.Field(default=1, ge=1)
    """Optimizer steps per train call; a property of the algorithm, not of the packing."""
    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """The learning rate rises linearly over this many optimizer steps, counted from the first step of the run."""
    max_grad_norm: float = pydantic.Field(default=1.0, gt=0)
    """Gradients are scaled down to this Euclidean norm; infinity leaves them alone."""


class TrainResult(pydantic.BaseModel):
    """What `model.train` returns."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    step: int
    """The step after training, which is also the version that is now served."""
    metrics: dict[str, float]
    """What was logged as `train/…` at that step, without the prefix."""


class Outcome(StrEnum):
    """What became of one rollout. Every rollout that is submitted for training ends as exactly one of these."""

    SCORED = "scored"
    """It has a finite reward; nothing is known yet about training (the state of a rollout that is only logged)."""
    TRAINED = "trained"
    """At least one of its tokens entered the loss."""
    NOT_SCORED = "not_scored"
    """Its reward is NaN: kept, but in no mean, and not trained."""
    FAILED = "failed"
    """The rollout raised; type, message and traceback are kept."""
    NO_SPREAD = "no_spread"
    """All rewards of its group are equal, so that there is nothing to prefer."""
    NO_LOGPROBS = "no_logprobs"
    """An answer in it lacks token ids with log-probabilities, or it has none, so that its tokens are not known exactly.
    Logging, which knows no `TrainConfig`, says so of each such row, `allow_training_without_logprobs` or not."""
    RESTRICTED_SAMPLING = "restricted_sampling"
    """It was sampled with top-p, top-k, a penalty or temperature 0: the importance ratio is not defined."""
    TOO_LONG = "too_long"
    """A sequence of it is longer than a row of the trainer."""
    STALE = "stale"
    """It was sampled by a version older than allowed."""
