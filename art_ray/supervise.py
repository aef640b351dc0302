"""Supervised fine-tuning of a model that a backend trains: a warm start before reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Sequence

from art_ray.model import TrainableModel
from art_ray.trajectories import Trajectory
from art_ray.types import TrainConfig, TrainResult

__all__ = ["sft"]


async def sft(
    model: TrainableModel,
    trajectories: Sequence[Trajectory],
    config: TrainConfig | None = None,
    *,
    num_epochs: int = 1,
    trajectories_per_step: int | None = None,
    verbose: bool = False,
) -> list[TrainResult]:
    """Trains `model` to answer as the trajectories do, one step for each batch of them.

    Args:
        model: registered with a backend.
        trajectories: conversations whose assistant messages are the examples; rewards play no part.
        config: see `TrainableModel.sft`.
        num_epochs: how often every trajectory is seen; shuffled each time, in an order that does not depend on the
            caller's random state.
        trajectories_per_step: size of a batch; None: all of them in one step.
        verbose: prints each step's metrics.

    Returns:
        What each step returned; none where there are no trajectories.
    """
    size = trajectories_per_step or max(1, len(trajectories))
    results = []
    for epoch in range(num_epochs):
        order = list(trajectories)
        random.Random(epoch).shuffle(order)
        for start in range(0, len(order), size):
            results.append(await model.sft(order[start : start + size], config, verbose))
    return results
