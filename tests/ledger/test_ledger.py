import json
import logging
import math
import subprocess
import sys
from datetime import datetime

import numpy as np
import polars
import pytest

from art_ray.errors import ConfigError, InvalidNameError, UnknownKeyError
from art_ray.ledger import LedgerConfig, read_trajectory_groups_parquet
from art_ray.trajectories import Trajectory, TrajectoryGroup
from tests.ledger.made import answer, conversation, group_of, ledger_at, lines_of, parquet_files


@pytest.fixture
def ledger(tmp_path):
    return ledger_at(tmp_path)


def logged(ledger, *groups, **values):
    """The metrics of one log call, without split, step and time."""
    ledger.log(list(groups), split="val", step=0, **values)
    line = lines_of(ledger)[-1]
    assert line.pop("step") == 0
    assert datetime.fromisoformat(line.pop("recorded_at")).utcoffset() is not None
    return {key.removeprefix("val/"): value for key, value in line.items()}


def test_creating_a_ledger_writes_nothing(tmp_path):
    ledger = ledger_at(tmp_path)
    assert ledger.history().height == 0
    assert ledger.best_step("val/reward") is None
    assert ledger.learning_rate_multiplier() == 1.0
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_each_metric_is_what_its_name_says(ledger):
    first = TrajectoryGroup(
        [
            Trajectory([], reward=1.0, metrics={"turns": 2, "won": True}),
            Trajectory([], reward=0.0, metrics={"turns": 4}),
            ValueError("failed"),
        ],
        metrics={"difficulty": 0.5},
    )
    second = TrajectoryGroup([Trajectory([], reward=0.5)], metrics={"difficulty": 1.5, "rare": 3})
    assert logged(ledger, first, second) == {
        "reward": 0.5,  # over all three trajectories
        "exception_rate": 0.25,
        "reward_std_dev": 0.5,  # of the first group alone: the second has one trajectory
        "turns": 3.0,
        "won": 1.0,
        "group_difficulty": 1.0,
        "group_rare": 3.0,
    }


def test_the_mean_of_rewards_weighs_trajectories_not_groups(ledger):
    assert logged(ledger, group_of(1.0), group_of(0.0, 0.0, 0.0))["reward"] == 0.25


def test_the_spread_is_the_population_standard_deviation(ledger):
    assert logged(ledger, group_of(0.0, 1.0, 1.0), group_of(2.0, 2.0))["reward_std_dev"] == pytest.approx(2**0.5 / 6)


def test_a_small_spread_of_large_rewards_is_not_lost(ledger):
    assert logged(ledger, group_of(1e9, 1e9 + 1))["reward_std_dev"] == 0.5


def test_exceptions_count_though_iterating_a_group_passes_them_over(ledger):
    assert logged(ledger, TrajectoryGroup([ValueError("a"), ValueError("b")])) == {
        "exception_rate": 1.0,
        "reward_std_dev": 0.0,
    }


def test_an_empty_group_has_neither_reward_nor_exception_rate(ledger):
    assert logged(ledger, TrajectoryGroup([])) == {"reward_std_dev": 0.0}
    assert len(parquet_files(ledger)) == 1


def test_what_is_not_scored_is_kept_and_enters_no_mean(ledger):
    group = group_of(1.0, math.nan, 0.5, math.inf)
    metrics = logged(ledger, group)
    assert metrics == {"reward": 0.75, "exception_rate": 0.0, "reward_std_dev": 0.25}
    assert read_trajectory_groups_parquet(parquet_files(ledger)[0]) == [group]


def test_a_metric_that_is_not_finite_is_null_with_a_warning(ledger, caplog):
    with caplog.at_level(logging.WARNING):
        metrics = logged(ledger, metrics={"loss": math.nan, "grad": np.float32("inf")})
    assert metrics == {"loss": None, "grad": None}
    assert "val/loss is nan at step 0" in caplog.text
    assert "val/grad is inf at step 0" in caplog.text


