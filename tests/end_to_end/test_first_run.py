"""The whole path, for real: Ray, vLLM and torch, two steps, a stop, a resumption, a third step."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import openai
import polars
import pytest

import art_ray
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.training import checkpoint
from art_ray.training.config import TrainerConfig, TrainerSpec
from art_ray.training.samples import TrainingSample, samples_of
from art_ray.training.trainer import Trainer
from art_ray.trajectories import Choice, Sampling
from tests.end_to_end.conftest import QUESTIONS, Run, gather, make_backend, make_model, rollout
from tests.training.made import complete_steps

TOLERANCE = 1e-4


def samplings(groups: list[art_ray.TrajectoryGroup]) -> list[Sampling]:
    found = [Sampling.of(trajectory.messages_and_choices[-1]) for group in groups for trajectory in group]
    assert all(sampling is not None for sampling in found)
    return found


def samples(groups: list[art_ray.TrajectoryGroup]) -> list[TrainingSample]:
    return [sample for group in groups for trajectory in group for sample in samples_of(trajectory, 4096)]


def trainer_at(run: Run, step: int, folder: Path) -> Trainer:
    """A trainer of this process, on the checkpoint of `step` alone."""
    shutil.copytree(run.folder / "checkpoints" / f"{step:04d}", folder / f"{step:04d}")
    return Trainer(
        TrainerSpec(base_model=run.model.base_model, checkpoints_dir=folder, trainer=TrainerConfig(dtype="float32"))
    )


def largest_difference(trainer: Trainer, of: list[TrainingSample]) -> float:
    pairs = zip(trainer.logprobs(of), of, strict=True)
    return max(float(abs(ours.numpy() - sample.logprobs[sample.trained]).max()) for ours, sample in pairs)


async def test_every_token_says_which_version_sampled_it(run):
    for step, groups in enumerate(run.groups):
        assert {version for s in samplings(groups) for version in s.policy_versions} == {step}
    assert [result.step for result in run.results] == [1, 2]


@pytest.mark.parametrize("step", [0, 1])
async def test_every_trained_token_was_sampled_as_the_trainer_sees_it(run, step, tmp_path):
    """The trainer's log-probabilities at the version that sampled are the engine's, in float32."""
    trainer = await asyncio.to_thread(trainer_at, run, step, tmp_path)
    of = samples(run.groups[step])
    assert sum(sample.num_trained for sample in of) == sum(len(s.token_ids) for s in samplings(run.groups[step]))
    assert largest_difference(trainer, of) < TOLERANCE


async def test_a_published_version_answers_with_its_own_weights(run, tmp_path):
    answers = [await rollout(run.model, question) for question in QUESTIONS]
    of = samples([art_ray.TrajectoryGroup(answers)])
    assert {int(version) for sample in of for version in sample.versions[sample.trained]} == {2}
    new = await asyncio.to_thread(trainer_at, run, 2, tmp_path / "new")
    old = await asyncio.to_thread(trainer_at, run, 1, tmp_path / "old")
    assert largest_difference(new, of) < TOLERANCE
    assert largest_difference(old, of) > 100 * TOLERANCE


async def test_several_turns_with_a_tool_are_trained_on_their_exact_tokens(run, tmp_path):
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    trajectory = art_ray.Trajectory([{"role": "user", "content": "What is the weather?"}], tools=[weather])
    for result in ('{"sky": "clear"}', '{"wind": "none"}', None):
        response = await run.model.openai_client().chat.completions.create(
            model=run.model.get_inference_name(step=2),
            messages=trajectory.messages(),
            tools=trajectory.tools,
            tool_choice="none",
            temperature=0.7,
            max_tokens=12,
        )
        trajectory.messages_and_choices.append(response.choices[0])
        if result is not None:
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": "call", "content": result})
    of = samples_of(trajectory, 4096)
    assert isinstance(of, list), of
    sampled = [Sampling.of(item) for item in trajectory.messages_and_choices if isinstance(item, Choice)]
    assert sum(sample.num_trained for sample in of) == sum(len(s.token_ids) for s in sampled)
    assert {s.temperature for s in sampled} == {0.7}
    trainer = await asyncio.to_thread(trainer_at, run, 2, tmp_path)
    assert largest_difference(trainer, of) < TOLERANCE


async def test_the_response_names_the_version_and_a_pinned_name_reaches_it(run):
    client = run.model.openai_client()
    for name in (run.model.get_inference_name(), run.model.get_inference_name(step=2)):
        response = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=2
        )
        assert response.model == "policy@2"
        assert Sampling.of(response.choices[0]).policy_versions[0] == 2


@pytest.mark.parametrize("name", ["policy@7", "policy@-1", "policy@", "other", "(the base model)", ""])
async def test_a_version_that_is_not_held_is_an_error_that_names_those_that_are(run, name):
    with pytest.raises(openai.NotFoundError, match="policy@2"):
        await run.model.openai_client().chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )


async def test_the_base_model_cannot_be_asked_by_its_path(run):
    with pytest.raises(openai.NotFoundError):
        await run.model.openai_client().chat.completions.create(
            model=run.model.base_model, messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )


async def test_the_key_is_needed_and_the_endpoint_is_on_loopback(run):
    url = httpx.URL(run.model.inference_base_url)
    assert url.host == "127.0.0.1"
    async with httpx.AsyncClient(base_url=url) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await client.get("models", headers=headers)).status_code == 401
        headers = {"authorization": f"Bearer {run.model.inference_api_key}"}
        held = (await client.get("models", headers=headers)).json()
        assert [model["id"] for model in held["data"]] == ["policy@2"]
    assert run.model.inference_api_key not in repr(run.model)


async def test_the_ledger_holds_every_step_and_every_rollout(run):
    lines = [json.loads(line) for line in (run.folder / "history.jsonl").read_text().splitlines()]
    seen = [(line["step"], sorted({key.split("/")[0] for key in line if "/" in key})) for line in lines]
    assert seen == [(0, ["val"]), (0, ["train"]), (1, ["train"]), (1, ["train"]), (2, ["train"])]
    rewards = [t.reward for group in run.groups[1] for t in group]
    assert lines[3]["train/reward"] == pytest.approx(sum(rewards) / len(rewards))
    trained = lines[4]
    for name in ("loss", "policy_loss", "entropy", "grad_norm", "learning_rate", "tokens_packed", "seconds"):
        assert isinstance(trained[f"train/{name}"], float), name
    assert "train/kl_div" not in trained
    assert trained["train/num_groups_submitted"] == len(QUESTIONS)
    assert sum(value for key, value in trained.items() if key.startswith("train/outcome_")) == len(rewards)
    assert run.results[1].metrics == {k.removeprefix("train/"): v for k, v in trained.items() if k.startswith("train/")}


async def test_the_parquet_gives_back_the_groups_that_were_trained(run):
    for step, groups in enumerate(run.groups):
        path = run.folder / "trajectories" / "train" / f"{step:04d}.parquet"
        assert read_trajectory_groups_parquet(str(path)) == groups
        assert polars.read_parquet(path)["reward"].to_list() == [t.reward for group in groups for t in group]


async def test_no_file_holds_the_key(run):
    key = run.model.inference_api_key.encode()
    for path in run.folder.rglob("*"):
        assert not path.is_file() or key not in path.read_bytes(), path
    model = json.loads((run.folder / "model.json").read_text())
    assert model["base_model"] == run.model.base_model
    assert "inference_api_key" not in model


async def test_no_process_shows_the_key_on_its_command_line(run):
    listed = await asyncio.to_thread(subprocess.run, ["ps", "axww", "-o", "args"], capture_output=True, text=True)
    assert "ray::VLLMActor" in listed.stdout or "vllm:first-run/policy" in listed.stdout
    assert run.model.inference_api_key not in listed.stdout


async def test_without_a_key_wandb_was_asked_for_and_ran_offline(run):
    assert os.environ.get("WANDB_API_KEY") is None
    assert list(run.folder.rglob("offline-run-*")) or list(run.folder.rglob("*.wandb"))


async def test_a_stopped_run_resumes_and_groups_without_spread_advance_the_step_by_a_copy(run):
    """The last test on the first backend: it ends it, resumes with another, and trains on."""
    best_before = run.model.best_step("train/reward")
    assert best_before in (0, 1)
    await run.model.delete_checkpoints(best_checkpoint_metric="train/reward")
    checkpoints = run.folder / "checkpoints"
    assert complete_steps(checkpoints) == sorted({best_before, 2})
    await run.backend.close()

    model, backend = make_model(Path(run.model.base_path), Path(run.model.base_model)), make_backend()
    try:
        await model.register(backend)
        assert await model.get_step() == 2
        groups = await gather(model)
        assert {s.policy_versions[0] for s in samplings(groups)} == {2}
        assert (await model.train(groups, art_ray.TrainConfig(learning_rate=1e-3))).step == 3

        flat = [art_ray.TrajectoryGroup([t.model_copy(update={"reward": 1.0}) for t in group]) for group in groups]
        result = await model.train(flat)
        assert (result.step, result.metrics["num_groups_trainable"]) == (4, 0)
        old, new = (checkpoint.read_manifest(checkpoints, step).files for step in (3, 4))
        assert old["adapter_model.safetensors"].sha256 == new["adapter_model.safetensors"].sha256
        assert Sampling.of((await rollout(model, QUESTIONS[0])).messages_and_choices[-1]).policy_versions[0] == 4
    finally:
        await backend.close()
