"""What the serving tests share: one two-layer model, and one engine per way of serving, started once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with SmolLM2's tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
