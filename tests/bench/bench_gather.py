"""What gathering itself costs, apart from the rollouts."""

import asyncio
import time

from art_ray import Trajectory, TrajectoryGroup, gather_trajectory_groups
from tests.bench import Measured, benchmark

NUM_GROUPS, GROUP_SIZE = 1000, 10


@benchmark("gather_per_rollout_us", unit="microseconds per rollout", runs=3, packages=("tqdm", "pydantic"))
def gather_per_rollout() -> Measured:
    """Gathers 1,000 groups of 10 rollouts that answer at once."""
    trajectory = Trajectory([{"role": "user", "content": "yes?"}], reward=1.0, metrics={"turns": 1})

    async def rollout() -> Trajectory:
        await asyncio.sleep(0)
        return trajectory

    async def seconds() -> float:
        groups = [TrajectoryGroup(rollout() for _ in range(GROUP_SIZE)) for _ in range(NUM_GROUPS)]
        started = time.perf_counter()
        await gather_trajectory_groups(groups)
        return time.perf_counter() - started

    return Measured(asyncio.run(seconds()) / (NUM_GROUPS * GROUP_SIZE) * 1e6)
