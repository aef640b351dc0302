"""What a trainer is made with: the base model, the LoRA adapter, and how the work is cut. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from art_ray.errors import UnsupportedLoraError
from art_ray.types import FrozenConfig, nearest

__all__ = ["LoraSettings", "RankSettings", "TrainerConfig", "TrainerSpec", "check_target_modules"]

_OUTPUT_OR_EMBEDDING = ("lm_head", "embed_out", "embed_tokens", "wte", "wpe", "word_embeddings", "embed_in")
"""Last name parts of output and embedding layers, as the architectures of transformers call them."""


class LoraSettings(FrozenConfig):
    """The adapter that is trained. The base model's own weights never change.

    Raises:
        UnsupportedLoraError: a target that the serving engine would silently leave at its base weights, so that the
            policy that samples would not be the policy that is trained.
    """

    r: int = pydantic.Field(default=8, ge=1)
    """Rank of every adapter matrix."""
    alpha: float = pydantic.Field(default=16, gt=0)
    """The adapter's product is scaled by alpha / r."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that are dropped while training. Above 0 the trainer's log-probabilities of sampled
    tokens are no longer those of the sampler."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Every linear layer but the output layer, or the last name parts of the layers to adapt (`q_proj`, …)."""
    modules_to_save: list[str] | None = None
    """Accepted only to be refused with a reason: modules trained whole are not served."""
    init_lora_weights: bool = True
    """Whether the second matrix starts at zero, so that step 0 is the base model; False is for tests."""

    def __init__(self, **values: Any) -> None:
        # Not a pydantic validator: its error would arrive as a ConfigError without the more telling class.
        _refuse_what_is_not_served(values)
        super().__init__(**values)


def _refuse_what_is_not_served(values: dict[str, Any]) -> None:
    if values.get("modules_to_save"):
        raise UnsupportedLoraError(
            f"LoraSettings: modules_to_save={values['modules_to_save']!r} is ignored by the serving engine, so that "
            "rollouts would come from other weights than those trained; leave it out"
        )
    targets = values.get("target_modules", "all-linear")
    for target in [targets] if isinstance(targets, str) else targets:
        if str(target).rsplit(".", 1)[-1] in _OUTPUT_OR_EMBEDDING:
            raise UnsupportedLoraError(
                f"LoraSettings: target_modules names {target!r}, an output or embedding layer; the serving engine "
                "ignores adapters on it, so that rollouts would come from other weights than those trained. "
                "Name linear layers of attention and MLP (q_proj, down_proj, …), or 'all-linear'"
            )


class TrainerConfig(FrozenConfig):
    """How a trainer computes.

    What is learned depends on `seed`, `weight_decay`, the betas and `adam_epsilon`, and, through rounding, on `dtype`;
    on nothing else here.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model's weights and activations; adapter and optimizer are always float32. auto: bfloat16 on CUDA; on
    a CPU the type the base model is stored in, which is also what the engine samples in (float16 as bfloat16)."""
    max_tokens_per_row: int = pydantic.Field(default=8192, ge=2)
    """Unique tokens that one forward pass holds; also the longest sequence that can be trained."""
    gradient_checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass: about a third more time for far less
    memory."""
    logprob_chunk_tokens: int = pydantic.Field(default=512, ge=1)
    """Positions whose logits exist at the same time: memory is twice this times the vocabulary times 4 bytes."""
    seed: int = 0
    """Of the adapter's first weights, of dropout, and of the split into several optimizer steps."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's decoupled weight decay."""
    adam_beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """How much of AdamW's mean of the gradient is kept at each step."""
    adam_beta2: float = pydantic.Field(default=0.99, ge=0, lt=1)
    """How much of its mean of the squared gradient is kept."""
    adam_epsilon: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root of that mean: gradients far below it move the weights in proportion to themselves."""
    ranks: int = pydantic.Field(default=1, ge=1)
    """Trainer processes that share the rows of a step."""
    num_threads: int | None = pydantic.Field(default=None, ge=1)
    """Threads of one rank on a CPU; None leaves torch's own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if torch sees one."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """auto: blocks of scaled-dot-product attention on a CPU, FlexAttention on CUDA."""
    collective_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest wait of one rank for the others."""


class RankSettings(FrozenConfig):
    """The place of one trainer among several."""

    rank: int = pydantic.Field(default=0, ge=0)
    world_size: int = pydantic.Field(default=1, ge=1)
    init_method: str | None = None
    """How the ranks find each other: `tcp://host:port` or `file:///path` as torch.distributed takes it, or
    `store://host:port` for a store that already listens there."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> RankSettings:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: ranks count from 0")
        if self.world_size > 1 and self.init_method is None:
            raise ValueError("several ranks need an init_method (tcp://host:port or file:///path)")
        return self


class TrainerSpec(FrozenConfig):
    """Everything that one trainer needs to start."""

    base_model: str
    """A folder that transformers can load, or a hub id."""
    checkpoints_dir: Path
    """Where `{step:04d}/` directories are committed; made if absent."""
    lora: LoraSettings = LoraSettings()
    trainer: TrainerConfig = TrainerConfig()
    place: RankSettings = RankSettings()


def check_target_modules(targets: Sequence[str], module_names: Iterable[str], base_model: str) -> None:
    """Checks that each of `targets` names a layer of the base model.

    Args:
        targets: what `LoraSettings.target_modules` lists.
        module_names: dotted names of the base model's linear layers, the output layer left out.
        base_model: named in the message.

    Raises:
        UnsupportedLoraError: a target that names no such layer; the message names the nearest that there is.
    """
    names = list(module_names)
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            parts = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise UnsupportedLoraError(
                f"LoraSettings: target_modules names {target!r}, which {base_model} does not have"
                f"{nearest(target, parts)}. Its linear layers: {', '.join(parts)}"
            )
