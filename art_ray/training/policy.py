"""The policy: a transformers model with a LoRA adapter, and its log-probabilities on packed rows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from art_ray.errors import CheckpointError, ConfigError, UnknownBaseModelError
from art_ray.training import attention
from art_ray.training.config import LoraSettings, TrainerConfig, check_target_modules
from art_ray.training.logprobs import Head, chunked_logprobs
from art_ray.training.lora import fuse
from art_ray.training.packing import PackedRow, pack_row
from art_ray.training.samples import TrainingSample
from art_ray.trajectories import Message

__all__ = ["ADAPTER_FILE", "Policy", "check_base_model"]

ADAPTER_FILE = "adapter_model.safetensors"
"""The adapter's weights inside a checkpoint, as PEFT names them."""
_FLEX_BLOCK = 128
"""FlexAttention's block: rows are filled up to a multiple of it, so that few lengths are compiled."""


class Policy:
    """The torch module that is trained.

    Base weights are frozen, in the configured dtype; the adapter is float32.

    Raises:
        UnknownBaseModelError: the base model cannot be loaded; says what was tried and what to do.
        UnsupportedLoraError: a target module that the base model does not have.
        ConfigError: an architecture whose log-probabilities on packed rows differ from those of its own forward pass.
    """

    def __init__(self, base_model: str, lora: LoraSettings, config: TrainerConfig) -> None:
        self.base_model = base_model
        self.config = config
        self.device = _device(config)
        self.dtype = _dtype(config, self.device, base_model)
        causal_lm = _load(base_model, self.dtype)
        _check_layer_types(causal_lm, base_model)
        self._decoder = causal_lm.get_decoder()
        self._head = _head_of(causal_lm)
        self.model = _with_adapter(causal_lm, lora, base_model, config.seed).to(self.device)
        if config.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
            causal_lm.enable_input_require_grads()
        self.model.train()
        self._check_against_its_own_forward(causal_lm)

    @cached_property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, in a definite order."""
        return {name: p for name, p in sorted(self.model.named_parameters()) if p.requires_grad}

    def logprobs(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each of the row's K targets at its temperature, and the entropy there.

        Returns:
            float32 [K] with a gradient to the adapter; float32 [K] without.
        """
        hidden, _ = self._hidden(row)
        return chunked_logprobs(
            hidden,
            self._tensor(row.sources),
            self._tensor(row.temperatures),
            self._tensor(row.targets),
            self._head,
            self.config.logprob_chunk_tokens,
        )

    def _hidden(self, row: PackedRow) -> tuple[Tensor, attention.Tree]:
        """The last layer's output [T, H] with a gradient, and the tree that the layers used."""
        # Tokens added to fill a block see only themselves, and nothing sees them.
        padding = np.zeros(self.padding(row), dtype=np.int64)
        alone = np.arange(len(row), len(row) + len(padding)) + 1
        tree = attention.Tree(
            self._tensor(np.concatenate([row.positions, padding])),
            self._tensor(np.concatenate([row.subtree_end, alone])),
            use_flex=self._uses_flex,
        )
        hidden = self._decoder(
            input_ids=self._tensor(np.concatenate([row.tokens, padding]))[None],
            position_ids=tree.positions[None],
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]
        return hidden, tree

    def padding(self, row: PackedRow) -> int:
        """Returns the number of tokens that are added to the row before it is computed."""
        return -len(row) % _FLEX_BLOCK if self._uses_flex else 0

    @property
    def _uses_flex(self) -> bool:
        asked = self.config.attention
        return asked == "flex" or (asked == "auto" and self.device.type == "cuda")

    @torch.no_grad()
    def reference_logprobs(self, row: PackedRow) -> Tensor:
        """Returns the log-probabilities [K] of the row's targets under the base model, without a gradient."""
        with self.model.disable_adapter(), self._evaluating():
            return self.logprobs(row)[0]

    def save_adapter(self, directory: Path) -> None:
        """Writes the adapter as PEFT does: adapter_model.safetensors and adapter_config.json."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, directory / ADAPTER_FILE)
        settings = self.model.peft_config["default"]
        training, settings.inference_mode = settings.inference_mode, True
        settings.save_pretrained(str(directory))
        settings.inference_mode = training

    def load_adapter(self, state: dict[str, Tensor]) -> None:
        """Takes over the weights of an adapter that `save_adapter` wrote.

        Raises:
            CheckpointError: it adapts other layers, or has other shapes.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        own = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        differing = {
            n for n in own.keys() | state.keys() if n not in own or n not in state or own[n].shape != state[n].shape
        }
        if differing:
            raise CheckpointError(
                f"the checkpoint's adapter differs from the one asked for in {len(differing)} tensors, "
                f"{min(differing)} among them. Ask for the same LoRA settings and base model, or take another name"
            )
        set_peft_model_state_dict(self.model, state)

    @cached_property
    def tokenizer(self) -> Any:
        """The base model's tokenizer; only what was not sampled is ever tokenized with it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.base_model)

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[int]]:
        """Returns the ids before the last message, which is an answer, and its own ids with the end-of-turn token."""
        options: dict[str, Any] = {"tools": tools, "tokenize": True, "return_dict": False}
        before = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        whole = self.tokenizer.apply_chat_template(messages, **options)
        shared = 0
        while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
            shared += 1
        prompt, answer = whole[:shared], whole[shared:]
        ends = [i for i, token in enumerate(answer) if token == self.tokenizer.eos_token_id]
        return prompt, answer[: ends[-1] + 1] if ends else answer

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def _check_against_its_own_forward(self, causal_lm: Any) -> None:
        """Compares a small forked tree with the model's own forward pass, so that no architecture is silently wrong.

        It finds output layers with scales or caps that `Head` does not know, and layers that carry state along the
        row instead of the path (state space models, linear attention).
        """
        samples = _forked_samples(self._head.weight.shape[0])
        row = pack_row(samples)
        with self._evaluating():
            _check_windows(causal_lm, self._hidden(row)[1].windows_seen, self.base_model)
            packed = self.logprobs(row)[0]
            with _own_attention(causal_lm):
                own = [self._plain_logprobs(causal_lm, sample) for sample in samples]
        by_sequence = [packed[self._tensor(row.sequences) == i] for i in range(len(samples))]
        # The mean: a single large logit in bfloat16 has a rounding error of 0.25.
        difference = float((torch.cat(by_sequence) - torch.cat(own)).abs().mean())
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.5
        if not difference < tolerance:
            raise ConfigError(
                f"{self.base_model} ({type(causal_lm).__name__}) cannot be trained: its log-probabilities on a packed "
                f"row differ by {difference:.2g} from those of its own forward pass. Supported are decoders with full "
                "or sliding-window attention and a linear output layer"
            )

    def _plain_logprobs(self, causal_lm: Any, sample: TrainingSample) -> Tensor:
        """Of the trained tokens of one sequence, by the model's own forward pass with whole logits."""
        tokens = self._tensor(sample.tokens)
        logits = causal_lm(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return logprobs[self._tensor(sample.trained[1:])]


def _check_layer_types(causal_lm: Any, base_model: str) -> None:
    """Refuses kinds of attention that are not computed here; a short check of numbers could not tell them apart."""
    config = causal_lm.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if unknown or getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{base_model} ({type(causal_lm).__name__}) cannot be trained: it has layers of "
            f"{', '.join(sorted(unknown)) or 'chunked attention'}. Supported are full and sliding-window attention"
        )


