"""Writing that survives a crash: beside its place and renamed into it, or appended whole; on disk before it returns."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from art_ray.errors import ArtRayError, LedgerWriteError
from art_ray.ledger.paths import parquet_name, step_files

__all__ = [
    "append_line",
    "claim",
    "explained",
    "locked",
    "make_dirs",
    "remove_abandoned",
    "sync_dir",
    "temporary",
    "write_atomically",
]

LOCK_TIMEOUT_S = 60.0
ABANDONED_AFTER_S = 60.0
"""A temporary file this old, whose writer holds no lock on it, was left by a process that died."""

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and log again",
    errno.EDQUOT: "the quota is used up: free some space and log again",
    errno.EROFS: "the file system is read-only: choose another base_path",
    errno.EACCES: "no permission: choose another base_path, or change the owner of the folder",
    errno.EPERM: "not permitted: choose another base_path, or change the owner of the folder",
    errno.EEXIST: "a file stands where a folder is needed: choose another base_path",
    errno.ENOTDIR: "a file stands where a folder is needed: choose another base_path",
}


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turns an `OSError` inside the block into a `LedgerWriteError` that says what was tried and what to do."""
    try:
        yield
    except ArtRayError:  # already says what happened; some of ours are an OSError too
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "nothing that was logged before is harmed")
        written = LedgerWriteError(f"{action} failed: {error}. {advice[0].upper()}{advice[1:]}.")
        written.errno = error.errno
        raise written from error


@contextmanager
def locked(folder: Path, name: str = ".lock", timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds the lock of `folder` against every other thread and process.

    Raises:
        LedgerWriteError: another process holds it for longer than `timeout_s`.
    """
    lock = filelock.FileLock(folder / name, poll_interval=0.005)
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        raise LedgerWriteError(
            f"another process has held {folder / name} for over {timeout_s:g} s: is it stopped or hung?"
        ) from None
    try:
        yield
    finally:
        lock.release()


def sync_dir(folder: Path) -> None:
    """Flushes the names in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(folder: Path) -> None:
    """Creates `folder` and what is missing above it, and flushes each new name to disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_dir(path.parent)


@contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """Gives the path of an empty file in `folder`, which is gone after the block.

    Its writer holds a lock on it, so that `remove_abandoned` can tell it from the leftover of a dead process.
    """
    path = folder / f".{uuid.uuid4().hex}.tmp"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_abandoned(folder: Path) -> int:
    """Deletes the temporary files that dead processes left in `folder` and below; returns how many."""
    removed = 0
    for path in folder.glob("**/.*.tmp"):
        try:
            if time.time() - path.stat().st_mtime < ABANDONED_AFTER_S:
                continue
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue  # just renamed or removed by its writer
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)
    return removed


def sync_file(path: Path) -> None:
    """Flushes the content of `path` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(source: Path, folder: Path, step: int) -> Path:
    """Gives the finished file `source` the first free name of `step` in `folder`, and returns it.

    A hard link fails where the name is taken, so that no two processes ever get one name, lock or no lock. File systems
    without hard links get a look and a rename; the caller holds the folder's lock, which all our writers take.
    """
    sync_file(source)
    copy = 0
    while True:
        target = folder / parquet_name(step, copy)
        try:
            os.link(source, target)
        except FileExistsError:
            copy = max(copy + 1, len(step_files(folder, step)))  # the names of a step are taken without gaps
            continue
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if target.exists():
                copy += 1
                continue
            os.rename(source, target)
        sync_dir(folder)
        return target


def write_atomically(path: Path, content: bytes) -> None:
    """Puts `content` in the place of `path`: a reader, or a crash at any moment, finds the old or the new, whole."""
    with temporary(path.parent) as beside:
        beside.write_bytes(content)
        sync_file(beside)
        os.replace(beside, path)
        sync_dir(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Appends `line` (without its end) in one write and flushes it to disk. The caller holds the folder's lock.

    A torn last line, left by a writer that died, gets an end first, so that it spoils nothing but itself. A write that
    the disk cuts short is taken back.
    """
    existed = path.exists()
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = (b"\n" if torn else b"") + line + b"\n"
        try:
            written = os.write(descriptor, content)
            if written != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if not existed:
        sync_dir(path.parent)
