"""Two-layer models with a real tokenizer, for tests of the trainer and of the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

Kind = Literal["qwen3", "llama", "gemma"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def small_real_model() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, prepared on first use (about 15 s)."""
    from examples.small_model import prepare

    return prepare()


def tiny_config(kind: Kind, **overrides: Any) -> Any:
    """Returns transformers' configuration of a two-layer model; see `make_tiny_model`."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        # Wide enough that logits differ from each other: with the usual 0.02 every token is about equally likely.
        "initializer_range": 0.1,
    }
    if kind == "gemma":
        shape |= {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 64,
        }
    config_class = {"qwen3": Qwen3Config, "llama": LlamaConfig, "gemma": Gemma3TextConfig}[kind]
    return config_class(**(shape | overrides))


def save_random_model(path: Path, config: Any, seed: int = 0) -> Path:
    """Writes a model of `config` with random float32 weights to `path`, without a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    return path


def make_tiny_model(path: Path | str, kind: Kind = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """Writes a two-layer model with random weights and SmolLM2's tokenizer and chat template to `path`, and returns it.

    About 7 million parameters, float32, heads of 64: what vLLM serves on a CPU too.

    Args:
        path: a folder, made if absent.
        kind: the architecture; "gemma" is Gemma 3's text model, whose first layer sees a sliding window of 16 tokens.
        seed: of the weights; two models of one kind and seed are equal.
        overrides: fields of the configuration.
    """
    target = save_random_model(Path(path), tiny_config(kind, **overrides), seed)
    for name in TOKENIZER_FILES:
        shutil.copyfile(small_real_model() / name, target / name)
    return target