def _check_windows(causal_lm: Any, windows_seen: set[int | None], base_model: str) -> None:
    """Refuses a model with sliding windows whose layers do not hand them to the attention function."""
    config = causal_lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    has_window = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    if has_window and windows_seen == {None}:
        raise ConfigError(
            f"{base_model} ({type(causal_lm).__name__}) cannot be trained: its layers have a sliding window that they "
            "do not hand to the attention function"
        )


def _forked_samples(vocabulary: int) -> list[TrainingSample]:
    """Two sequences of 24 random tokens that part after 12; trained from the 8th on."""
    generator = np.random.default_rng(0)
    stem = generator.integers(0, vocabulary, 12)
    branches = sorted(generator.integers(0, vocabulary, (2, 12)).tolist())
    return [
        TrainingSample(
            tokens=np.concatenate([stem, branch]),
            trained=np.arange(24) >= 8,
            logprobs=np.zeros(24, np.float32),
            temperatures=np.ones(24, np.float32),
            versions=np.zeros(24, np.int64),
        )
        for branch in branches
    ]


def _device(config: TrainerConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("TrainerConfig: device='cuda', but torch sees no GPU; leave device at 'auto' or use 'cpu'")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: TrainerConfig, device: torch.device, base_model: str) -> torch.dtype:
    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16
    from transformers import AutoConfig

    with _explained(base_model) as name:
        stored = AutoConfig.from_pretrained(name).get_text_config().dtype
    return torch.bfloat16 if stored in (torch.bfloat16, torch.float16) else torch.float32


