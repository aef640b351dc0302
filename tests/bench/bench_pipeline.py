"""What overlapping brings where sampling takes as long as training: steps per minute, against taking turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ray

import art_ray
from tests.bench import Measured, benchmark
from tests.stub_backend import StubBackendOnRay

SECONDS = 1.0
"""Of a rollout, and of a step."""
NUM_STEPS = 12


async def steps_per_minute(max_steps_off_policy: int, folder: str) -> float:
    """Runs a pipeline whose environment answers after a second, and times it from its first result to its last."""
    seconds = SECONDS

    async def rollout(model: Any, scenario: int) -> art_ray.Trajectory:
        await asyncio.sleep(seconds)
        return art_ray.Trajectory([{"role": "user", "content": f"question {scenario}"}], reward=scenario % 2)

    name = f"behind-{max_steps_off_policy}"
    model = art_ray.TrainableModel(name=name, project="bench", base_model="none", base_path=folder, report_metrics=[])
    backend = StubBackendOnRay()
    backend.training = lambda step: asyncio.sleep(SECONDS)
    await model.register(backend)
    steps = art_ray.pipeline(
        model,
        rollout,
        itertools.count(),
        groups_per_step=4,
        group_size=4,
        max_steps_off_policy=max_steps_off_policy,
        num_steps=NUM_STEPS,
        workers=2,
    )
    ended = []
    async with contextlib.aclosing(steps):
        async for _ in steps:
            ended.append(time.perf_counter())
    await model.close()
    return 60 * (len(ended) - 1) / (ended[-1] - ended[0])


@benchmark("overlap_k1_vs_k0", unit="steps per minute", runs=3, packages=("ray",))
def overlap() -> Iterator[Measured]:
    """Steps and rollouts of a second each: one step off policy, and in turns."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        while True:
            with tempfile.TemporaryDirectory() as folder:
                theirs = asyncio.run(steps_per_minute(0, folder))
                yield Measured(asyncio.run(steps_per_minute(1, folder)), theirs)
    finally:
        ray.shutdown()
