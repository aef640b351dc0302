"""One trainer at a time: with real processes, of which some are killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from art_ray.errors import CheckpointError
from art_ray.training import lock
from art_ray.training.config import TrainerConfig, TrainerSpec
from art_ray.training.lock import WriterLock
from art_ray.training.trainer import Trainer

HOLDER = """
import sys, time
from pathlib import Path
from art_ray.training.lock import WriterLock
held = WriterLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.3)


def holder_of(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.usefixtures("impatient")
def test_a_second_one_is_refused_with_the_holder_and_what_to_do(tmp_path):
    process = holder_of(tmp_path)
    try:
        with pytest.raises(CheckpointError) as refused:
            WriterLock(tmp_path)
    finally:
        process.kill()
        process.wait()
    for part in (f"process {process.pid} on host {socket.gethostname()}", str(tmp_path), "another model name"):
        assert part in str(refused.value)


def test_the_lock_of_a_killed_process_is_free_and_one_that_is_about_to_be_killed_is_waited_for(tmp_path):
    process = holder_of(tmp_path)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
    with WriterLock(tmp_path):
        assert (tmp_path / lock.LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")
    assert process.wait() == -9
    killer.wait()


@pytest.mark.usefixtures("impatient")
def test_a_program_that_the_holder_started_does_not_hold_it(tmp_path):
    held = WriterLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    held.release()
    held.release()
    try:
        WriterLock(tmp_path).release()
    finally:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be taken"):
        WriterLock(tmp_path / "file")


@pytest.mark.usefixtures("impatient")
def test_a_trainer_keeps_another_out_of_its_directory_until_it_is_closed(tiny_model, tmp_path):
    config = TrainerConfig(dtype="float32", device="cpu", num_threads=1)
    spec = TrainerSpec(base_model=str(tiny_model), checkpoints_dir=tmp_path, trainer=config)
    first = Trainer(spec)
    (tmp_path / ".writing-0001-x").mkdir()
    with pytest.raises(CheckpointError, match="another trainer works in"):
        Trainer(spec)
    assert (tmp_path / ".writing-0001-x").is_dir()
    first.close()
    # One that could not go on holds nothing.
    with pytest.raises(CheckpointError, match="r=8") as refused:
        Trainer(spec.updated({"lora": spec.lora.updated({"r": 4})}))
    assert Trainer(spec).step == 0
    assert refused.tb is not None
