"""The trainer behind Ray: one rank or several, killed or not, the same weights."""

import asyncio
import dataclasses
import os
import signal

import pytest
import ray
from safetensors.numpy import load_file

import art_ray
from art_ray.actors.deadlines import Deadlines
from art_ray.actors.trainer_actor import TrainRequest
from art_ray.actors.trainer_group import TrainerGroup
from art_ray.errors import TrainingError
from art_ray.training.checkpoint import step_dir
from art_ray.training.config import LoraSettings, TrainerConfig, TrainerSpec
from art_ray.training.trainer import Trainer
from tests.small_models import make_tiny_model
from tests.training.made import random_groups

pytestmark = pytest.mark.usefixtures("ray_instance")

CONFIG = art_ray.TrainConfig(learning_rate=1e-2)
DEADLINES = Deadlines(check_s=120, start_s=120, standstill_s=60, ledger_s=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def spec(tiny, folder, ranks: int = 1) -> TrainerSpec:
    return TrainerSpec(
        base_model=str(tiny),
        checkpoints_dir=folder,
        lora=LoraSettings(r=4),
        trainer=TrainerConfig(dtype="float32", ranks=ranks, num_threads=1),
    )


def request(step: int, groups, request_id: str = "train-1") -> TrainRequest:
    refs = tuple(ray.put(group) for group in groups)
    return TrainRequest(step, refs, CONFIG, fetch_timeout_s=60, request_id=request_id)


def weights(folder, step: int) -> dict:
    return load_file(step_dir(folder, step) / "adapter_model.safetensors")


def undisturbed(tiny, folder, batches) -> dict:
    trainer = Trainer(spec(tiny, folder))
    for step, groups in enumerate(batches):
        trainer.train(groups, CONFIG, step)
    return weights(folder, len(batches))


@pytest.fixture
def batches():
    return [random_groups(seed=seed) for seed in (0, 1)]


async def pid_of(group: TrainerGroup, rank: int) -> int:
    handle = group._ranks[rank].handle
    return await handle.__ray_call__.remote(lambda self: os.getpid())


async def test_two_ranks_give_the_gradient_of_one(tiny, tmp_path, batches):
    group = TrainerGroup("trainer:two", spec(tiny, tmp_path / "two", ranks=2), {"CPU": 1.0}, DEADLINES)
    try:
        await group.place()
        assert await group.start() == 0
        for step, groups in enumerate(batches):
            metrics = await group.train(request(step, groups), lambda _: None)
        assert metrics["num_groups_trainable"] > 0
        imitate = dataclasses.replace(request(2, batches[0]), supervised=True)
        supervised = await group.train(imitate, lambda _: None)
        assert supervised["num_trajectories_trained"] == sum(map(len, batches[0]))
    finally:
        group.stop()
    alone = await asyncio.to_thread(undisturbed, tiny, tmp_path / "one", batches)
    together = weights(tmp_path / "two", 2)
    assert max(float(abs(alone[name] - together[name]).max()) for name in alone) < 1e-4


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)])
async def test_a_trainer_that_dies_in_a_step_is_replaced_and_the_step_counts_once(
    tiny, tmp_path, batches, ranks, victim, caplog
):
    group = TrainerGroup(f"trainer:killed{ranks}", spec(tiny, tmp_path / "killed", ranks), {"CPU": 1.0}, DEADLINES)
    try:
        await group.place()
        await group.start()
        await group.train(request(0, batches[0]), lambda _: None)
        victim_pid = await pid_of(group, victim)
        os.kill(victim_pid, signal.SIGKILL)
        metrics = await group.train(request(1, batches[1]), lambda _: None)
        # The same request again finds the step taken.
        assert await group.train(request(1, batches[1]), lambda _: None) == metrics
        with pytest.raises(TrainingError, match="another call"):
            await group.train(request(1, batches[0], "train-2"), lambda _: None)
        with pytest.raises(TrainingError, match="from step 5"):
            await group.train(request(5, batches[1]), lambda _: None)
    finally:
        group.stop()
    assert "Starting again from the newest checkpoint" in caplog.text
    if ranks == 1:
        alone = await asyncio.to_thread(undisturbed, tiny, tmp_path / "undisturbed", batches)
        after = weights(tmp_path / "killed", 2)
        assert all((alone[name] == after[name]).all() for name in alone), "not bit for bit those of an undisturbed run"