def test_a_custom_metric_with_a_built_ins_name_stays_out_of_the_history(ledger, caplog):
    group = TrajectoryGroup([Trajectory([], reward=0.25, metrics={"exception_rate": 9, "fine": 1})])
    with caplog.at_level(logging.WARNING):
        assert logged(ledger, group) == {"reward": 0.25, "exception_rate": 0.0, "reward_std_dev": 0.0, "fine": 1.0}
        logged(ledger, group)
    assert caplog.text.count("'exception_rate' carries the name of a built-in") == 1
    assert read_trajectory_groups_parquet(parquet_files(ledger)[0]) == [group]


def test_given_metrics_join_the_same_line(ledger):
    assert logged(ledger, group_of(1.0), metrics={"kl": 0.5, "seen": True}) == {
        "reward": 1.0, "exception_rate": 0.0, "reward_std_dev": 0.0, "kl": 0.5, "seen": 1,
    }  # fmt: skip
    assert len(lines_of(ledger)) == 1
    assert logged(ledger, metrics={"reward": 0.5}) == {"reward": 0.5}, "alone, a built-in's name is free"


def test_nothing_at_all_writes_nothing(ledger):
    for groups, metrics in [(None, None), ([], None), (iter(()), {}), (None, {})]:
        receipt = ledger.log(groups, split="val", step=0, metrics=metrics, request_id="x")
        assert (receipt.parquet_path, receipt.metrics) == (None, {})
    assert not ledger.folder.exists()


def test_a_generator_is_consumed_once_and_a_group_at_a_time(ledger):
    alive, seen = [], []

    def groups():
        for reward in (0.0, 0.5, 1.0):
            alive.append(reward)
            seen.append(len(alive))
            yield group_of(reward, reward)
            alive.remove(reward)

    receipt = ledger.log(groups(), split="val", step=0)
    assert seen == [1, 1, 1], "each group was let go before the next was asked for"
    assert receipt.metrics["val/reward"] == 0.5
    assert len(read_trajectory_groups_parquet(receipt.parquet_path)) == 3


def test_the_receipt_says_what_was_written(ledger):
    failed = TrajectoryGroup([*group_of(0.0, 1.0), ValueError("x")])
    receipt = ledger.log([failed, group_of(0.5, 0.5)], split="train", step=7, metrics={"bad": math.nan})
    assert receipt.parquet_path == str(ledger.folder / "trajectories/train/0007.parquet")
    [line] = lines_of(ledger)
    assert {key: None if math.isnan(value) else value for key, value in receipt.metrics.items()} == {
        key: value for key, value in line.items() if key.startswith("train/")
    }
    assert receipt.outcomes == {"scored": 2, "failed": 1, "no_spread": 2}


def test_a_further_log_of_a_step_never_overwrites(ledger):
    paths = [ledger.log([group_of(float(i))], split="val", step=3).parquet_path for i in range(3)]
    assert [path.rsplit("/", 1)[1] for path in paths] == ["0003.parquet", "0003.001.parquet", "0003.002.parquet"]
    for i, path in enumerate(paths):
        assert read_trajectory_groups_parquet(path) == [group_of(float(i))]


def test_no_temporary_file_stays(ledger):
    ledger.log([group_of(0.0, 1.0)], split="val", step=3, request_id="a")
    ledger.log(None, split="val", step=3, metrics={"x": 1}, request_id="b")
    assert not [path for path in ledger.folder.rglob("*") if path.suffix == ".tmp"]


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    import fcntl
    import os

    folder = ledger_at(tmp_path).folder / "trajectories" / "val"
    folder.mkdir(parents=True)
    dead, living, fresh = folder / ".a.tmp", folder / ".b.tmp", folder / ".c.tmp"
    for path in (dead, living, fresh):
        path.write_bytes(b"half")
    for path in (dead, living):
        os.utime(path, (1, 1))
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ledger_at(tmp_path).log(None, split="val", step=0, metrics={"x": 1})
    assert (dead.exists(), living.exists(), fresh.exists()) == (False, True, True)


