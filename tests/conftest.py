"""What the tests share: one Ray instance, one small model."""

import os
from pathlib import Path

import pytest

from tests.small_models import small_real_model

# Before anything imports these: tests reach no hub and send no usage statistics.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(scope="session")
def ray_instance():
    """A local Ray instance of this test run alone."""
    import ray

    ray.init(
        address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="warning"
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, made once."""
    return small_real_model()
