"""Keeps the last lines that the engine's processes wrote, so that a failure can be told in their own words."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LastWords"]

_PREFIX = re.compile(r"^(\((\w+ )*pid=\d+\) )?((ERROR|CRITICAL|WARNING|INFO) [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?")
"""What vLLM writes before each line."""
_NOISE = re.compile(r"it/s\]|Warning:|^  |^Dumping |^Triton is installed|^NOTE: ")
"""Lines that never tell why an engine ended."""


class LastWords:
    """Reads what processes started within `redirected` write to standard output and error.

    The last lines are kept.

    Args:
        passed_on: whether every line also goes to this process's own standard error.
        lines: how many are kept.
    """

    def __init__(self, passed_on: bool = False, lines: int = 200) -> None:
        self._passed_on = passed_on
        self._lines: deque[str] = deque(maxlen=lines)
        self._thread: threading.Thread | None = None

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Points standard output and error at the reader; whoever is started meanwhile keeps it for life."""
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        own_output, own_error = os.dup(1), os.dup(2)
        self._thread = threading.Thread(
            target=self._read, args=(reading, own_error), name="engine-last-words", daemon=True
        )
        self._thread.start()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(own_output, 1)
            os.dup2(own_error, 2)
            os.close(own_output)

    def text(self, timeout_s: float = 2.0) -> str:
        """Returns the lines that tell why the engine ended, once its processes have closed their output."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        lines = [line for line in self._lines if line.strip()]
        return "\n".join(_reason(lines))

    def _read(self, reading: int, own_error: int) -> None:
        with os.fdopen(reading, "r", errors="replace") as stream, os.fdopen(own_error, "w") as error:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                if self._passed_on:
                    error.write(line)
                    error.flush()


def _reason(lines: list[str]) -> list[str]:
    """Returns what tells why: the lines that are no part of a traceback, and the first traceback, shortened."""
    told, tracebacks = _told_and_tracebacks([_PREFIX.sub("", line)[:300] for line in lines])
    if not tracebacks:
        return told[-20:]
    first = tracebacks[0]
    return [*told[-6:], *(first if len(first) <= 24 else [*first[:3], "  …", *first[-14:]])]


def _told_and_tracebacks(lines: list[str]) -> tuple[list[str], list[list[str]]]:
    told: list[str] = []
    tracebacks: list[list[str]] = []
    inside = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            tracebacks.append([line])
            inside = True
        elif inside:
            tracebacks[-1].append(line)
            inside = not line[:1].strip()  # the first line that is not indented names the exception
        elif not _NOISE.search(line):
            told.append(line)
    return told, tracebacks
