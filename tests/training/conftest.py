"""Two-layer models, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_models import Kind, make_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    import torch

    torch.set_num_threads(1)  # these models are too small to gain from more
    root = tmp_path_factory.mktemp("models")
    kinds: tuple[Kind, ...] = ("llama", "qwen3", "gemma")
    return {kind: make_tiny_model(root / kind, kind, vocab_size=512) for kind in kinds}


@pytest.fixture(scope="session")
def tiny_model(tiny_models: dict[Kind, Path]) -> Path:
    return tiny_models["qwen3"]
