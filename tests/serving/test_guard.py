"""The guard with real processes: owners that are killed, children that ignore signals, children of children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from art_ray.errors import ServingError
from art_ray.serving import guard as guard_module
from art_ray.serving.guard import TAG, Guard, kill_run, processes_of, sweep

# Starts a guard and two stubborn children, one the child of the other; tells their names, then waits.
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from art_ray.serving.guard import Guard, TAG
pid = os.getpid
os.getpid = lambda: int(sys.argv[2] or pid())  # another namespace's, perhaps
guard = Guard(Path(sys.argv[1]))
CHILD = "import signal, sys, time, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
    "sys.argv[1:] and subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print('up', flush=True); time.sleep(600)"
env = {**os.environ, TAG: guard.run}
child = subprocess.Popen([sys.executable, "-c", CHILD, CHILD], env=env, stdout=subprocess.PIPE, text=True)
child.stdout.readline(); child.stdout.readline()
print(guard.run, guard.pid, flush=True)
time.sleep(600)
"""


def started_owner(parent: Path, own_pid: str = "") -> tuple[subprocess.Popen[str], str, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent), own_pid], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    run, guard_pid = owner.stdout.readline().split()
    return owner, run, int(guard_pid)


def until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_children_and_their_children_vanish_with_a_killed_owner(tmp_path: Path):
    owner, run, guard_pid = started_owner(tmp_path)
    assert len(processes_of(run)) == 2
    assert (tmp_path / run).is_dir()
    owner.kill()
    owner.wait()
    until(lambda: not processes_of(run) and not (tmp_path / run).exists() and gone(guard_pid))


def test_the_guard_survives_the_signals_that_end_its_owner(tmp_path: Path):
    owner, run, guard_pid = started_owner(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard_pid, number)
    assert not gone(guard_pid)
    owner.terminate()
    owner.wait()
    until(lambda: not processes_of(run) and not (tmp_path / run).exists())


def test_what_a_killed_guard_left_is_swept_at_the_next_start(tmp_path: Path):
    owner, run, guard_pid = started_owner(tmp_path)
    os.kill(guard_pid, signal.SIGKILL)
    owner.kill()
    owner.wait()
    until(lambda: gone(guard_pid))
    assert len(processes_of(run)) == 2
    assert sweep(tmp_path) == [run]
    assert not processes_of(run)
    assert not (tmp_path / run).exists()


def test_a_run_whose_owner_lives_in_a_container_of_its_own_is_not_swept(tmp_path: Path):
    owner, run, _ = started_owner(tmp_path, own_pid="4194999")  # above the largest process id
    try:
        assert run.startswith("art_ray-4194999-")
        assert sweep(tmp_path) == []
        assert len(processes_of(run)) == 2
        assert (tmp_path / run).is_dir()
    finally:
        owner.kill()
        owner.wait()
    until(lambda: not processes_of(run) and not (tmp_path / run).exists())


def test_a_process_that_cannot_be_killed_is_given_up_and_named_and_a_later_sweep_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    guard = Guard(tmp_path)
    os.kill(guard.pid, signal.SIGKILL)
    until(lambda: gone(guard.pid))
    child = subprocess.Popen(["sleep", "600"], env={TAG: guard.run})
    until(lambda: processes_of(guard.run) != {})
    with monkeypatch.context() as patch:
        patch.setattr(guard_module.os, "kill", lambda *_: None)
        patch.setattr(guard_module, "KILL_S", 0.2)
        assert kill_run(guard.run, 0.1) == [child.pid]
        guard.end()
    assert f"{guard.run}: cannot kill {child.pid}" in capfd.readouterr().err
    assert sweep(tmp_path) == [guard.run]
    assert child.wait(5) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("script", "reason"), [("exec sleep 600", "no answer within 0.5 s"), ("exit 1", "ended at")])
def test_a_guard_that_does_not_start_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(guard_module.sys, "executable", str(python))
    monkeypatch.setattr(guard_module, "START_S", 0.5)
    started = time.monotonic()
    (tmp_path / "runs").mkdir()
    with pytest.raises(ServingError, match=reason):
        Guard(tmp_path / "runs")
    assert time.monotonic() - started < 10
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_forked_child_of_a_dead_owner_does_not_keep_its_run_from_being_swept(tmp_path: Path):
    code = (
        "import os, sys, time; from pathlib import Path; from art_ray.serving.guard import Guard\n"
        "guard = Guard(Path(sys.argv[1])); child = os.fork()\n"
        "child and print(guard.run, guard.pid, child, flush=True)\n"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    run, guard_pid, forked = owner.stdout.readline().split()
    try:
        os.kill(int(guard_pid), signal.SIGKILL)
        owner.kill()
        owner.wait()
        assert not gone(int(forked))
        assert sweep(tmp_path) == [run]
    finally:
        os.kill(int(forked), signal.SIGKILL)


def test_a_run_whose_owner_lives_is_not_swept(tmp_path: Path):
    guard = Guard(tmp_path)
    try:
        assert sweep(tmp_path) == []
        assert guard.directory.is_dir()
    finally:
        guard.end()
    assert not guard.directory.exists()


def test_end_kills_what_is_left_and_its_shared_memory_and_may_be_called_again(tmp_path: Path):
    guard = Guard(tmp_path)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    code = (
        "import sys, time; from multiprocessing import shared_memory, resource_tracker;"
        "s = shared_memory.SharedMemory(sys.argv[1]); resource_tracker.unregister(s._name, 'shared_memory');"
        "print('up', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, segment.name],
        env={**os.environ, TAG: guard.run},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    guard.end()
    assert child.wait(5) == -signal.SIGKILL
    assert not Path("/dev/shm", segment.name).exists()
    guard.end()
    segment.close()
    from multiprocessing import resource_tracker

    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
