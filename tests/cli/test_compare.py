"""`art-ray compare`."""

from __future__ import annotations

import pytest

from tests.cli.made import json_of, made_run, refused, succeed
from tests.ledger.made import group_of, ledger_at


@pytest.fixture
def other(base):
    return made_run(base, "other", rewards=(0.5, 0.25, 0.125, 0.0))


def compared(base, *options):
    return ("compare", "demo/agent", "demo/other", "--base-path", base, *options)


@pytest.mark.usefixtures("other")
def test_runs_stand_side_by_side_with_all_steps_of_either(base):
    lines = succeed(*compared(base)).splitlines()
    assert lines[0] == "val/reward"
    assert lines[1].split() == ["step", "demo/agent", "demo/other"]
    assert [line.split() for line in lines[3:7]] == [
        ["0", "0.25", "0.5"], ["1", "0.5", "0.25"], ["2", "1", "0.125"], ["3", "–", "0"]
    ]  # fmt: skip
    assert "best of demo/agent: 1 at step 2" in lines
    assert "best of demo/other: 0.5 at step 0" in lines


@pytest.mark.usefixtures("other")
def test_json_has_every_step_of_each(base):
    found = json_of(*compared(base, "--metric", "train/reward", "--last", 1))
    assert found["metric"] == "train/reward"
    agent, other = found["runs"]
    assert (agent["steps"], agent["values"], agent["best_step"]) == ([0, 1, 2], [0.25, 0.5, 1.0], 2)
    assert (other["run"], other["steps"]) == ("demo/other", [0, 1, 2, 3])


def test_a_run_without_val_rewards_is_compared_by_those_of_training(base):
    ledger_at(base, name="other").log([group_of(0.0, 1.0)], split="train", step=0)
    assert json_of(*compared(base))["metric"] == "train/reward"


def test_runs_with_nothing_in_common_are_refused_with_what_they_share(base):
    ledger_at(base, name="other").log(None, split="train", step=0, metrics={"exception_rate": 0.5})
    message = refused(*compared(base))
    assert "neither val/reward nor train/reward" in message
    assert "They share: train/exception_rate." in message


@pytest.mark.usefixtures("other")
def test_a_metric_that_one_of_them_lacks_is_refused_with_its_name(base):
    ledger_at(base).log(None, split="val", step=0, metrics={"accuracy": 0.5})
    assert "demo/other has no metric 'val/accuracy'" in refused(*compared(base, "--metric", "val/accuracy"))


def test_one_run_is_not_compared(base):
    assert "two runs or more, got 1" in refused("compare", "demo/agent", "--base-path", base)


def test_runs_of_one_name_below_two_base_paths_are_told_apart_by_their_folders(base, tmp_path):
    other = made_run(tmp_path / "elsewhere")
    printed = succeed("compare", base / "demo/models/agent", other)
    assert f"best of {base / 'demo/models/agent'}" in printed
    assert f"best of {other}" in printed


@pytest.mark.usefixtures("other")
def test_both_are_drawn(base, tmp_path):
    printed = succeed(*compared(base, "--plot", "--png", tmp_path / "both.png"))
    assert "* demo/other" in printed
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
