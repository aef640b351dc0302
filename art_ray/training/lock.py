"""One trainer at a time on a checkpoint directory: a lock that ends with the process that holds it. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Self

from art_ray.errors import CheckpointError

__all__ = ["LOCK_FILE", "WriterLock", "current_writer"]

logger = logging.getLogger(__name__)

LOCK_FILE = ".trainer.lock"
WAIT_S = 30.0
"""How long a trainer waits for its predecessor, which may just have been killed."""
_POLL_S = 0.1
_TAKEN = (errno.EACCES, errno.EAGAIN)


class WriterLock:
    """Held from its creation until `release`, its last reference, or the end of the process, however that comes.

    The file stays: it says who held the lock last, and means nothing while nobody holds it.

    Args:
        checkpoints_dir: made if absent.

    Raises:
        CheckpointError: another trainer holds it; the message says which. Or the directory cannot be written.
    """

    def __init__(self, checkpoints_dir: Path) -> None:
        self._descriptor: int | None = None
        self._path = Path(checkpoints_dir) / LOCK_FILE
        try:
            Path(checkpoints_dir).mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            self._acquire(self._descriptor)
        except OSError as error:
            self.release()
            raise CheckpointError(f"the lock of {checkpoints_dir} could not be taken: {self._path}: {error}") from error
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Lets another trainer have the directory. Again: no effect."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self._locked(descriptor):
            holder = _holder(descriptor)
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"another trainer works in {self._path.parent}: {holder}. It was waited for {WAIT_S:g} s. One "
                    "trainer at a time writes a model's checkpoints: end that one, or train under another model name"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            # Some network file systems have no locks. They are not refused: most jobs have one trainer anyway.
            logger.warning(
                "%s: no locks on this file system (%s): nothing keeps a second trainer out", self._path, error
            )
        return True


def current_writer(checkpoints_dir: Path) -> str | None:
    """Returns who holds the lock of `checkpoints_dir` at this moment; None where nobody does, or where it has none.

    Writes nothing. On a file system without locks nobody is ever known to hold one.

    Raises:
        OSError: the lock's file cannot be read.
    """
    try:
        descriptor = os.open(Path(checkpoints_dir) / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment only, while which a trainer waits
    except OSError as error:
        return _holder(descriptor) if error.errno in _TAKEN else None
    finally:
        os.close(descriptor)
    return None


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "unknown"
