"""From the history to a reporter: a thread that reads what was appended and sends it, off the path of `log`.

::

    log() ──append──> history.jsonl ──read from `sent_bytes`──> feed thread ──send──> reporter
      └──wake──────────────────────────────────────────────────────^

The backlog is the file itself: nothing is queued in memory, nothing waits for a reporter, and what was not sent when a
process died is sent by the next one. Of all processes that log to a model one at a time reports, for all of them: it
holds the reporter's lock. wandb would drop rows if two processes wrote to one run.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (wandb imports it, which is refused once the script has ended)
import contextlib
import logging
import threading
import time
import weakref
from typing import Any

import filelock

from art_ray.ledger.files import make_dirs
from art_ray.ledger.history import History, row_of
from art_ray.ledger.reporters.base import Reporter, Subject
from art_ray.ledger.state import State

__all__ = ["Feed"]

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 500
POLL_S = 2.0
"""How often the history is looked at for lines of other processes."""
RETRY_S = 60.0
"""Pause after a failure of the reporter."""
AT_EXIT_S = 15.0
"""How long the end of a script that did not close its model is held up for the reporters."""
REMEMBER_S = 10.0
"""How often `sent_bytes` is written while the reporter runs."""
UNSURE_BYTES = 64 << 10
"""Of what was sent last, this much may be in a reporter's own buffers and be lost with it (measured with wandb 0.31,
killed together with its service: 32 KiB). It is sent again after a crash: twice is harmless, a gap is not."""


class Feed:
    """Keeps one reporter up to date with one history.

    Args:
        name: the reporter's name, under which its memory is kept.
        reporter: not started yet.
        subject: whose history it is.
    """

    def __init__(self, name: str, reporter: Reporter, subject: Subject) -> None:
        self._name = name
        self._reporter = reporter
        self._subject = subject
        self._history = History(subject.folder / "history.jsonl")
        self._state = State(subject.folder)
        self._leader = filelock.FileLock(subject.folder / f".{name}.lock", thread_local=False)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_started = False
        self._failed_at: float | None = None
        self._sent_bytes = 0
        self._remembered_at = 0.0
        self.where: str | None = None
        """Where the run can be seen, once it was opened."""

    def wake(self) -> None:
        """Says that the history grew. Returns at once."""
        with self._lock:
            self._closing.clear()  # a thread that a close gave up on goes on
            self._start_thread()
        self._wake.set()

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"report-{self._name}", daemon=True)
            self._thread.start()
            _close_at_exit(self)

    def close(self, timeout_s: float) -> None:
        """Sends what is left and finishes, or gives up after `timeout_s` with a warning; may be called again."""
        with self._lock:
            thread = self._thread
            if thread is None or not thread.is_alive():
                return
            self._closing.set()
        self._wake.set()
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning(
                "%s did not take everything within %g s: what is missing is sent at the next start",
                self._name,
                timeout_s,
            )

    def replay(self, timeout_s: float) -> str:
        """Sends the whole history to a new run, in this thread; returns where it can be seen.

        Raises:
            TimeoutError: another process reports this model.
        """
        make_dirs(self._subject.folder)
        with self._leader.acquire(timeout=timeout_s):
            self._remember({})
            try:
                self._start()
                self._send_all()
            finally:
                self._finish()
        return str(self.where)

    def _run(self) -> None:
        while True:
            self._wake.wait(POLL_S)
            self._wake.clear()
            closing = self._closing.is_set()
            self._report(closing)
            with self._lock:  # so that `wake` finds either a thread that goes on, or none
                if closing and not (self._failed_at is None and self._is_behind() and self._is_free()):
                    self._thread = None
                    return

    def _report(self, closing: bool) -> None:
        """Brings the reporter up to date, if it is this process's turn. Failures are reported, never raised."""
        if self._failed_at is not None and not closing and time.monotonic() - self._failed_at < RETRY_S:
            return
        try:
            if not self._leader.is_locked and not (self._is_behind() and self._is_free(keep=True)):
                return
            if not self._is_started and self._is_behind():
                self._start()
            if self._is_started:
                self._send_all()
            self._failed_at = None
        except Exception as error:
            self._failed(error)
        if closing and self._leader.is_locked:
            try:
                self._finish()
            except Exception as error:
                self._failed(error)
            self._leader.release(force=True)

    def _is_free(self, keep: bool = False) -> bool:
        """Returns whether no other process reports; with `keep`, this one does from now on."""
        try:
            self._leader.acquire(timeout=0)
        except (filelock.Timeout, OSError):
            return False
        if not keep:
            self._leader.release()
        return True

    def _is_behind(self) -> bool:
        """Returns whether there is a row to send: for lines that cannot be read, no run is opened."""
        sent = self._sent_bytes if self._is_started else self._resumed_at(self._memory())
        return any(row_of(line) is not None for line, _ in self._history.lines(sent))

    def _resumed_at(self, memory: dict[str, Any]) -> int:
        """Returns where sending goes on: at the start if the history is another one than before."""
        sent = memory.get("sent_bytes", 0)
        return sent if sent <= self._history.size_bytes() else 0

    def _memory(self) -> dict[str, Any]:
        return dict(self._state.read().get("reporters", {}).get(self._name, {}))

    def _remember(self, memory: dict[str, Any]) -> None:
        with self._state.changed() as state:
            state.setdefault("reporters", {})[self._name] = memory
        self._remembered_at = time.monotonic()

    def _start(self) -> None:
        memory = self._memory()
        self._sent_bytes = self._resumed_at(memory)
        if not memory:
            memory = self._reporter.begin()
            self._remember(memory)
        self.where = self._reporter.start(memory)
        self._is_started = True
        logger.info("%s shows %s at %s", self._name, self._history.path, self.where)

    def _send_all(self) -> None:
        rows: list[dict[str, Any]] = []
        end = self._sent_bytes
        for line, end in self._history.lines(self._sent_bytes):
            if (row := row_of(line)) is not None:
                rows.append(row)
            if len(rows) >= ROWS_AT_ONCE:
                self._send(rows, end)
                rows = []
        if end > self._sent_bytes:
            self._send(rows, end)

    def _send(self, rows: list[dict[str, Any]], end: int) -> None:
        """Sends `rows`, and has done with all before `end`: lines that cannot be read are passed over."""
        if rows:
            self._reporter.send(rows)
        self._sent_bytes = end
        if time.monotonic() - self._remembered_at > REMEMBER_S:
            self._remember({**self._memory(), "sent_bytes": self._line_before(end - UNSURE_BYTES)})

    def _line_before(self, position: int) -> int:
        """Returns the end of the first line at or after `position`, or 0: where reading may start."""
        if position <= 0:
            return 0
        with self._history.path.open("rb") as file:
            file.seek(position)
            file.readline()
            return file.tell()

    def _finish(self) -> None:
        was_started, self._is_started = self._is_started, False
        if was_started:
            try:
                self._reporter.finish()
            finally:
                self._remember({**self._memory(), "sent_bytes": self._sent_bytes})

    def _failed(self, error: Exception) -> None:
        """Reports a failure: an error where it could not start, a warning later. Training goes on either way."""
        level = logging.WARNING if self._is_started else logging.ERROR
        what = "failed" if self._is_started else "could not start"
        if self._failed_at is None:
            logger.log(
                level, "%s %s: %s: %s. Everything is in %s; tried again every %g s and at the next start.",
                self._name, what, type(error).__name__, error, self._history.path, RETRY_S,
            )  # fmt: skip
        self._failed_at = time.monotonic()
        if self._is_started:
            # It starts anew, in the same run. What it took last may not have arrived: that is sent again.
            self._sent_bytes = self._line_before(self._sent_bytes - UNSURE_BYTES)
            with contextlib.suppress(Exception):
                self._finish()


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
_closer: threading.Thread | None = None


def _close_at_exit(feed: Feed) -> None:
    """Sees to it that `feed` is closed when the script ends without doing so."""
    global _closer
    _feeds.add(feed)
    if _closer is None:
        # No daemon: the interpreter waits for it, and runs exit hooks (a reporter's own among them) only afterwards.
        _closer = threading.Thread(target=_close_when_the_script_ends, name="reports-at-exit", daemon=False)
        _closer.start()


def _close_when_the_script_ends() -> None:
    threading.main_thread().join()
    deadline = time.monotonic() + AT_EXIT_S
    for feed in list(_feeds):
        feed.close(max(0.1, deadline - time.monotonic()))
