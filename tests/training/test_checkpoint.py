"""The checkpoint directory: whole or absent."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from art_ray.errors import CheckpointError
from art_ray.training import checkpoint


def commit(directory, step, content=b"weights", metrics=None):
    def write(target):
        (target / "adapter_model.safetensors").write_bytes(content)

    return checkpoint.commit(directory, step, write, base_model="m", metrics=metrics or {}, config={})


def test_reading_and_deleting_checkpoints_needs_no_torch():
    program = "import sys, art_ray.training.checkpoint, art_ray.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_committed_step_is_found_with_its_metrics(tmp_path):
    commit(tmp_path, 3, metrics={"loss": 0.5, "grad_norm": math.inf, "entropy": math.nan})
    assert checkpoint.newest_step(tmp_path) == 3
    found = checkpoint.verify(tmp_path, 3).metrics
    assert (found["loss"], found["grad_norm"]) == (0.5, math.inf)
    assert math.isnan(found["entropy"])
    json.loads((tmp_path / "0003/manifest.json").read_text(), parse_constant=pytest.fail)


def test_there_is_no_step_where_there_is_no_directory(tmp_path):
    assert checkpoint.newest_step(tmp_path / "none") is None
    assert checkpoint.delete_all_but(tmp_path / "none", []) == []


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "missing file", "short file", "renamed"])
def test_a_damaged_directory_is_no_checkpoint(tmp_path, damage):
    commit(tmp_path, 0)
    commit(tmp_path, 1)
    target = tmp_path / "0001"
    if damage == "no manifest":
        (target / "manifest.json").unlink()
    elif damage == "torn manifest":
        (target / "manifest.json").write_text((target / "manifest.json").read_text()[:50])
    elif damage == "missing file":
        (target / "adapter_model.safetensors").unlink()
    elif damage == "short file":
        (target / "adapter_model.safetensors").write_bytes(b"w")
    else:
        target.rename(tmp_path / "0002")
    assert checkpoint.newest_step(tmp_path) == 0
    commit(tmp_path, 1)
    assert checkpoint.newest_step(tmp_path) == 1


def test_an_altered_file_of_the_same_size_is_found_by_its_hash(tmp_path):
    commit(tmp_path, 1)
    (tmp_path / "0001/adapter_model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors was altered"):
        checkpoint.verify(tmp_path, 1)


def test_a_newer_format_is_refused_with_both_versions_and_left_alone(tmp_path):
    commit(tmp_path, 0)
    commit(tmp_path, 1)
    path = tmp_path / "0001/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    for ask in (
        lambda: checkpoint.read_manifest(tmp_path, 1),
        lambda: checkpoint.newest_step(tmp_path),
        lambda: checkpoint.delete_all_but(tmp_path, [0]),
        lambda: commit(tmp_path, 1),
    ):
        with pytest.raises(CheckpointError, match="format 9; this version reads formats up to 1"):
            ask()
    assert (tmp_path / "0001/adapter_model.safetensors").read_bytes() == b"weights"


def test_committing_a_complete_step_again_changes_nothing(tmp_path):
    commit(tmp_path, 1, b"first", {"loss": 1.0})
    assert commit(tmp_path, 1, b"second", {"loss": 2.0}).metrics == {"loss": 1.0}
    assert (tmp_path / "0001/adapter_model.safetensors").read_bytes() == b"first"


@pytest.mark.parametrize("kind", [OSError, SafetensorError, RuntimeError])
def test_a_writer_that_fails_is_a_checkpoint_error_and_leaves_nothing(tmp_path, kind):
    def write(target):
        (target / "half").write_bytes(b"x")
        raise kind("No space left on device")

    with pytest.raises(CheckpointError, match="No space"):
        checkpoint.commit(tmp_path, 1, write, base_model="m", metrics={}, config={})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_swept(tmp_path):
    commit(tmp_path, 1)
    (tmp_path / "0001").rename(tmp_path / ".writing-0001-abc")
    assert checkpoint.newest_step(tmp_path) is None
    checkpoint.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_but_the_kept_steps_are_deleted_and_named(tmp_path):
    for step in range(5):
        commit(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert checkpoint.delete_all_but(tmp_path, [1, 4]) == [0, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001", "0004", "notes"]


def test_which_steps_are_complete_and_which_would_be_deleted_is_known_beforehand(tmp_path):
    for step in range(4):
        commit(tmp_path, step)
    (tmp_path / "0002/manifest.json").unlink()
    (tmp_path / "0007").write_text("a file is no checkpoint")
    assert checkpoint.complete_steps(tmp_path) == [0, 1, 3]
    assert checkpoint.other_steps(tmp_path, [3]) == [0, 1, 2]
    assert checkpoint.delete_all_but(tmp_path, [3]) == [0, 1, 2]
    assert checkpoint.complete_steps(tmp_path / "none") == []


def test_a_copy_is_the_same_files_under_the_next_step_with_metrics_of_its_own(tmp_path):
    commit(tmp_path, 1, metrics={"loss": 1.0})
    made = checkpoint.copy_as_step(tmp_path, 1, 2, metrics={"num_groups_trainable": 0}, config={})
    assert made.files == checkpoint.read_manifest(tmp_path, 1).files
    assert checkpoint.verify(tmp_path, 2).metrics == {"num_groups_trainable": 0}


def test_steps_above_9999_sort_as_numbers(tmp_path):
    for step in (9999, 10000):
        commit(tmp_path, step)
    assert checkpoint.newest_step(tmp_path) == 10000
    assert (tmp_path / "10000").is_dir()
