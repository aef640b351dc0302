"""The frontend alone: what the model remembers and computes, with a stub where a backend would train."""

import asyncio
import copy
import json
import math
import pickle
from pathlib import Path

import pytest

import art_ray
from art_ray.backend import CommittedStep
from art_ray.errors import (
    ConfigError,
    InvalidNameError,
    LedgerWriteError,
    NotRegisteredError,
    UnknownMetricError,
)
from tests.stub_backend import StubBackend


def trainable(tmp_path: Path, **fields) -> art_ray.TrainableModel:
    return art_ray.TrainableModel(
        name="m", project="p", base_model="base", base_path=str(tmp_path), report_metrics=[], **fields
    )


def group(*rewards: float) -> art_ray.TrajectoryGroup:
    return art_ray.TrajectoryGroup([art_ray.Trajectory([{"role": "user", "content": "?"}], reward=r) for r in rewards])


def lines(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "p/models/m/history.jsonl").read_text().splitlines()]


@pytest.fixture
async def registered(tmp_path):
    model, backend = trainable(tmp_path), StubBackend()
    await model.register(backend)
    return model, backend


@pytest.mark.parametrize("bad", ["", "a/b", "..", ".hidden", "a\\b", "a\x00b", "a\nb"])
def test_a_name_that_is_no_path_part_is_refused_when_the_model_is_made_or_changed(bad, tmp_path):
    for kind in ("name", "project"):
        with pytest.raises(InvalidNameError, match=kind):
            art_ray.Model(**{"name": "m", "project": "p", kind: bad})
    model = art_ray.Model(name="m", project="p")
    with pytest.raises(ValueError, match="name"):
        model.name = bad
    assert not list(tmp_path.iterdir())


def test_an_unknown_reporter_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="Known reporters: tensorboard, wandb"):
        art_ray.Model(name="m", project="p", report_metrics=["wandbb"])


