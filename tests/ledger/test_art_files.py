"""A run of ART 0.5.18 goes on here, and ART reads what is written here. `art_files.py` made the stored files.

The last two tests need ART itself, in an environment of its own:

    python3.11 -m venv /tmp/art && /tmp/art/bin/pip install openpipe-art==0.5.18 numpy duckdb pyarrow
    ART_PYTHON=/tmp/art/bin/python make test ARGS=tests/ledger/test_art_files.py
"""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.trajectories import Trajectory, TrajectoryGroup
from tests.ledger.made import answer, conversation, group_of, ledger_at, lines_of

STORED = Path(__file__).with_name("art_0_5_18")
USER = {"role": "user", "content": "yes, no or maybe? – größer"}


@pytest.fixture
def arts_run(tmp_path):
    """A ledger on a copy of the folder that ART left."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    return ledger_at(tmp_path)


def test_trajectories_that_art_wrote_are_read(arts_run):
    first, second = read_trajectory_groups_parquet(arts_run.folder / "trajectories/train/0000.parquet")
    assert first == TrajectoryGroup(
        [
            Trajectory(
                [USER, {"role": "assistant", "content": "yes"}],
                reward=0.5,
                metrics={"turns": 1, "won": True},
                metadata={"seed": 3},
                logs=["a"],
            ),
            Trajectory([USER, {"role": "assistant", "content": "maybe"}], reward=1.0),
        ],
        metadata={"scenario": "s1"},
        metrics={"difficulty": 0.25},
        logs=["group line"],
    )
    [trajectory] = second
    assert trajectory.tools == [{"type": "function", "function": {"name": "add"}}]
    assert trajectory.messages_and_choices[2]["tool_calls"][0]["id"] == "c1"
    assert trajectory.messages_and_choices[3] == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert read_trajectory_groups_parquet(arts_run.folder / "trajectories/empty/0002.parquet") == []


def test_a_history_that_art_wrote_is_read_and_continued(arts_run):
    before = lines_of(arts_run)
    assert arts_run.best_step("val/reward") == 0
    arts_run.log([group_of(0.25, 1.0)], split="val", step=3)
    assert lines_of(arts_run)[:-1] == before
    frame = arts_run.history()
    assert frame["val/reward"].to_list() == [None, 0.75, None, None, 0.625]
    assert frame["step"].to_list() == [0, 0, 1, 2, 3]


def test_arts_own_state_survives(arts_run):
    theirs = json.loads((arts_run.folder / "state.json").read_text())
    arts_run.log(None, split="train", step=1, metrics={"loss": 1.0}, request_id="r")
    ours = json.loads((arts_run.folder / "state.json").read_text())
    assert theirs.items() <= ours.items()
    assert "r" in ours["requests"]


def test_a_step_that_art_logged_is_never_overwritten(arts_run):
    before = (arts_run.folder / "trajectories/train/0000.parquet").read_bytes()
    receipt = arts_run.log([group_of(0.0, 1.0)], split="train", step=0, request_id="again")
    assert receipt.parquet_path.endswith("0000.001.parquet")
    assert (arts_run.folder / "trajectories/train/0000.parquet").read_bytes() == before


needs_art = pytest.mark.skipif(
    "ART_PYTHON" not in os.environ,
    reason="set ART_PYTHON to a python with openpipe-art==0.5.18, numpy, duckdb and pyarrow: see the docstring above",
)


def run_by_art(*arguments):
    """Runs `art_files.py` under ART's python; returns the last line that it printed, as JSON."""
    script = str(Path(__file__).with_name("art_files.py"))
    answered = subprocess.run([os.environ["ART_PYTHON"], script, *arguments], capture_output=True, text=True)
    assert answered.returncode == 0, answered.stderr
    return json.loads(answered.stdout.splitlines()[-1])


@needs_art
def test_art_goes_on_with_a_run_of_ours_and_back(tmp_path):
    ledger = ledger_at(tmp_path)
    ledger.log([group_of(0.0, 1.0)], split="train", step=0, metrics={"bad": math.nan}, request_id="a")
    ledger.log(None, split="train", step=1, metrics={"loss": 0.5}, request_id="b")
    before = lines_of(ledger)
    assert run_by_art("continue", str(tmp_path)) == [0, 1, 9]
    assert lines_of(ledger)[:2] == before
    assert ledger.best_step("train/reward") == 9
    receipt = ledger_at(tmp_path).log(None, split="train", step=1, metrics={"loss": 0.5}, request_id="b")
    assert receipt.metrics == {"train/loss": 0.5}, "ART left our state alone"
    assert len(lines_of(ledger)) == 3


@needs_art
def test_art_reads_what_is_written_here(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    groups = [
        TrajectoryGroup(
            [
                Trajectory(
                    conversation(answer("ja – größer"), {"role": "user", "content": "why?"}, answer("so")),
                    reward=0.5,
                    metrics={"turns": 2, "bad": math.nan},
                    metadata={"seed": 1, "span": (1, 2), "none": None},
                    logs=["a"],
                ),
                Trajectory(
                    conversation(
                        answer(None, message={"tool_calls": [call]}),
                        {"role": "tool", "tool_call_id": "c1", "content": "2"},
                        {"role": "user", "content": [{"type": "text", "text": "multimodal"}]},
                    ),
                    reward=1.0,
                ),
                ValueError("failed"),
            ],
            metadata={"scenario": "s"},
            metrics={"difficulty": 0.5},
            logs=["line"],
        ),
        TrajectoryGroup([], exceptions=[RuntimeError("all failed")]),
        group_of(0.0, 1.0),
    ]
    path = ledger_at(tmp_path).log(groups, split="train", step=0).parquet_path
    first, second = run_by_art("read", path)
    assert (first["metadata"], first["metrics"], first["logs"]) == ({"scenario": "s"}, {"difficulty": 0.5}, ["line"])
    assert [t["reward"] for t in first["trajectories"]] == [0.5, 1.0]
    spoken, called = (t["messages"] for t in first["trajectories"])
    assert [m["content"] for m in spoken] == ["yes or no?", "ja – größer", "why?", "so"]
    assert [m["role"] for m in spoken] == ["user", "assistant", "user", "assistant"]
    assert called[1]["tool_calls"][0]["function"]["name"] == "add"
    assert called[2]["tool_call_id"] == "c1"
    assert json.loads(called[3]["content"]) == [{"type": "text", "text": "multimodal"}]
    assert first["trajectories"][0]["metrics"] == {"turns": 2}
    assert first["trajectories"][0]["metadata"] == {"seed": 1, "span": "[1, 2]", "none": "null"}
    assert len(second["trajectories"]) == 2
