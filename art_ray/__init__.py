"""Train language-model agents with reinforcement learning on a Ray cluster.

The public names are those of `__all__`. Each is loaded when it is first used: importing this package loads neither
Ray nor torch nor vLLM, and a name needs only what its own module imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_ray.backend import Backend
    from art_ray.errors import ArtRayError
    from art_ray.gather import gather_trajectories, gather_trajectory_groups
    from art_ray.local import LocalBackend
    from art_ray.model import Model, TrainableModel
    from art_ray.ray_backend import RayBackend
    from art_ray.run_pipeline import PipelineResult, pipeline
    from art_ray.run_rollouts import rollout
    from art_ray.serving.config import ServingConfig
    from art_ray.supervise import sft
    from art_ray.training.config import TrainerConfig
    from art_ray.trajectories import (
        History,
        Message,
        Messages,
        MessagesAndChoices,
        Tools,
        Trajectory,
        TrajectoryGroup,
    )
    from art_ray.types import Outcome, PolicyVersion, TrainConfig, TrainResult
    from art_ray.utils import iterate_dataset, limit_concurrency, retry

__all__ = [
    "ArtRayError",
    "Backend",
    "History",
    "LocalBackend",
    "Message",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "Outcome",
    "PipelineResult",
    "PolicyVersion",
    "RayBackend",
    "ServingConfig",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryGroup",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "limit_concurrency",
    "pipeline",
    "retry",
    "rollout",
    "sft",
]

_MODULE_OF = {
    "ArtRayError": "errors",
    "Backend": "backend",
    "History": "trajectories",
    "LocalBackend": "local",
    "Message": "trajectories",
    "Messages": "trajectories",
    "MessagesAndChoices": "trajectories",
    "Model": "model",
    "Outcome": "types",
    "PipelineResult": "run_pipeline",
    "PolicyVersion": "types",
    "RayBackend": "ray_backend",
    "ServingConfig": "serving.config",
    "Tools": "trajectories",
    "TrainConfig": "types",
    "TrainResult": "types",
    "TrainableModel": "model",
    "TrainerConfig": "training.config",
    "Trajectory": "trajectories",
    "TrajectoryGroup": "trajectories",
    "gather_trajectories": "gather",
    "gather_trajectory_groups": "gather",
    "iterate_dataset": "utils",
    "limit_concurrency": "utils",
    "pipeline": "run_pipeline",
    "retry": "utils",
    "rollout": "run_rollouts",
    "sft": "supervise",
}
_MODULES = ("errors", "gather", "ledger", "local", "rewards", "trajectories", "types", "utils")
"""Modules that are reached as attributes too, without an import of their own."""

_ENGINE_PACKAGES = ("accelerate", "peft", "ray", "safetensors", "torch", "transformers", "vllm")
"""Installed by the extras `cpu` and `gpu`, not by the package alone."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"art_ray.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'art_ray' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"art_ray.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _ENGINE_PACKAGES:
            raise
        raise ImportError(
            f"art_ray.{name} needs {missing!r}, which is not installed: "
            "pip install 'art-ray[gpu]', or 'art-ray[cpu]' on a machine without a GPU",
            name=missing,
        ) from error
    globals()[name] = value  # the next use finds it without a call
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