async def test_a_split_that_is_no_path_part_is_refused_before_anything_is_written(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    with pytest.raises(InvalidNameError, match="split"):
        await model.log([group(1.0)], split="../val")
    assert not list(tmp_path.iterdir())


async def test_a_hosted_model_logs_at_step_0_without_a_backend(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    await model.log([group(1.0, 0.0)])
    await model.log(metrics={"cost": 3})
    await model.log([])
    (first, second) = lines(tmp_path)
    assert (first["val/reward"], first["val/reward_std_dev"], first["step"]) == (0.5, 0.5, 0)
    assert second["val/cost"] == 3
    assert model.best_step() == 0
    assert model.history()["val/reward"].to_list() == [0.5, None]
    await model.close()


async def test_loose_trajectories_become_one_group_and_a_mixture_is_refused(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    await model.log((t for t in [*group(1.0, 3.0), ValueError("no answer")]), split="test")
    assert lines(tmp_path)[0]["test/exception_rate"] == pytest.approx(1 / 3)
    with pytest.raises(TypeError, match="mixture"):
        await model.log([group(1.0), *group(1.0)])
    assert len(lines(tmp_path)) == 1


def test_a_copy_is_deep_in_its_fields_and_shares_its_connections(tmp_path):
    model = art_ray.Model(name="m", project="p", config={"a": [1]}, base_path=str(tmp_path))
    model._backend = StubBackend()
    for copied in (model.model_copy(deep=True), copy.deepcopy(model)):
        copied.config["a"].append(2)
        copied.name = "n"
        assert (model.config, model.name) == ({"a": [1]}, "m")
        assert copied.backend() is model.backend()


async def test_what_needs_a_backend_says_how_to_get_one(tmp_path):
    model = trainable(tmp_path)
    for call in (model.get_step(), model.train([]), model.delete_checkpoints()):
        with pytest.raises(NotRegisteredError, match="register"):
            await call
    with pytest.raises(NotRegisteredError, match="register"):
        model.openai_client()
    with pytest.raises(ConfigError, match="inference_base_url"):
        art_ray.Model(name="m", project="p").openai_client()


async def test_a_pinned_copy_asks_for_its_version_and_logs_at_its_step_while_the_model_goes_on(registered, tmp_path):
    model, backend = registered
    await model.train([group(0.0, 1.0)])
    pinned = model.pinned(1)
    await model.train([group(0.0, 1.0)])
    assert (pinned.get_inference_name(), model.get_inference_name()) == ("m@1", "m")
    assert (await pinned.get_step(), await model.get_step()) == (1, 2)
    await pinned.log([group(0.5)])
    assert (lines(tmp_path)[-1]["val/reward"], lines(tmp_path)[-1]["step"]) == (0.5, 1)
    for training in (pinned.train, pinned.sft):
        with pytest.raises(ConfigError, match="pinned at step 1 trains nothing"):
            await training([group(0.0, 1.0)])
    await pinned.delete_checkpoints()
    assert backend.kept == [1, 2], "the latest of the model, and the best"


async def test_registering_changes_no_path_opens_no_run_and_shows_no_key(registered, tmp_path):
    model, _ = registered
    assert model.base_path == str(tmp_path)
    assert model.inference_api_key == "a-secret-key"
    assert "a-secret-key" not in repr(model) + str(model)
    assert not list(tmp_path.iterdir())


def test_names_pin_versions(tmp_path):
    model = trainable(tmp_path)
    assert (model.get_inference_name(), model.get_inference_name(step=3)) == ("m", "m@3")
    hosted = art_ray.Model(name="m", project="p", inference_model_name="gpt")
    assert (hosted.get_inference_name(), hosted.get_inference_name(step=3)) == ("gpt", "gpt")


async def test_training_logs_the_groups_at_the_step_before_and_the_metrics_at_the_step_after(registered, tmp_path):
    model, backend = registered
    result = await model.train([group(0.0, 1.0)], art_ray.TrainConfig(learning_rate=0.1))
    assert (result.step, result.metrics) == (1, {"loss": 2.0, "seconds": 2.0, "num_groups_submitted": 1.0})
    before, after = lines(tmp_path)
    assert (before["step"], before["train/reward"]) == (0, 0.5)
    assert (after["step"], after["train/loss"], after["train/seconds"]) == (1, 2.0, 2.0)
    assert (tmp_path / "p/models/m/trajectories/train/0000.parquet").exists()
    assert backend.seen[0][1].learning_rate == 0.1


async def test_experimental_options_win_and_unknown_ones_are_refused_before_anything_is_logged(registered, tmp_path):
    model, backend = registered
    with pytest.raises(ConfigError, match="nearest: 'epsilon'"):
        await model.train([group(0.0, 1.0)], _config={"epsilonn": 0.1})
    assert not list(tmp_path.iterdir())
    await model.train([group(0.0, 1.0)], art_ray.TrainConfig(loss="cispo"), _config={"loss": "ppo"})
    assert backend.seen[0][1].loss == "ppo"


@pytest.mark.parametrize("moment", ["fail_before", "fail_after"])
async def test_the_same_call_again_after_a_failure_has_the_effect_of_one(registered, tmp_path, moment):
    model, backend = registered
    groups = [group(0.0, 1.0), group(1.0, 3.0)]
    setattr(backend, moment, True)
    with pytest.raises(RuntimeError, match="lost"):
        await model.train(groups)
    setattr(backend, moment, False)
    result = await model.train(groups)
    assert result.step == 1
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert sorted(p.name for p in (tmp_path / "p/models/m/trajectories/train").iterdir()) == ["0000.parquet"]
    assert backend.step == 1
    # The next call, with the same groups even, is a call of its own.
    assert (await model.train(groups)).step == 2


async def test_a_step_whose_metrics_could_not_be_logged_is_not_taken_again(registered, tmp_path):
    model, backend = registered
    history = tmp_path / "p/models/m/history.jsonl"

    def no_more_logging() -> None:
        history.rename(history.with_name("aside"))
        history.mkdir()

    backend.during = no_more_logging
    groups = [group(0.0, 1.0)]
    with pytest.raises(LedgerWriteError):
        await model.train(groups)
    history.rmdir()
    history.with_name("aside").rename(history)
    result = await model.train(groups)
    assert (result.step, result.metrics["loss"], backend.step, len(backend.seen)) == (1, 2.0, 1, 1)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


async def test_metrics_that_a_dead_process_left_unlogged_are_logged_once_by_its_successor(tmp_path):
    backend = StubBackend()
    backend.step = 3
    backend.committed = CommittedStep(3, "train", "train-abc", {"loss": 0.5, "num_groups_submitted": 2.0})
    for _ in range(2):
        model = trainable(tmp_path)
        await model.register(backend)
    assert [(line["step"], line["train/loss"]) for line in lines(tmp_path)] == [(3, 0.5)]


async def test_registering_again_between_a_failure_and_its_repetition_changes_nothing(registered, tmp_path):
    model, backend = registered
    groups = [group(0.0, 1.0)]
    backend.fail_after = True
    with pytest.raises(RuntimeError, match="lost"):
        await model.train(groups)
    backend.fail_after = False
    await model.register(backend)
    assert (await model.train(groups)).step == 1
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


async def test_other_groups_after_a_call_that_was_given_up_are_the_next_step_and_its_metrics_are_kept(
    registered, tmp_path
):
    model, backend = registered
    backend.fail_after = True
    with pytest.raises(RuntimeError, match="lost"):
        await model.train([group(0.0, 1.0)])
    backend.fail_after = False
    assert (await model.train([group(0.0, 2.0)])).step == 2
    assert [(line["step"], "train/loss" in line) for line in lines(tmp_path)] == [
        (0, False),
        (1, True),
        (1, False),
        (2, True),
    ]


async def test_a_model_that_cannot_train_is_refused_before_anything_is_remembered(tmp_path):
    model, backend = trainable(tmp_path), StubBackend()
    backend.prepared = False
    with pytest.raises(ConfigError, match="cannot be prepared"):
        await model.register(backend)
    with pytest.raises(NotRegisteredError):
        await model.train([group(0.0, 1.0)])
    backend.prepared = True
    await model.register(backend)
    backend.prepared = False
    with pytest.raises(ConfigError, match="not prepared"):
        await model.train([group(0.0, 1.0)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"metrics": {"x": "y"}}, TypeError),
        ({"metrics": [1]}, TypeError),
        ({"step": "3"}, TypeError),
        ({"step": -1}, ValueError),
    ],
)
async def test_arguments_of_a_log_call_are_checked_where_it_is_made(tmp_path, arguments, error):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    with pytest.raises(error):
        await model.log([group(1.0)], **arguments)
    assert not list(tmp_path.iterdir())


async def test_a_home_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = art_ray.Model(name="m", project="p", base_path="~/runs", report_metrics=[])
    await model.log([group(1.0)])
    assert (tmp_path / "runs/p/models/m/history.jsonl").exists()


async def test_failures_are_part_of_what_makes_two_calls_the_same(registered, tmp_path):
    model, backend = registered
    backend.fail_before = True
    for text in ("first", "second"):
        with pytest.raises(RuntimeError, match="lost"):
            await model.train([art_ray.TrajectoryGroup([ValueError(text)])])
    assert len(list((tmp_path / "p/models/m/trajectories/train").iterdir())) == 2


async def test_a_renamed_copy_logs_under_its_own_name(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    await model.log([group(1.0)])
    other = model.model_copy(deep=True)
    other.name = "n"
    await other.log([group(2.0)])
    assert [line["val/reward"] for line in lines(tmp_path)] == [1.0]
    assert other.history()["val/reward"].to_list() == [2.0]


def test_a_client_follows_the_address_and_takes_no_foreign_key_along(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    model = art_ray.Model(name="m", project="p", inference_base_url="http://127.0.0.1:1/v1")
    assert model.openai_client().api_key == "none"
    model.inference_base_url, model.inference_api_key = "http://127.0.0.1:2/v1", "mine"
    client = model.openai_client()
    assert (client.api_key, client.base_url.port) == ("mine", 2)
    assert model.openai_client() is client
    model.inference_base_url, model.inference_api_key = "https://api.openai.com/v1", None
    assert model.openai_client().api_key == "sk-of-openai"


async def test_two_train_calls_at_once_take_two_steps_one_after_the_other(registered, tmp_path):
    model, backend = registered
    results = await asyncio.gather(model.train([group(0.0, 1.0)]), model.train([group(0.0, 3.0)]))
    assert [result.step for result in results] == [1, 2]
    assert [len(groups) for groups, _ in backend.seen] == [1, 1]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 1, 2]


async def test_loose_trajectories_repeated_after_a_failure_are_the_same_call(registered, tmp_path):
    model, backend = registered
    trajectories = [*group(0.0, 1.0)]
    backend.fail_before = True
    with pytest.raises(RuntimeError, match="lost"):
        await model.train(trajectories)
    backend.fail_before = False
    await model.train(trajectories)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


async def test_supervised_steps_are_logged_as_a_split_of_their_own(registered, tmp_path):
    model, backend = registered
    results = await art_ray.sft(model, [*group(0.0, 1.0, 2.0)], num_epochs=2, trajectories_per_step=2)
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert [len(groups[0]) for groups, _ in backend.seen] == [2, 1, 2, 1]
    assert [(line["step"], "sft/loss" in line) for line in lines(tmp_path)][:4] == [
        (0, False),
        (1, True),
        (1, False),
        (2, True),
    ]
    assert (tmp_path / "p/models/m/trajectories/sft/0000.parquet").exists()


async def test_the_learning_rate_follows_the_spread_of_rewards_on_a_copy_of_the_config(registered, tmp_path):
    model, backend = registered
    config = art_ray.TrainConfig(learning_rate=1.0, scale_learning_rate_by_reward_std_dev=True)
    for spread in (0.5, 0.1, 0.0, 0.0):
        await model.train([group(0.0, 2 * spread)], config)
    rates = [seen.learning_rate for _, seen in backend.seen]
    assert config.learning_rate == 1.0
    # Lines through (0, .5), (0, .5) (1, .1), then (2, 0), then (3, 0): a x + b with b = .5, .5, .45, .39.
    assert rates[:2] == pytest.approx([1.0, 0.2])
    assert all(0.01 <= rate <= 1 for rate in rates)
    logged = [line["train/learning_rate_multiplier"] for line in lines(tmp_path) if "train/loss" in line]
    assert logged == pytest.approx(rates)


async def test_the_latest_and_the_best_checkpoint_are_kept(registered, tmp_path):
    model, backend = registered
    for step, reward in enumerate([0.1, 0.9, 0.9, 0.3]):
        await model.log([group(reward)], split="val", step=step)
    backend.step = 3
    await model.delete_checkpoints()
    assert backend.kept == [2, 3]
    backend.kept = None
    with pytest.raises(UnknownMetricError, match="val/reward"):
        await model.delete_checkpoints("val/rewrd")
    assert backend.kept is None


async def test_a_reward_that_is_not_a_number_enters_no_mean(tmp_path):
    model = art_ray.Model(name="m", project="p", base_path=str(tmp_path), report_metrics=[])
    await model.log([group(1.0, math.nan)])
    assert lines(tmp_path)[0]["val/reward"] == 1.0


def test_options_of_one_model_are_known_or_refused():
    with pytest.raises(ConfigError, match="nearest: 'peft_args'"):
        art_ray.TrainableModel(name="m", project="p", base_model="b", _internal_config={"peft_arg": {}})


def test_a_result_pickles():
    result = art_ray.TrainResult(step=1, metrics={"loss": 1.0})
    assert pickle.loads(pickle.dumps(result)) == result
