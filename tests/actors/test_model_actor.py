"""The ledger behind Ray: references in, files out, once, whoever dies in between."""

import json
import os
import signal

import pytest
import ray

import art_ray
from art_ray.actors.model_actor import ActorLedger, Environment
from art_ray.errors import ActorError, ConfigError, LedgerWriteError
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.ledger.ledger import LedgerConfig

pytestmark = pytest.mark.usefixtures("ray_instance")


def group(*rewards: float) -> art_ray.TrajectoryGroup:
    return art_ray.TrajectoryGroup([art_ray.Trajectory([{"role": "user", "content": "?"}], reward=r) for r in rewards])


@pytest.fixture
async def ledger(tmp_path):
    config = LedgerConfig(base_path=str(tmp_path), project="p", name="m", report_metrics=[])
    ledger = ActorLedger(config, timeout_s=60)
    yield ledger
    await ledger.close(10)


def history(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "p/models/m/history.jsonl").read_text().splitlines()]


async def log(ledger, groups, step=0, request_id="a"):
    return await ledger.log(groups, split="train", step=step, metrics=None, request_id=request_id)


async def test_groups_and_references_to_groups_are_logged_in_order(ledger, tmp_path):
    groups = [group(float(i), float(i + 1)) for i in range(20)]
    mixed = [ray.put(g) if i % 2 else g for i, g in enumerate(groups)]
    shared = await ledger.share(mixed)
    assert all(ledger.is_reference(item) for item in shared)
    assert shared[1] is mixed[1]
    receipt = await log(ledger, shared)
    assert read_trajectory_groups_parquet(receipt.parquet_path) == groups
    assert history(tmp_path)[0]["train/reward"] == 10.0


async def test_a_request_that_comes_twice_is_written_once_even_by_a_restarted_actor(ledger, tmp_path):
    shared = await ledger.share([group(1.0)])
    first = await log(ledger, shared)
    os.kill(await _pid(ledger), signal.SIGKILL)
    assert await log(ledger, shared) == first
    assert len(history(tmp_path)) == 1
    await log(ledger, shared, request_id="b")
    assert len(history(tmp_path)) == 2


async def _pid(ledger) -> int:
    handle = ledger._placed().handle
    return ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=30)


async def test_an_error_of_the_ledger_arrives_as_it_is(ledger, tmp_path):
    (tmp_path / "p").write_text("a file where a folder is needed")
    with pytest.raises(LedgerWriteError):
        await log(ledger, await ledger.share([group(1.0)]))


async def test_a_group_that_is_no_group_is_an_error_and_writes_nothing(ledger, tmp_path):
    with pytest.raises((ActorError, TypeError)):
        await log(ledger, [ray.put("no group")])
    assert not (tmp_path / "p/models/m/history.jsonl").exists()


async def test_a_model_logs_on_in_its_own_process_once_its_backend_is_closed(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    backend = art_ray.RayBackend()
    for _ in range(2):  # registering again changes nothing
        await model.register(backend)
        await model.log([group(1.0)])
    await backend.close()
    await model.log([group(2.0)])
    assert [line["val/reward"] for line in history(tmp_path)] == [1.0, 1.0, 2.0]
    assert ray.is_initialized()
    await model.close()


async def test_a_model_of_two_backends_in_one_process_is_refused(tmp_path):
    first, second = art_ray.RayBackend(), art_ray.RayBackend()
    try:
        for backend in (first, second):
            model = art_ray.Model(name="twice", project="p", base_path=str(tmp_path), report_metrics=[])
            await model.register(backend)
            if backend is first:
                await model.log([group(1.0)])
        with pytest.raises(ConfigError, match="another backend"):
            await model.log([group(1.0)])
    finally:
        await first.close()
        await second.close()


def test_what_reporters_read_from_the_environment_travels_and_is_not_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    environment = Environment.of_driver()
    assert environment.variables["WANDB_API_KEY"] == "a-secret-key"
    assert "OPENAI_API_KEY" not in environment.variables
    assert "a-secret-key" not in repr(environment)