def check_base_model(base_model: str, lora: LoraSettings) -> None:
    """Looks at the base model's configuration and layers without loading a weight: an early word on what cannot work.

    Raises:
        UnknownBaseModelError: it cannot be loaded; says what was tried and what to do.
        UnsupportedLoraError: a target module that it does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with _explained(base_model) as name:
        settings = AutoConfig.from_pretrained(name)
        AutoTokenizer.from_pretrained(name)
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(settings)
    if not isinstance(lora.target_modules, str):
        check_target_modules(lora.target_modules, _linear_layers(causal_lm), base_model)


def _load(base_model: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with _explained(base_model) as name:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention.register())


@contextlib.contextmanager
def _explained(base_model: str) -> Iterator[str]:
    """Gives the name to load `base_model` by; what goes wrong in the block is an `UnknownBaseModelError`."""
    looks_like_path = base_model.startswith((".", "~", os.sep)) or base_model.count("/") > 1
    path = Path(base_model).expanduser()
    if looks_like_path and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no folder"
        raise UnknownBaseModelError(
            f"base_model={base_model!r}: {path.absolute()} {what}. "
            "Give a folder written by save_pretrained, or a hub id"
        )
    try:
        yield str(path) if path.is_dir() else base_model
    except (OSError, ValueError) as error:
        raise UnknownBaseModelError(
            f"base_model={base_model!r} could not be loaded, neither as a folder ({path.absolute()}) nor as a hub id: "
            f"{error}. Check the spelling, the access rights of the hub token, and that this machine reaches the hub; "
            "or give the path of a folder written by save_pretrained"
        ) from error


def _linear_layers(causal_lm: Any) -> list[str]:
    """Names of the layers that an adapter may be on: the linear ones, but for the output layer."""
    output = causal_lm.get_output_embeddings()
    return [n for n, m in causal_lm.named_modules() if isinstance(m, torch.nn.Linear) and m is not output]


def _head_of(causal_lm: Any) -> Head:
    layer = causal_lm.get_output_embeddings()
    config = causal_lm.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(layer.weight, getattr(layer, "bias", None), float(scale), softcap)


def _with_adapter(causal_lm: Any, lora: LoraSettings, base_model: str, seed: int) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    if not isinstance(lora.target_modules, str):
        check_target_modules(lora.target_modules, _linear_layers(causal_lm), base_model)
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        init_lora_weights=lora.init_lora_weights,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(causal_lm, settings)
    fuse(model)
    return model


@contextlib.contextmanager
def _own_attention(causal_lm: Any) -> Iterator[None]:
    causal_lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(attention.NAME)
