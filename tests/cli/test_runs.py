"""`art-ray runs`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.cli.made import commit, json_of, made_run, refused, succeed
from tests.ledger.made import group_of, ledger_at


def test_every_run_has_its_steps_rewards_checkpoints_and_last_activity(base):
    commit(base / "demo/models/agent", 1)
    commit(base / "demo/models/agent", 3)
    made_run(base, "falling", rewards=(1.0, 0.25))
    ledger_at(base, project="other", name="new").write_model()
    found = {row["run"]: row for row in json_of("runs", base)["runs"]}
    activity = {run: datetime.fromisoformat(row.pop("last_activity")) for run, row in found.items()}
    assert all(timedelta() <= datetime.now(UTC) - at < timedelta(minutes=5) for at in activity.values())
    assert found["demo/agent"] == {
        "run": "demo/agent",
        "path": str(base / "demo/models/agent"),
        "step": 3,
        "reward_metric": "val/reward",
        "last_reward": 1.0,
        "best_reward": 1.0,
        "best_step": 2,
        "checkpoints": [1, 3],
        "problem": None,
    }
    assert (found["demo/falling"]["last_reward"], found["demo/falling"]["best_step"]) == (0.25, 0)
    assert (found["other/new"]["step"], found["other/new"]["reward_metric"]) == (None, None)
    printed = succeed("runs", base)
    assert all(run in printed for run in found)
    assert "2, newest 3" in printed


def test_without_a_val_split_the_rewards_are_those_of_training(tmp_path):
    ledger_at(tmp_path).log([group_of(0.0, 1.0)], split="train", step=4)
    [row] = json_of("runs", tmp_path)["runs"]
    assert (row["reward_metric"], row["last_reward"], row["best_step"], row["step"]) == ("train/reward", 0.5, 4, 4)


def test_the_run_that_was_active_last_comes_first(base):
    for name in ("b", "a", "c"):
        made_run(base, name)
    assert [row["run"] for row in json_of("runs", base)["runs"]] == ["demo/c", "demo/a", "demo/b", "demo/agent"]


def test_a_torn_last_line_and_a_checkpoint_that_is_incomplete_do_not_count(base):
    folder = base / "demo/models/agent"
    commit(folder, 7)
    (folder / "checkpoints/0007/manifest.json").unlink()
    with (folder / "history.jsonl").open("ab") as file:
        file.write(b'{"val/reward": 9.0, "step": 9, "recorded_at": "2')
    [row] = json_of("runs", base)["runs"]
    assert (row["step"], row["last_reward"], row["checkpoints"]) == (2, 1.0, [])


def test_a_checkpoint_of_a_newer_format_is_said_and_hides_no_other_run(base):
    folder = made_run(base, "newer")
    commit(folder, 1)
    path = folder / "checkpoints/0001/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    rows = {row["run"]: row for row in json_of("runs", base)["runs"]}
    assert "has format 9" in rows["demo/newer"]["problem"]
    assert rows["demo/agent"]["problem"] is None
    assert "newer format" in succeed("runs", base)


def test_trajectories_without_a_history_are_a_run(base):
    (base / "demo/models/agent/history.jsonl").unlink()
    [row] = json_of("runs", base)["runs"]
    assert (row["step"], row["last_reward"]) == (2, None)
    succeed("runs", base)


def test_an_empty_base_path_has_no_runs_and_an_absent_one_is_bad_usage(tmp_path):
    assert succeed("runs", tmp_path) == f"no runs below {tmp_path}\n"
    assert "no folder" in refused("runs", tmp_path / "none")
