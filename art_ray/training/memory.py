"""The C library's allocator, told that a trainer asks for the same large pieces again in every step."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Has this process keep what it frees, and returns whether it does; only glibc can be asked to.

    By default each large tensor is mapped anew, and every page of it is zeroed by the kernel when it is first touched.
    Measured on 2 cores (2026-12-01), SmolLM2-135M in float32, 3,300 tokens in one row: 200,000 to 700,000 page faults a
    step against 4, and 9.6 s against 10.3 to 11.1 s; the most memory that was ever used stays the same. To be called
    before the process starts threads, since each would get a heap of its own, too small for large pieces.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_ARENA_MAX: 1}
    accepted = [mallopt(parameter, value) == 1 for parameter, value in wanted.items()]
    return all(accepted)
