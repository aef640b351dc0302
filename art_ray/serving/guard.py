"""Ends the engine's processes when their owner dies, however it dies, and removes what they left in shared memory.

Run as a script, this file is a small process of its own that waits for the end of its standard input. The owner holds
the other end and never writes: the kernel closes it when the owner exits, at any moment and for any reason. Then every
process that carries the run's name in its environment is killed, which reaches children of children too, whatever state
their start was in. Standard library only: it starts in a few hundredths of a second and loads nothing of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["TAG", "Guard", "sweep", "variables_set"]

TAG = "ART_RAY_ENGINE_RUN"
"""Environment variable that names the engine's run which a process belongs to."""
SHARED_MEMORY = Path("/dev/shm")
START_S = 30.0
"""How long the guard's process may take to start."""
CALM_S = 3.0
"""Seconds without a process of the run after which its owner's death is taken to have no more consequences."""
KILL_S = 15.0
"""How long a killed process may take to vanish. One that waits for a device cannot be killed."""
_PREFIX = "art_ray-"
_LOCK = "lock"
_SEGMENTS = "segments"
_TRACKER = b"from multiprocessing.resource_tracker import main"
"""In the command line of Python's resource trackers."""
_own: set[str] = set()
"""Runs of this process, which its own locks do not keep it from."""


class Guard:
    """One run's private directory in shared memory, and the process that watches over the run.

    The owner holds a lock in the directory while it lives. Containers may share this memory without seeing each other's
    processes: the lock, not the process id, says whether the owner is alive.

    Args:
        parent: where the private directory is made; shared memory unless a test says otherwise.

    Raises:
        ServingError: the guard's process did not start.
    """

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        self.run = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.directory = parent / self.run
        self._lock = _locked_directory(self.directory)
        _own.add(self.run)
        starter = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.run, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        assert starter.stdin is not None
        assert starter.stdout is not None
        self._alive, self._ended = starter.stdin, starter.stdout
        try:
            self.pid = _told_pid(self._ended.fileno())
            """Process id of the guard, which is no child of this process."""
            starter.wait(START_S)
        except (TimeoutError, ValueError, subprocess.TimeoutExpired) as error:
            from art_ray.errors import ServingError  # not above: the script loads nothing of this package

            starter.kill()
            starter.wait()
            self.end(0.0)
            raise ServingError(
                f"the process that watches over an engine did not start ({sys.executable} {__file__}): {error}"
            ) from error

    def note_segments(self) -> None:
        """Writes down the shared memory that the run's processes have mapped, for `sweep`."""
        names = sorted(str(path) for pid in processes_of(self.run) for path in _mapped(pid))
        (self.directory / _SEGMENTS).write_text("\n".join(names))

    def end(self, timeout_s: float = 20.0) -> None:
        """Kills what is left of the run and removes its directory. Again: no effect."""
        with contextlib.suppress(OSError, ValueError):  # the guard is gone, or this was called before
            self._alive.write(b"all has been ended in order\n")
            self._alive.close()
        if not self._ended.closed:
            select.select([self._ended], [], [], timeout_s)  # the guard holds the other end until it is done
            self._ended.close()
        _end_run(self.directory)  # the guard may itself have been killed; doing its work twice does no harm
        if self.run in _own:
            _own.discard(self.run)
            os.close(self._lock)


def _locked_directory(directory: Path) -> int:
    """Makes `directory`; returns the descriptor of a file in it, locked while this process keeps it open.

    A lock of the process (POSIX), not of the open file (flock): children that are forked must not hold it further.
    """
    unnamed = directory.with_name(f".{directory.name}")  # `sweep` finds no directory before it is locked
    unnamed.mkdir(mode=0o700)
    descriptor = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(unnamed, directory)
    return descriptor


def _told_pid(descriptor: int) -> int:
    """Returns the process id that the guard writes, in one piece, once it is there."""
    if not select.select([descriptor], [], [], START_S)[0]:
        raise TimeoutError(f"no answer within {START_S:g} s")
    told = os.read(descriptor, 100)
    if not told:
        raise ValueError("it ended at once")
    return int(told)


@contextlib.contextmanager
def variables_set(values: dict[str, str | None]) -> Iterator[None]:
    """Sets environment variables for the block, and for the processes that are started in it; None unsets one."""
    before = {name: os.environ.get(name) for name in values}

    def apply(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    apply(values)
    try:
        yield
    finally:
        apply(before)


def processes_of(run: str) -> dict[int, bytes]:
    """Returns the command line of each living process with `run` as the value of an environment variable, by id."""
    wanted = f"={run}".encode()
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if any(variable.endswith(wanted) for variable in variables):
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes()
    return found


def kill_run(run: str, timeout_s: float | None = None, calm_s: float = 0.0) -> list[int]:
    """Kills every process of `run` until there is none, and removes the shared memory that they had mapped.

    Python's resource trackers stay, and the guards of runs within this one: they end by themselves, once the processes
    that they serve are gone. There is none once `calm_s` have passed without one: a process that is being started shows
    no environment for a moment. Returns the ids of those that are still there after `timeout_s` (`KILL_S`).
    """
    deadline = time.monotonic() + (KILL_S if timeout_s is None else timeout_s)
    segments: set[Path] = set()
    spared = (_TRACKER, os.path.basename(__file__).encode())
    calm_since = time.monotonic()
    while True:
        pids = [pid for pid, command in processes_of(run).items() if not any(name in command for name in spared)]
        if pids:
            calm_since = time.monotonic()
            if calm_since > deadline:
                return sorted(pids)
        elif time.monotonic() - calm_since >= calm_s:
            break
        for pid in pids:
            segments |= _mapped(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # the kernel takes a moment to remove a killed process
    for segment in segments:
        segment.unlink(missing_ok=True)
    return []


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
        if directory.name in _own:
            continue
        # OSError: its own guard was quicker, it belongs to another user, or its owner holds the lock.
        with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.stat().st_uid == os.getuid() and _end_run(directory):
                swept.append(directory.name)
    return swept


def _end_run(directory: Path, calm_s: float = 0.0) -> bool:
    """Returns whether nothing of the run is left. Otherwise its directory stays, for a later `sweep`."""
    if unkillable := kill_run(directory.name, calm_s=calm_s):
        with contextlib.suppress(OSError):  # standard error may be closed by now
            pids = ", ".join(map(str, unkillable))
            print(f"art_ray: {directory.name}: cannot kill {pids}: do they wait for a device?", file=sys.stderr)
        return False
    with contextlib.suppress(OSError):
        for name in (directory / _SEGMENTS).read_text().split():
            if name.startswith(f"{SHARED_MEMORY}/"):
                Path(name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # The lock goes last: without it nobody would finish what is interrupted here.
        for path in [path for path in directory.iterdir() if path.name != _LOCK]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    return True


def _main() -> None:
    directory = Path(sys.argv[2])
    if os.fork():
        # The guard itself must not be the owner's child: Ray, for one, kills a worker's children when it ends.
        os._exit(0)
    os.setsid()  # nor in its session: Ctrl-C must not end the guard before its work
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, f"{os.getpid()}\n".encode())
    in_order = False
    while os.read(0, 4096):
        in_order = True
    _end_run(directory, 0.0 if in_order else CALM_S)


if __name__ == "__main__":
    _main()
