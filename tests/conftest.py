"""What the tests share: one Ray instance, one small model."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
    spec = importlib.util.spec_from_file_location("small_model", ROOT / "examples" / "small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare()
