"""Child processes of tests: each carries a mark in its environment, which all of its descendants inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "ART_RAY_TEST_MARK"


class Marked:
    """A process of our own and everything that it, and what it started, ever started.

    Output of both kinds goes to `log`.
    """

    def __init__(self, command: list[str], log: Path, *, mark: str | None = None, **options) -> None:
        self.mark = mark or uuid.uuid4().hex
        self.log = log
        environment = {**os.environ, **options.pop("env", {}), MARK: self.mark}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, **options
            )

    def kill(self) -> None:
        """Kills the process itself with SIGKILL, and nothing else."""
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        """What the process has written so far."""
        return self.log.read_text(errors="replace")

    def wait_for_output(self, text: str, timeout_s: float) -> None:
        """Waits until `text` stands in the output; fails at once if the process ends without writing it."""

        def written() -> bool:
            ended = self.process.poll() is not None
            if text in self.output():
                return True
            assert not ended, f"ended with {self.process.returncode} before {text!r}:\n{self.output()[-4000:]}"
            return False

        wait_until(written, timeout_s, f"{text!r} in the output")

    def succeed(self, timeout_s: float) -> str:
        """Waits for the end, which must be a success; returns the output."""
        code = self.process.wait(timeout_s)
        assert code == 0, f"exit status {code}:\n{self.output()[-6000:]}"
        return self.output()

    def living(self) -> dict[int, str]:
        """Every living process with the mark, as its command line by process id."""
        return dict(_marked(self.mark))

    def wait_until_gone(self, timeout_s: float) -> None:
        """Waits until no process with the mark lives."""
        deadline = time.monotonic() + timeout_s
        while living := self.living():
            assert time.monotonic() < deadline, f"still alive after {timeout_s} s: {living}"
            time.sleep(0.05)

    def end_all(self) -> None:
        """Kills, by process id, whatever with the mark still lives."""
        while living := self.living():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def python(*arguments: str) -> list[str]:
    """The command that runs this Python with `arguments`."""
    return [sys.executable, *arguments]


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if state != "Z":
            yield int(entry.name), command or entry.name