# --- repeated requests


def test_a_repeated_request_writes_nothing_and_returns_the_same_receipt(tmp_path):
    group = group_of(0.0, 1.0)
    first = ledger_at(tmp_path)
    with_groups = first.log([group], split="train", step=4, request_id="a", metrics={"bad": 1})
    alone = first.log(None, split="train", step=5, metrics={"loss": 0.5}, request_id="b")
    for ledger in (first, ledger_at(tmp_path), ledger_at(tmp_path)):  # later ledgers stand for later processes
        assert ledger.log([group], split="train", step=4, request_id="a", metrics={"bad": 1}) == with_groups
        assert ledger.log(None, split="train", step=5, metrics={"loss": 0.5}, request_id="b") == alone
    assert len(lines_of(first)) == 2
    assert len(parquet_files(first)) == 1
    assert set(lines_of(first)[1]) == {"train/loss", "step", "recorded_at"}, "the id is not in the history"


def test_a_repeated_request_does_not_read_its_groups_again(tmp_path):
    ledger_at(tmp_path).log([group_of(1.0)], split="train", step=4, request_id="a")

    def unreadable():
        raise AssertionError("the groups may be gone by now")
        yield

    assert ledger_at(tmp_path).log(unreadable(), split="train", step=4, request_id="a").parquet_path


def test_other_requests_at_the_same_step_are_not_taken_for_it(tmp_path):
    for i in range(3):
        ledger_at(tmp_path).log([group_of(float(i))], split="train", step=4, request_id=str(i))
    ledger = ledger_at(tmp_path)
    assert ledger.log([group_of(1.0)], split="train", step=4, request_id="1").metrics["train/reward"] == 1.0
    assert len(parquet_files(ledger)) == len(lines_of(ledger)) == 3


@pytest.mark.parametrize("groups", [[group_of(0.0, 1.0)], None], ids=["groups", "metrics alone"])
@pytest.mark.parametrize("torn", [False, True])
def test_a_request_that_died_before_its_history_line_is_completed(tmp_path, groups, torn):
    ledger = ledger_at(tmp_path)
    ledger.log(None, split="val", step=0, metrics={"x": 1})
    receipt = ledger.log(groups, split="train", step=4, metrics={"loss": 1.0}, request_id="a")
    path = ledger.folder / "history.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    path.write_bytes(whole[: start + (9 if torn else 0)])  # as if killed here
    for _ in range(2):
        again = ledger_at(tmp_path).log(groups, split="train", step=4, metrics={"loss": 1.0}, request_id="a")
        assert again == receipt
    lines = path.read_bytes().splitlines()
    assert lines.count(whole[start:].rstrip()) == 1
    assert len(lines) == (3 if torn else 2)
    assert len(parquet_files(ledger)) == (0 if groups is None else 1)


def test_state_remembers_a_bounded_number_of_requests(tmp_path):
    ledger = ledger_at(tmp_path)
    for i in range(70):
        ledger.log(None, split="train", step=i, metrics={"x": i}, request_id=str(i))
    assert list(json.loads((ledger.folder / "state.json").read_text())["requests"]) == [str(i) for i in range(6, 70)]


def test_a_state_that_cannot_be_read_is_replaced(tmp_path, caplog):
    ledger = ledger_at(tmp_path)
    ledger.log(None, split="train", step=0, metrics={"x": 1})
    (ledger.folder / "state.json").write_text("{torn")
    ledger.log(None, split="train", step=0, metrics={"x": 1}, request_id="a")
    assert "a" in json.loads((ledger.folder / "state.json").read_text())["requests"]


# --- configuration, names, model.json


@pytest.mark.parametrize("names", [{"project": ".."}, {"name": "a/b"}, {"name": ""}])
def test_names_that_are_no_path_parts_are_refused_at_construction(tmp_path, names):
    with pytest.raises(InvalidNameError):
        ledger_at(tmp_path, **names)


