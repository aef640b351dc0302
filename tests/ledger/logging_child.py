"""Logs without end, and says on standard output which calls have returned. Made to be killed.

As a server (`python -m tests.ledger.logging_child`): for each line `BASE FIRST` on standard input it forks a child that
logs the calls FIRST, FIRST + 1, …; the fork spares every child the imports.
"""

import os
import signal
import sys
from pathlib import Path

from tests.ledger.made import group_of, ledger_at


def log_without_end(base: Path, first: int) -> None:
    ledger = ledger_at(base)
    call = first
    while True:
        if call % 4 == 3:
            ledger.log(None, split="train", step=call % 7, metrics={"call": call}, request_id=f"r{call}")
        else:
            ledger.log(
                [group_of(0.0, 1.0), group_of(0.5)],
                split=("train", "val")[call % 2],
                step=call % 7,
                metrics={"call": call},
                request_id=f"r{call}" if call % 3 else None,
            )
        os.write(1, f"returned {call}\n".encode())
        call += 1


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        base, first = line.split()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # nothing outlives a test that died
            os.write(1, f"child {os.getpid()}\n".encode())  # by itself: its parent might come second
            log_without_end(Path(base), int(first))
        os.waitpid(child, 0)
        os.write(1, b"gone\n")


if __name__ == "__main__":
    serve()
