"""Ends the engine's processes when their owner dies, however it dies, and removes what they left in shared memory.

Run as a script, this file is a small process of its own that waits for the end of its standard input. The owner holds
the other end and never writes: the kernel closes it when the owner exits, at any moment and for any reason. Then every
process that carries the run's tag in its environment is killed, which reaches children of children too, whatever state
their start was in. Standard library only: it starts in a few hundredths of a second and loads nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

__all__ = ["TAG", "Guard", "sweep"]

TAG = "ART_RAY_ENGINE_RUN"
"""Environment variable that names the run which a process belongs to."""
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "art_ray-"
_TRACKER = b"from multiprocessing.resource_tracker import main"
"""In the command line of Python's resource trackers."""


class Guard:
    """One run's private directory in shared memory, and the process that watches over the run.

    Args:
        parent: where the private directory is made; shared memory unless a test says otherwise.
    """

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        self.run = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.directory = parent / self.run
        self.directory.mkdir(mode=0o700)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.run, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A session of its own: Ctrl-C and a signal to the owner's group must not end the guard before its work.
            start_new_session=True,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def end(self, timeout_s: float = 20.0) -> None:
        """Kills what is left of the run and removes its directory. Again: no effect."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # The guard may itself have been killed; doing its work twice does no harm.
        kill_run(self.run)
        shutil.rmtree(self.directory, ignore_errors=True)


def processes_of(run: str) -> dict[int, bytes]:
    """Returns the command line of each living process that carries `run` as its tag, by process id."""
    wanted = f"{TAG}={run}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes()
    return found


def kill_run(run: str) -> None:
    """Kills every process of `run` until there is none, and removes the shared memory that they had mapped.

    Python's resource trackers stay: one ends by itself when the processes it serves are gone.
    """
    segments: set[Path] = set()
    while pids := [pid for pid, command in processes_of(run).items() if _TRACKER not in command]:
        for pid in pids:
            segments |= _mapped(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # the kernel takes a moment to remove a killed process
    for segment in segments:
        segment.unlink(missing_ok=True)


def _mapped(pid: int) -> set[Path]:
    """Returns the segments of Python's shared memory that a process has mapped."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return {Path(path) for path in re.findall(rf"({SHARED_MEMORY}/(?:psm_|sem\.mp-)\S+)", maps)}
    return set()


def sweep(parent: Path = SHARED_MEMORY) -> list[str]:
    """Ends runs whose owner is dead and whose guard could not act, and returns their names."""
    swept = []
    for directory in parent.glob(f"{_PREFIX}*-*"):
        owner = directory.name.removeprefix(_PREFIX).split("-")[0]
        if not owner.isdigit() or Path(f"/proc/{owner}").exists() or directory.stat().st_uid != os.getuid():
            continue
        kill_run(directory.name)
        shutil.rmtree(directory, ignore_errors=True)
        swept.append(directory.name)
    return swept


def _main() -> None:
    run, directory = sys.argv[1], Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    kill_run(run)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _main()