@pytest.mark.parametrize("split", ["", "a/b", ".x", "x\n"])
def test_a_split_that_is_no_path_part_is_refused_before_anything_is_written(ledger, split):
    with pytest.raises(InvalidNameError, match="split"):
        ledger.log([group_of(1.0)], split=split, step=0)
    assert not ledger.folder.exists()


def test_an_unknown_reporter_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"nearest: 'wandb'.*tensorboard, wandb"):
        ledger_at(tmp_path, reporters=["wandbb"])


def test_an_unknown_key_of_the_configuration_is_refused():
    with pytest.raises(UnknownKeyError, match="nearest: 'base_path'"):
        LedgerConfig(basepath="x", project="p", name="n")


def model_json_of(ledger):
    ledger.log(None, split="val", step=0, metrics={"x": 1})
    return json.loads((ledger.folder / "model.json").read_text())


def test_model_json_has_the_fields_and_no_secret(tmp_path):
    fields = {
        "base_model": "m",
        "inference_api_key": "sk-1",
        "config": {"max_tokens": 1, "api_key": "sk-2", "deep": [{"hf_token": "t"}]},
    }
    ledger = ledger_at(tmp_path, model_json=fields)
    assert model_json_of(ledger) == {
        "project": "demo", "name": "agent", "base_model": "m", "config": {"max_tokens": 1, "deep": [{}]},
    }  # fmt: skip
    assert "sk-1" not in repr(ledger.config)


SECRETS = [
    "secret_key", "aws_secret_access_key", "private_key", "accessToken", "Authorization", "openai_key", "openAIKey",
    "OPENAI-KEY", "hf-token", "passphrase", "db_password", "PGPASSWORD", "apiKey", "APIKEY", "apikey",
    "x-goog-api-key", "clientSecret", "authToken", "bearer", "Cookie", "credentials", "oauth2Token", "smtp_pass",
    "api_tokens", "accesstoken", "key2",
]  # fmt: skip
INNOCENT = [
    "max_tokens", "num_tokens", "tokens", "tokenizer", "keyboard", "monkey", "author", "authors", "base_model",
    "pass_rate", "compass", "tokens_packed",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_what_a_name_says_is_a_secret_is_told_to_no_one(tmp_path, name):
    config = {name: ["s3cr3t"], "env": [({name: {"deep": "s3cr3t"}},)]}
    assert "s3cr3t" not in json.dumps(model_json_of(ledger_at(tmp_path, model_json={name: "s3cr3t", "config": config})))


@pytest.mark.parametrize("name", INNOCENT)
def test_an_innocent_name_stays(tmp_path, name):
    assert model_json_of(ledger_at(tmp_path, model_json={"config": {name: "open"}}))["config"] == {name: "open"}


def test_a_number_under_the_name_of_a_token_is_a_count_and_stays(tmp_path):
    config = {"eos_token_id": 2, "token_budget": 100, "use_auth": True, "key": None}
    assert model_json_of(ledger_at(tmp_path, model_json={"config": {**config, "password": 1234}}))["config"] == config


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://user:pa55@host:8000/v1", "https://host:8000/v1"),
        ("https://pa55@host/v1/a@b", "https://host/v1/a@b"),
        ("https://host/v1?api_key=pa55", "https://host/v1"),
        ("https://host/v1#access_token=pa55", "https://host/v1"),
        ("https://user:p@pa55@[::1]:80?x=pa55", "https://[::1]:80"),
        ("redis://:pa/55==@host:6379/0", "redis://host:6379/0"),
        ("see HTTP://u:pa55@host/ and ws://a:pa55@b", "see HTTP://host/ and ws://b"),
        ("http://localhost:8000/v1/models/m@3", "http://localhost:8000/v1/models/m@3"),
        ("mail a@b.c?", "mail a@b.c?"),
    ],
)
def test_a_url_keeps_neither_user_nor_query(tmp_path, url, kept):
    fields = {"inference_base_url": url, "config": {"urls": [url]}}
    assert model_json_of(ledger_at(tmp_path, model_json=fields)) == {
        "project": "demo", "name": "agent", "inference_base_url": kept, "config": {"urls": [kept]},
    }  # fmt: skip


