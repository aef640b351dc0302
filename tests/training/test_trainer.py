"""Steps, checkpoints and resumption of the plain trainer, with a two-layer model."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from art_ray.errors import (
    CheckpointError,
    NonFiniteError,
    TrainingError,
    UnknownBaseModelError,
    UnsupportedLoraError,
)
from art_ray.training import checkpoint
from art_ray.training.config import LoraSettings, TrainerConfig, TrainerSpec
from art_ray.training.lock import LOCK_FILE
from art_ray.training.trainer import Trainer
from art_ray.trajectories import TrajectoryGroup
from art_ray.types import Outcome, TrainConfig
from tests.training.made import complete_steps, random_groups, sample, trajectory

CONFIG = TrainConfig(learning_rate=1e-2)
METRICS = (
    *("loss", "policy_loss", "entropy", "grad_norm", "learning_rate", "num_groups_submitted", "num_groups_trainable"),
    *("num_trajectories_trained", "num_tokens_trained", "tokens_packed", "seconds"),
)
LINEAR = {"adam_epsilon": 1.0}
"""Makes AdamW's update proportional to the gradient. With its usual 1e-8, a gradient of 1e-9 that is nothing but
rounding moves a weight as far as one of 1, and steps that differ in rounding alone cannot be compared."""


def spec(model: Path, directory: Path, **trainer: object) -> TrainerSpec:
    return TrainerSpec(
        base_model=str(model),
        checkpoints_dir=directory,
        trainer=TrainerConfig(**{"dtype": "float32", "device": "cpu", "num_threads": 1, **trainer}),
    )


def groups(step: int) -> list[TrajectoryGroup]:
    return random_groups(seed=step, vocabulary=512)


def adapter(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.step_dir(directory, step) / "adapter_model.safetensors")


def difference(directory: Path, other: Path, step: int = 1) -> float:
    """Between two runs' adapters, relative to how far the first one has moved from step 0."""
    start, one, two = adapter(directory, 0), adapter(directory, step), adapter(other, step)
    moved = torch.cat([(one[name] - start[name]).reshape(-1) for name in one]).double()
    apart = torch.cat([(one[name] - two[name]).reshape(-1) for name in one]).double()
    assert moved.norm() > 0
    return float(apart.norm() / moved.norm())


