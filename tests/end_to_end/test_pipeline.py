"""A pipeline with real workers on a real Ray, and a stub that takes the steps."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

import art_ray
from tests.serving.conftest import until
from tests.stub_backend import StubBackendOnRay


@pytest.fixture
async def model(ray_instance, tmp_path):
    model = art_ray.TrainableModel(
        name="m", project="p", base_model="base", base_path=str(tmp_path / "art"), report_metrics=[]
    )
    await model.register(StubBackendOnRay())
    yield model
    await model.close()


def marks(folder: Path, name: object) -> list[Path]:
    return list(folder.glob(f"{name}.*"))


async def test_a_run_that_was_left_ends_its_workers_and_when_started_again_runs_only_what_was_not_finished(
    model, tmp_path
):
    blocked = tmp_path / "blocked"
    blocked.touch()

    async def rollout(model, scenario):
        (tmp_path / f"{scenario}.{os.getpid()}.{os.urandom(4).hex()}").touch()
        while scenario == 3 and blocked.exists():  # noqa: ASYNC110 - in another process: there is no event
            await asyncio.sleep(0.01)
        return art_ray.Trajectory([{"role": "user", "content": str(scenario)}], reward=0.5)

    def steps():
        return art_ray.pipeline(
            model, rollout, range(6), groups_per_step=2, group_size=2, max_steps_off_policy=1, num_steps=3, workers=2
        )

    async with contextlib.aclosing(steps()) as run:
        assert (await anext(run)).step == 1
        # What the next step wants is finished but for one, which blocks.
        await until(lambda: len(list((tmp_path / "art").glob("p/models/m/rollouts/*/*.parquet"))) == 5)
        await until(lambda: len(marks(tmp_path, 3)) == 2)
    pids = {path.name.split(".")[1] for path in tmp_path.glob("*.*.*")}
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    blocked.unlink()
    assert [result.step async for result in steps()] == [2, 3]
    assert [len(marks(tmp_path, scenario)) for scenario in range(6)] == [2, 2, 2, 4, 2, 2]
    folder = tmp_path / "art/p/models/m/trajectories/train"
    trained = [
        int(group.trajectories[0].messages()[0]["content"])
        for step in range(3)
        for group in art_ray.ledger.read_trajectory_groups_parquet(folder / f"{step:04d}.parquet")
    ]
    assert sorted(trained) == list(range(6))