def test_a_value_that_is_no_json_costs_only_itself_and_is_said_once(tmp_path, caplog):
    cyclic = {"a": 1}
    cyclic["self"] = cyclic
    config = {"lr": 0.1, "judge": len, "deep": {"span": (1, len), "x": 2}, len: 3, "cyclic": cyclic, "api_key": len}
    ledger = ledger_at(tmp_path, model_json={"base_model": "m", "config": config})
    for _ in range(2):
        assert model_json_of(ledger) == {
            "project": "demo", "name": "agent", "base_model": "m",
            "config": {"lr": 0.1, "deep": {"span": [1], "x": 2}, "cyclic": {"a": 1}},
        }  # fmt: skip
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "model.json leaves out what it cannot hold: config['judge'] is a builtins.builtin_function_or_method"
    )
    assert "config['deep']['span'][1]" in line
    assert "(and 1 more)" in line


@pytest.mark.parametrize("step", [1.5, "1", None, -1])
def test_a_step_is_a_whole_number_from_zero(ledger, step):
    with pytest.raises((TypeError, ValueError), match="step must be"):
        ledger.log([group_of(1.0)], split="val", step=step)
    assert not ledger.folder.exists()


def test_a_numpy_step_is_a_step(ledger):
    ledger.log([group_of(1.0)], split="val", step=np.int64(3))
    assert lines_of(ledger)[0]["step"] == 3


def test_answers_keep_their_tokens_through_the_ledger(ledger):
    group = TrajectoryGroup([Trajectory(conversation(answer()), reward=r) for r in (0.0, 1.0)])
    assert read_trajectory_groups_parquet(ledger.log([group], split="train", step=0).parquet_path) == [group]


def test_integers_are_exact_in_the_parquet_and_doubles_in_the_history(ledger):
    metrics = {"large": 2**53 + 1, "small": 3}
    group = TrajectoryGroup([Trajectory([], metrics=metrics)], metrics={"large": 2**60 + 1})
    [read] = read_trajectory_groups_parquet(ledger.log([group], split="val", step=0).parquet_path)
    assert (read.trajectories[0].metrics, read.metrics) == (metrics, {"large": 2**60 + 1})
    ledger.log(None, split="train", step=0, metrics=metrics)
    written = [line[key] for line, key in zip(lines_of(ledger), ["val/large", "train/large"], strict=True)]
    assert written == [2.0**53] * 2
    assert set(map(type, written)) == {float}
    assert type(lines_of(ledger)[1]["train/small"]) is int


def test_the_history_frame_has_every_column_that_ever_appeared(ledger):
    ledger.log([group_of(0.5)], split="val", step=0)
    ledger.log(None, split="train", step=1, metrics={"loss": 1})
    frame = ledger.history()
    assert frame["train/loss"].to_list() == [None, 1.0]
    assert frame["val/reward"].to_list() == [0.5, None]
    assert frame["step"].to_list() == [0, 1]


def test_importing_the_ledger_imports_nothing_heavy():
    code = "import sys, art_ray.ledger; print([m for m in ('wandb', 'torch', 'ray', 'polars') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_groups_that_were_too_old_say_so_and_enter_the_metrics_of_their_own_split(tmp_path):
    ledger = ledger_at(tmp_path)
    group = group_of(1.0, 0.0, math.nan, exceptions=[ValueError("lost")])
    receipt = ledger.log([group], split="stale", step=3)
    assert receipt.outcomes == {"stale": 2, "not_scored": 1, "failed": 1}
    assert receipt.metrics["stale/reward"] == 0.5
    assert polars.read_parquet(receipt.parquet_path)["outcome"].to_list() == ["stale", "stale", "not_scored"]
