"""The guard with real processes: owners that are killed, children that ignore signals, children of children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

from art_ray.serving.guard import TAG, Guard, processes_of, sweep

# Starts a guard and two stubborn children, one the child of the other; tells their names, then waits.
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from art_ray.serving.guard import Guard, TAG
guard = Guard(Path(sys.argv[1]))
CHILD = "import signal, sys, time, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
    "sys.argv[1:] and subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print('up', flush=True); time.sleep(600)"
env = {**os.environ, TAG: guard.run}
child = subprocess.Popen([sys.executable, "-c", CHILD, CHILD], env=env, stdout=subprocess.PIPE, text=True)
child.stdout.readline(); child.stdout.readline()
print(guard.run, guard.pid, flush=True)
time.sleep(600)
"""


def started_owner(parent: Path) -> tuple[subprocess.Popen[str], str, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
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