def test_a_new_trainer_commits_step_0_which_is_the_base_model(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    assert trainer.step == 0
    assert complete_steps(tmp_path) == [0]
    assert checkpoint.verify(tmp_path, 0).base_model == str(tiny_model)
    assert all(not value.any() for name, value in adapter(tmp_path, 0).items() if "lora_B" in name)


def test_a_step_returns_its_metrics_by_their_names_and_commits_them(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    seen = []
    submitted = [*groups(0), TrajectoryGroup([trajectory([5], [6], 1.0), trajectory([5], [7], 1.0), ValueError()])]
    metrics = trainer.train(submitted, CONFIG, 0, progress=seen.append)
    for name in METRICS:
        assert math.isfinite(metrics[name]), name
    assert "kl_div" not in metrics
    assert (metrics["num_groups_submitted"], metrics["num_groups_trainable"]) == (3, 2)
    assert metrics["num_tokens_trained"] == 2 * (6 + 7 + 8)
    assert metrics["tokens_submitted"] == 2 * (3 * 10 + 21)
    assert metrics["tokens_packed"] == metrics["tokens_unique"] == 2 * (10 + 21)
    assert sum(metrics[f"outcome_{outcome}"] for outcome in Outcome) == 9
    assert metrics["outcome_trained"] == 6
    assert trainer.step == 1
    assert checkpoint.read_manifest(tmp_path, 1).metrics == metrics
    assert [event["num_tokens"] for event in seen] == [62]


def test_learning_raises_the_probability_of_what_was_rewarded(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    good = sample([*range(10, 20), 21, 22], [10, 11])
    bad = sample([*range(10, 20), 31, 32], [10, 11])
    before = trainer.logprobs([good, bad])
    for step in range(5):
        old = trainer.logprobs([good, bad])
        group = TrajectoryGroup(
            [
                trajectory(range(10, 20), [21, 22], 1.0, logprobs=old[0].tolist()),
                trajectory(range(10, 20), [31, 32], 0.0, logprobs=old[1].tolist()),
            ]
        )
        metrics = trainer.train([group], CONFIG, step)
        assert metrics["logprob_difference_max"] < 1e-5
    after = trainer.logprobs([good, bad])
    assert after[0].sum() > before[0].sum() + 1
    assert after[1].sum() < before[1].sum()


def test_training_four_steps_equals_two_a_kill_and_two_more_bit_for_bit(tiny_model, tmp_path):
    config = CONFIG.updated({"optimizer_steps_per_train": 2, "warmup_steps": 5, "beta": 0.1})
    straight = Trainer(spec(tiny_model, tmp_path / "straight"))
    for step in range(4):
        straight.train(groups(step), config, step)

    program = (
        "import os, signal, sys; from pathlib import Path; from tests.training.test_trainer import *\n"
        f"trainer = Trainer(spec(Path({str(tiny_model)!r}), Path({str(tmp_path / 'killed')!r})))\n"
        f"config = TrainConfig(**{config.model_dump()!r})\n"
        "for step in range(2): trainer.train(groups(step), config, step)\n"
        "trainer._commit = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "trainer.train(groups(2), config, 2)"
    )
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, env=environment)
    assert killed.returncode == -signal.SIGKILL
    resumed = Trainer(spec(tiny_model, tmp_path / "killed"))
    assert resumed.step == 2
    for step in range(2, 4):
        resumed.train(groups(step), config, step)

    for name in ("adapter_model.safetensors", "optimizer.safetensors", "random_state.json"):
        one, other = ((tmp_path / way / "0004" / name).read_bytes() for way in ("straight", "killed"))
        assert one == other, name


def test_a_step_that_is_committed_is_not_taken_again_and_leaves_the_state_right(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    metrics = trainer.train(groups(0), CONFIG, 0)
    kept = adapter(tmp_path, 1)
    assert trainer.train(groups(5), CONFIG, 0) == metrics
    trainer.close()
    again = Trainer(spec(tiny_model, tmp_path))
    assert again.train(groups(5), CONFIG, 0) == metrics
    assert again.step == 1
    again.train(groups(1), CONFIG, 1)
    assert all(torch.equal(kept[name], value) for name, value in adapter(tmp_path, 1).items())


@pytest.mark.parametrize("supervised", [False, True])
def test_a_committed_step_answers_the_call_that_took_it_and_refuses_another(tiny_model, tmp_path, supervised):
    trainer = Trainer(spec(tiny_model, tmp_path))

    def take(step, request_id, *, nothing=False):
        work = [] if nothing else groups(step)
        if supervised:
            return trainer.sft([one for group in work for one in group], CONFIG, step, request_id=request_id)
        return trainer.train(work, CONFIG, step, request_id=request_id)

    learned, nothing, anonymous = take(0, "a"), take(1, "b", nothing=True), take(2, None)
    assert [checkpoint.read_manifest(tmp_path, step).request_id for step in (1, 2, 3)] == ["a", "b", None]
    assert take(0, "a") == take(0, None) == learned
    assert take(1, "b", nothing=True) == take(1, None) == nothing
    assert take(2, None) == anonymous
    for step, other in ((0, "b"), (1, "a"), (2, "a")):
        with pytest.raises(TrainingError, match=rf"step {step + 1} was taken by another call"):
            take(step, other)


def test_a_step_that_fails_halfway_has_the_effect_of_one_when_repeated(tiny_model, tmp_path):
    config = CONFIG.updated({"optimizer_steps_per_train": 2})
    expected = Trainer(spec(tiny_model, tmp_path / "expected", **LINEAR))
    expected.train(groups(0), config, 0)

    trainer = Trainer(spec(tiny_model, tmp_path / "failing", max_tokens_per_row=20, **LINEAR))
    calls = []

    def fail_in_the_second_optimizer_step(event):
        calls.append(event)
        if event["row"] == 1 and len([c for c in calls if c["row"] == 1]) == 2:
            raise OSError("the progress bar broke")

    with pytest.raises(OSError, match="progress bar"):
        trainer.train(groups(0), config, 0, progress=fail_in_the_second_optimizer_step)
    assert trainer.step == 0
    trainer.train(groups(0), config, 0)
    assert difference(tmp_path / "expected", tmp_path / "failing") < 1e-5


def test_a_step_ahead_of_the_checkpoints_is_refused(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    with pytest.raises(TrainingError, match=r"step 3.*step 0"):
        trainer.train(groups(0), CONFIG, 3)


def test_nothing_to_learn_advances_by_a_copy_and_one_warning_that_counts_the_reasons(tiny_model, tmp_path, caplog):
    trainer = Trainer(spec(tiny_model, tmp_path))
    trainer.train(groups(0), CONFIG, 0)
    equal = TrajectoryGroup([trajectory([1], [2], 0.5), trajectory([1], [3], 0.5), ValueError("x")])
    with caplog.at_level(logging.WARNING):
        metrics = trainer.train([equal], CONFIG, 1)
    (record,) = caplog.records
    assert "2 no_spread" in record.message
    assert "1 failed" in record.message
    assert metrics["num_groups_trainable"] == 0
    assert "loss" not in metrics
    assert trainer.step == 2
    one, two = adapter(tmp_path, 1), adapter(tmp_path, 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    trainer.close()
    assert Trainer(spec(tiny_model, tmp_path)).step == 2


def test_a_non_finite_gradient_skips_the_update_and_is_an_error_the_third_time(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    broken = TrajectoryGroup(
        [trajectory([1, 2], [3], 1.0, logprobs=[-1e5]), trajectory([1, 2], [4], 0.0, logprobs=[-1e5])]
    )
    config = CONFIG.updated({"epsilon_high": 1e38, "truncated_importance_sampling": 1e38})
    for step in range(2):
        metrics = trainer.train([broken], config, step)
        assert metrics["updates_skipped"] == 1
    assert all(not value.any() for name, value in adapter(tmp_path, 2).items() if "lora_B" in name)
    trainer.close()
    with pytest.raises(NonFiniteError, match="3 times in a row"):
        Trainer(spec(tiny_model, tmp_path)).train([broken], config, 2)


def test_the_adapter_loads_with_plain_peft_and_gives_the_trainers_numbers(tiny_model, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = Trainer(spec(tiny_model, tmp_path))
    trainer.train(groups(0), CONFIG, 0)
    settings = json.loads((tmp_path / "0001/adapter_config.json").read_text())
    assert (settings["lora_alpha"], settings["r"]) == (16, 8)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "0001")
    tokens = list(range(3, 30))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    (found,) = trainer.logprobs([sample(tokens, range(1, 27))])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_optimizer_steps_are_a_property_of_the_config_and_not_of_the_packing(tiny_model, tmp_path):
    config = CONFIG.updated({"optimizer_steps_per_train": 3})
    num_rows = []
    for max_tokens in (1000, 19):
        directory = tmp_path / str(max_tokens)
        trainer = Trainer(spec(tiny_model, directory, max_tokens_per_row=max_tokens, **LINEAR))
        num_rows.append(trainer.train(groups(0), config, 0)["num_rows"])
        state = load_file(directory / "0001/optimizer.safetensors")
        assert {float(value) for name, value in state.items() if name.endswith(".step")} == {3.0}
    assert num_rows[1] > num_rows[0]
    assert difference(tmp_path / "1000", tmp_path / "19") < 1e-5


def test_the_order_of_groups_does_not_change_the_step(tiny_model, tmp_path):
    for name, ordered in (("a", groups(0)), ("b", groups(0)[::-1])):
        Trainer(spec(tiny_model, tmp_path / name, **LINEAR)).train(ordered, CONFIG, 0)
    assert difference(tmp_path / "a", tmp_path / "b") < 1e-5


def test_warm_up_counts_optimizer_steps_from_the_start_of_the_run(tiny_model, tmp_path):
    config = CONFIG.updated({"warmup_steps": 4, "learning_rate": 0.004})
    rates = [Trainer(spec(tiny_model, tmp_path)).train(groups(s), config, s)["learning_rate"] for s in range(3)]
    assert rates == pytest.approx([0.001, 0.002, 0.003])


def test_beta_reports_the_kl_to_the_base_model_which_is_zero_at_step_0(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    first = trainer.train(groups(0), CONFIG.updated({"beta": 0.1}), 0)
    second = trainer.train(groups(0), CONFIG.updated({"beta": 0.1}), 1)
    assert first["kl_div"] == pytest.approx(0, abs=1e-6)
    assert second["kl_div"] > 1e-4


def test_training_without_log_probabilities_tokenizes_by_the_template(tiny_models, tmp_path):
    from tests.small_models import make_tiny_model

    model = make_tiny_model(tmp_path / "model", "llama")
    trainer = Trainer(spec(model, tmp_path / "checkpoints"))
    from art_ray.trajectories import Trajectory

    conversation = [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}]
    members = [
        Trajectory(conversation, reward=1.0),
        Trajectory([*conversation[:1], {**conversation[1], "content": "no"}]),
    ]
    refused = trainer.train([TrajectoryGroup(members)], CONFIG, 0)
    assert refused["outcome_no_logprobs"] == 2
    metrics = trainer.train([TrajectoryGroup(members)], CONFIG.updated({"allow_training_without_logprobs": True}), 1)
    assert metrics["num_tokens_trained"] == 4  # yes, no, and each one's end of turn
    assert metrics["ratio_max"] == 1.0


def test_supervised_fine_tuning_raises_the_likelihood_of_the_answers_and_commits_a_step(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    shown = [trajectory(range(10, 20), [21 + i, 22], 0.0, temperature=0.0) for i in range(2)]
    losses = [trainer.sft(shown, CONFIG, step)["loss"] for step in range(4)]
    assert losses[-1] < losses[0] - 0.5
    assert trainer.sft(shown, CONFIG, 3)["loss"] == losses[3]
    imitated = sample([*range(10, 20), 21, 22], [10, 11])
    again = trainer.sft(shown[:1], CONFIG.updated({"learning_rate": 0.0}), 4)
    assert again["loss"] == pytest.approx(-float(trainer.logprobs([imitated])[0].mean()), rel=1e-5)
    assert again["num_tokens_trained"] == 2


@pytest.mark.parametrize(
    ("base_model", "message"),
    [("/no/such/folder", "is no folder"), (".", "config.json"), ("no-such-org-xyz/no-model", "hub id")],
)
def test_an_unknown_base_model_is_an_error_that_says_what_was_tried(base_model, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownBaseModelError, match=message):
        Trainer(spec(Path("x"), tmp_path).updated({"base_model": base_model}))
    assert complete_steps(tmp_path) == []


def test_a_lora_target_that_the_base_model_lacks_is_refused_with_the_nearest(tiny_model, tmp_path):
    asked = spec(tiny_model, tmp_path).updated({"lora": LoraSettings(target_modules=["q_prj"])})
    with pytest.raises(UnsupportedLoraError, match="nearest: 'q_proj'"):
        Trainer(asked)


def test_other_lora_settings_than_the_checkpoints_are_refused(tiny_model, tmp_path):
    Trainer(spec(tiny_model, tmp_path))
    for lora in (LoraSettings(r=4), LoraSettings(target_modules=["q_proj"])):
        with pytest.raises(CheckpointError):
            Trainer(spec(tiny_model, tmp_path).updated({"lora": lora}))


def test_the_trainer_resumes_from_an_older_checkpoint_when_the_newest_is_incomplete(tiny_model, tmp_path):
    trainer = Trainer(spec(tiny_model, tmp_path))
    trainer.train(groups(0), CONFIG, 0)
    trainer.close()
    (tmp_path / "0001/optimizer.safetensors").unlink()
    again = Trainer(spec(tiny_model, tmp_path))
    assert again.step == 0
    again.train(groups(0), CONFIG, 0)
    assert complete_steps(tmp_path) == [0, 1]


def test_a_full_disk_is_an_error_and_the_step_can_be_repeated(tiny_model, tmp_path, monkeypatch):
    trainer = Trainer(spec(tiny_model, tmp_path))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", no_space)
        with pytest.raises(CheckpointError, match="No space"):
            trainer.train(groups(0), CONFIG, 0)
    assert {p.name for p in tmp_path.iterdir()} == {"0000", LOCK_FILE}
    expected = Trainer(spec(tiny_model, tmp_path / "other"))
    expected.train(groups(0), CONFIG, 0)
    trainer.train(groups(0), CONFIG, 0)
    shutil.rmtree(tmp_path / "0000")
    one, other = adapter(tmp_path, 1), adapter(tmp_path / "other", 1)
    assert all(torch.equal(one[name], other[name]) for name in one)
