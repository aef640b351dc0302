"""What a person sees while something takes longer than two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tqdm.auto import tqdm

__all__ = ["bar", "elapsed"]

IN_A_LOG_EVERY_S = 15.0


def bar(**options: Any) -> Any:
    """Returns a `tqdm` bar on standard error; where that is no terminal but a log, it writes only now and then."""
    terminal = sys.stderr.isatty()
    return tqdm(dynamic_ncols=True, mininterval=0.1 if terminal else IN_A_LOG_EVERY_S, file=sys.stderr, **options)


@contextlib.asynccontextmanager
async def elapsed(what: str) -> AsyncIterator[None]:
    """Shows `what` and the seconds since it began, on standard error; in a terminal the seconds count."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()

    async def count() -> None:
        while True:
            print(f"\r{what} … {time.monotonic() - started:.0f} s ", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(1)

    if not terminal:
        print(f"{what} …", file=sys.stderr, flush=True)
    counting = asyncio.ensure_future(count()) if terminal else None
    ended = "failed"
    try:
        yield
        ended = "done"
    finally:
        if counting:
            counting.cancel()
        start = "\r" if terminal else ""
        print(f"{start}{what}: {ended} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
