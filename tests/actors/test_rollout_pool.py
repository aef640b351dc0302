"""Rollouts on real workers of a real Ray, without an engine: the functions answer by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import art_ray
from art_ray.actors import calls
from art_ray.errors import ActorDiedError, ConfigError, TooManyExceptionsError
from tests.serving.conftest import until

pytestmark = pytest.mark.usefixtures("ray_instance")


@pytest.fixture
async def backend():
    async with art_ray.RayBackend() as backend:
        yield backend


@pytest.fixture
async def model(backend, tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path / "art"), report_metrics=[])
    await model.register(backend)
    yield model
    await model.close()


def note(folder: Path, name: str) -> int:
    """Leaves a mark that outlives its process; returns how many there are of that name."""
    (folder / f"{name}.{os.getpid()}.{os.urandom(4).hex()}").touch()
    return len(list(folder.glob(f"{name}.*")))


def pids(folder: Path, name: str) -> set[int]:
    return {int(path.name.split(".")[1]) for path in folder.glob(f"{name}.*")}


async def groups_of(refs) -> list[art_ray.TrajectoryGroup]:
    wait = calls.Wait("object store", "get", "?", "a group", 30)
    return [await calls.answer(ref, wait) for ref in refs]


async def test_groups_come_in_the_order_of_the_scenarios_and_a_failure_costs_only_itself(model, tmp_path):
    async def rollout(model, scenario):
        number = note(tmp_path, scenario)
        await asyncio.sleep(0.3 if scenario == "a" else 0)  # the first one ends last
        if scenario == "b" and number == 1:
            raise RuntimeError("a bad day")
        return art_ray.Trajectory([{"role": "user", "content": scenario}], reward=1.0, metadata={"model": model.name})

    refs = await art_ray.rollout(model, rollout, ["a", "b", "c"], group_size=3, max_exceptions=1, pbar_desc=None)
    groups = await groups_of(refs)
    assert [[t.messages()[0]["content"] for t in group] for group in groups] == [["a"] * 3, ["b"] * 2, ["c"] * 3]
    assert [[f.message for f in group.exceptions] for group in groups] == [[], ["a bad day"], []]
    assert groups[0].trajectories[0].metadata == {"model": "m"}
    assert os.getpid() not in pids(tmp_path, "a")
    await model.log(refs, split="val")
    assert model.history()["val/exception_rate"].to_list() == [1 / 9]


async def test_plain_functions_run_side_by_side(model, tmp_path):
    def rollout(model, scenario):
        note(tmp_path, "running")
        while len(list(tmp_path.glob("running.*"))) < 4:  # each waits for all
            pass
        return art_ray.Trajectory([], reward=0.0)

    async with asyncio.timeout(60):
        refs = await art_ray.rollout(model, rollout, [1], group_size=4, pbar_desc=None)
    assert len((await groups_of(refs))[0].trajectories) == 4


async def test_a_worker_that_dies_costs_only_what_was_running_there(model, tmp_path):
    async def rollout(model, scenario):
        if scenario == "deadly" and note(tmp_path, scenario) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        note(tmp_path, f"ran-{scenario}")
        return art_ray.Trajectory([], reward=0.0, metadata={"scenario": scenario})

    refs = await art_ray.rollout(model, rollout, ["x", "deadly", "y"], group_size=1, workers=2, pbar_desc=None)
    assert [group.trajectories[0].metadata["scenario"] for group in await groups_of(refs)] == ["x", "deadly", "y"]
    assert len(pids(tmp_path, "deadly")) == 2


async def test_a_group_that_kills_every_worker_ends_with_an_error_that_says_so(model):
    async def rollout(model, scenario):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ActorDiedError, match="2 workers were lost while they ran group"):
        await art_ray.rollout(model, rollout, ["x"], group_size=1, max_attempts=2, pbar_desc=None)


async def test_what_was_finished_before_a_failure_is_not_run_again(model, tmp_path):
    async def rollout(model, scenario):
        first = note(tmp_path, scenario) == 1
        if scenario == "late" and first:
            while not list((tmp_path / "art").glob("p/models/m/rollouts/0000/*.parquet")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # in another process: there is no event to wait for
            raise RuntimeError("the driver is about to die")
        return art_ray.Trajectory([], reward=0.5)

    with pytest.raises(TooManyExceptionsError):
        await art_ray.rollout(model, rollout, ["early", "late"], group_size=1, pbar_desc=None)
    refs = await art_ray.rollout(model, rollout, ["early", "late"], group_size=1, max_exceptions=1, pbar_desc=None)
    groups = await groups_of(refs)
    assert groups[0].trajectories[0].reward == 0.5
    assert len(list(tmp_path.glob("early.*"))) == 1


async def test_a_function_that_gives_no_trajectory_is_an_error_that_names_what_it_gave(model):
    with pytest.raises(ConfigError, match="returned int where a Trajectory was expected"):
        await art_ray.rollout(model, lambda model, scenario: 5, ["x"], group_size=2, pbar_desc=None)


async def test_a_rollout_that_takes_too_long_has_failed(model):
    async def rollout(model, scenario):
        await asyncio.Event().wait()

    refs = await art_ray.rollout(model, rollout, ["x"], group_size=1, timeout_s=0.2, max_exceptions=1, pbar_desc=None)
    (group,) = await groups_of(refs)
    assert "within 0.2 s (timeout_s)" in group.exceptions[0].message


async def test_a_cancelled_gather_leaves_no_worker(model, tmp_path):
    async def rollout(model, scenario):
        note(tmp_path, "running")
        await asyncio.Event().wait()

    gathering = asyncio.create_task(art_ray.rollout(model, rollout, range(4), group_size=1, pbar_desc=None))
    await until(lambda: len(list(tmp_path.glob("running.*"))) == 4)
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids(tmp_path, "running")))


async def test_a_model_that_is_not_registered_is_told_what_to_do(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    with pytest.raises(ConfigError, match="register"):
        await art_ray.rollout(model, lambda model, scenario: None, ["x"], pbar_desc=None)


@pytest.mark.parametrize("wrong", [{"group_size": 0}, {"max_attempts": 0}, {"workers": 0}, {"max_concurrency": 3}])
async def test_numbers_that_cannot_work_are_refused(model, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await art_ray.rollout(model, lambda model, scenario: None, ["x"], pbar_desc=None, **wrong)
