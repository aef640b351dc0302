"""The examples as modules, and one served policy on which the agents among them learn."""

import argparse
import sys
from pathlib import Path

import pytest

import art_ray

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as Python has it for a script


def chosen(step: int) -> argparse.Namespace:
    """The options of a run that takes one step more than `step`."""
    return argparse.Namespace(steps=step + 1, groups=2, group_size=4, learning_rate=1e-4)


@pytest.fixture(scope="session")
async def policy(ray_instance, small_model, tmp_path_factory):
    """A policy that knows tools, at whatever step the tests before have brought it to."""
    import agent

    model = art_ray.TrainableModel(
        name="policy",
        project="examples",
        base_model=str(small_model),
        base_path=str(tmp_path_factory.mktemp("art")),
        report_metrics=[],
        _internal_config={"engine_args": agent.TOOL_ENGINE_ARGS},
    )
    async with art_ray.RayBackend() as backend:
        await model.register(backend)
        yield model
