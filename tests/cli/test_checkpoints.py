"""`art-ray export-adapter` and `art-ray delete-checkpoints`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from art_ray.cli import adapter
from art_ray.training import checkpoint
from art_ray.training.lock import LOCK_FILE, current_writer
from tests.cli.made import commit, json_of, made_run, refused, succeed
from tests.training.made import complete_steps
from tests.training.test_lock import holder_of


@pytest.fixture
def run(base):
    folder = base / "demo/models/agent"
    for step in range(5):
        commit(folder, step, b"weights of %d" % step)
    return folder


def test_an_adapter_is_exported_as_the_two_files_that_peft_reads(run, tmp_path):
    out = tmp_path / "out"
    found = json_of("export-adapter", run, out, "--step", 3)
    assert (found["step"], found["base_model"], found["out"]) == (3, "some/base", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").read_bytes() == b"weights of 3"
    assert out.stat().st_mode & 0o777 == 0o755


def test_by_default_it_is_that_of_the_newest_complete_checkpoint(run, tmp_path, monkeypatch):
    (run / "checkpoints/0004/manifest.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert "at step 3 is in out" in succeed("export-adapter", run, "out")
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == b"weights of 3"


def test_peft_loads_an_exported_adapter_with_the_weights_of_its_checkpoint(run, tmp_path):
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.serving.adapters import write_adapter
    from tests.small_models import save_random_model, tiny_config

    base = save_random_model(tmp_path / "base", tiny_config("qwen3", vocab_size=512))

    def write(directory):
        write_adapter(base, directory, seed=1)

    checkpoint.commit(run / "checkpoints", 9, write, base_model=str(base), metrics={}, config={})
    succeed("export-adapter", run, tmp_path / "out")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    loaded = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora" in name}
    saved = load_file(run / "checkpoints/0009/adapter_model.safetensors")
    assert sorted(loaded) == sorted(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(run, tmp_path, kind):
    out = tmp_path / "out"
    out.mkdir() if kind == "folder" else out.write_text("mine") if kind == "file" else out.symlink_to("nowhere")
    assert "is there already, and nothing is overwritten" in refused("export-adapter", run, out)
    assert (kind == "folder") == out.is_dir()


def test_nor_what_is_put_there_at_the_last_moment(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = os.rename

    def rename(source, target):
        out.mkdir()
        (out / "mine").write_text("mine")
        real(source, target)

    monkeypatch.setattr(adapter.os, "rename", rename)
    assert str(out) in refused("export-adapter", run, out, status=1)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".out-*"))


def test_an_altered_file_is_found_and_leaves_nothing_behind(run, tmp_path):
    (run / "checkpoints/0003/adapter_model.safetensors").write_bytes(b"WEIGHTS of 3")
    message = refused("export-adapter", run, tmp_path / "out", "--step", 3, status=1)
    assert "adapter_model.safetensors is not what its manifest says" in message
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_checkpoint_that_is_not_there_is_bad_usage_and_those_that_are_are_named(run, base, tmp_path):
    message = refused("export-adapter", run, tmp_path / "out", "--step", 7)
    assert "no complete checkpoint of step 7. There are: 0–4." in message
    assert "It has none at all." in refused("export-adapter", made_run(base, "bare"), tmp_path / "out")
    assert "there is no folder" in refused("export-adapter", run, tmp_path / "none/out")


def test_the_latest_and_the_best_stay(run):
    found = json_of("delete-checkpoints", run)
    assert (found["keep"], found["delete"], found["dry_run"]) == ([2, 4], [0, 1, 3], False)
    assert complete_steps(run / "checkpoints") == [2, 4]
    assert json_of("delete-checkpoints", run)["delete"] == []


def test_a_dry_run_says_the_same_and_changes_nothing(run):
    before = sorted(run.rglob("*"))
    found = json_of("delete-checkpoints", run, "--dry-run")
    assert (found["keep"], found["delete"], found["metric"], found["trained_by"]) == (
        [2, 4],
        [0, 1, 3],
        "val/reward",
        None,
    )
    size = sum(path.stat().st_size for step in (0, 1, 3) for path in (run / f"checkpoints/{step:04d}").iterdir())
    assert found["size_bytes"] == size
    assert "would delete steps 0–1, 3 (0.0 MB), keeps steps 2, 4" in succeed("delete-checkpoints", run, "--dry-run")
    assert sorted(run.rglob("*")) == before


def test_another_metric_decides_and_an_unknown_one_deletes_nothing(run):
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps({"val/accuracy": 1.0, "step": 1}) + "\n")
    message = refused("delete-checkpoints", run, "--metric", "val/accurcy")
    assert "nearest: 'val/accuracy'" in message
    assert complete_steps(run / "checkpoints") == [0, 1, 2, 3, 4]
    assert json_of("delete-checkpoints", run, "--metric", "val/accuracy")["keep"] == [1, 4]


def test_without_the_default_metric_the_latest_alone_stays(run):
    (run / "history.jsonl").unlink()
    assert json_of("delete-checkpoints", run)["keep"] == [4]
    assert complete_steps(run / "checkpoints") == [4]


def test_without_a_complete_checkpoint_nothing_is_deleted(base):
    folder = base / "demo/models/agent"
    assert json_of("delete-checkpoints", folder)["delete"] == []
    assert not (folder / "checkpoints").exists()
    commit(folder, 1)
    (folder / "checkpoints/0001/manifest.json").unlink()
    assert json_of("delete-checkpoints", folder)["delete"] == []
    assert (folder / "checkpoints/0001/adapter_model.safetensors").exists()


def test_a_checkpoint_of_a_newer_format_stops_the_deletion(run):
    path = run / "checkpoints/0001/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    assert "format 9" in refused("delete-checkpoints", run, status=1)
    assert (run / "checkpoints/0000").exists()


def test_while_a_trainer_works_nothing_is_deleted_and_a_dry_run_says_who_it_is(run):
    process = holder_of(run / "checkpoints")
    try:
        message = refused("delete-checkpoints", run, status=1)
        assert f"process {process.pid} on host" in message
        assert "model.delete_checkpoints()" in message
        assert f"process {process.pid}" in json_of("delete-checkpoints", run, "--dry-run")["trained_by"]
        assert "trains it at this moment" in succeed("delete-checkpoints", run, "--dry-run")
    finally:
        process.kill()
        process.wait()
    assert complete_steps(run / "checkpoints") == [0, 1, 2, 3, 4]
    assert json_of("delete-checkpoints", run)["delete"] == [0, 1, 3]


def test_asking_who_trains_takes_no_lock_and_makes_no_file(run):
    shutil.rmtree(run / "checkpoints")
    assert current_writer(run / "checkpoints") is None
    commit(run, 0)
    assert current_writer(run / "checkpoints") is None
    assert not (run / "checkpoints" / LOCK_FILE).exists()


def test_a_deletion_starts_no_process(run):
    program = (
        "import sys, subprocess, multiprocessing.process, os\n"
        "def refuse(event, arguments):\n"
        "    assert event not in ('subprocess.Popen', 'os.fork', 'os.posix_spawn', 'os.exec'), event\n"
        "sys.addaudithook(refuse)\n"
        "from art_ray.cli import main\nmain()\n"
    )
    subprocess.run([sys.executable, "-c", program, "delete-checkpoints", str(run)], check=True, timeout=60)
    assert complete_steps(run / "checkpoints") == [2, 4]
