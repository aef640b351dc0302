"""The ledger: against ART in the same run, on a long history, and as seen by the event loop of the driver."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import CannotMeasureError, Measured, benchmark
from tests.bench.log_worker import groups

LINES = 1_000_000
ROUNDS = 20
WARM_UP = 3
"""Rounds that do not count: the first calls import what they need."""


@benchmark("log_vs_art", unit="s", runs=3, packages=("pyarrow", "pydantic"))
def log_against_art() -> Measured:
    """`Ledger.log` against ART 0.5.18's `Model.log`: medians of calls in turns, so that both meet the same noise."""
    art_python = os.environ.get("ART_PYTHON")
    if not art_python:
        raise CannotMeasureError("set ART_PYTHON to a python with openpipe-art==0.5.18, numpy, duckdb and pyarrow")
    script = str(Path(__file__).with_name("log_worker.py"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    seconds: dict[str, list[float]] = {"ours": [], "art": []}
    workers = {
        name: subprocess.Popen(
            [python, script, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, **({"PYTHONPATH": os.getcwd()} if name == "ours" else {})},
        )
        for name, python in (("ours", sys.executable), ("art", art_python))
    }
    try:
        for worker in workers.values():
            _answer_of(worker, "ready")
        for round_ in range(WARM_UP + ROUNDS):
            for name, worker in workers.items():
                print("log", file=worker.stdin, flush=True)
                answer = float(_answer_of(worker))
                if round_ >= WARM_UP:
                    seconds[name].append(answer)
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait(30)
    return Measured(statistics.median(seconds["ours"]), statistics.median(seconds["art"]))


def _answer_of(worker: subprocess.Popen, expected: str | None = None) -> str:
    for line in worker.stdout:
        text = line.strip()
        if text == expected or (expected is None and text.replace(".", "").replace("e-", "").isdigit()):
            return text
    raise RuntimeError(f"{worker.args} ended with {worker.wait(30)}")


@benchmark("log_loop_block_ms", unit="ms", runs=2, packages=("ray",))
def event_loop_while_logging() -> Measured:
    """How long the driver's event loop stands still while references are logged: the median call's longest stop."""
    import ray

    from art_ray.actors.model_actor import ActorLedger
    from art_ray.ledger import LedgerConfig
    from art_ray.trajectories import Trajectory, TrajectoryGroup

    async def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            config = LedgerConfig(base_path=folder, project="bench", name="blocked", report_metrics=[])
            ledger = ActorLedger(config, timeout_s=120)
            refs = await ledger.share(groups(Trajectory, TrajectoryGroup))
            blocked_ms = []
            for step in range(ROUNDS):
                longest = 0.0
                call = asyncio.ensure_future(
                    ledger.log(refs, split="train", step=step, metrics=None, request_id=str(step))
                )
                while not call.done():
                    before = time.perf_counter()
                    await asyncio.sleep(0)
                    longest = max(longest, time.perf_counter() - before)
                    await asyncio.sleep(0.0005)
                await call
                blocked_ms.append(longest * 1000)
            await ledger.close(10)
            return statistics.median(blocked_ms[WARM_UP:])

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        return Measured(asyncio.run(measure()))
    finally:
        ray.shutdown()


def _long_history(path: Path) -> None:
    with path.open("w") as file:
        for i in range(LINES):
            row = {"train/loss": i % 997 / 997, "train/reward": i % 13 / 13, "train/reward_std_dev": 0.3 + i % 7 / 70}
            if i >= LINES // 2:
                row["val/reward"] = (i * 7919 % LINES) / LINES
            file.write(json.dumps({**row, "step": i // 2, "recorded_at": "2026-01-01T00:00:00+00:00"}) + "\n")


_IN_CHILD = """
import re, sys, time
from pathlib import Path
from art_ray.ledger.history import History
from art_ray.ledger.checkpoints import steps_to_keep
from art_ray.ledger.learning_rate import learning_rate_multiplier
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
history = History(Path(sys.argv[1]))
at_rest = peak_kib()
started = time.perf_counter()
if sys.argv[2] == "best":
    kept = steps_to_keep(history, "val/reward", 1)
    # Step s has the lines 2s and 2s + 1, and the metric exists from step 250,000 on.
    assert len(kept) == 2 and kept[1] >= 250_000, kept
else:
    multiplier = learning_rate_multiplier(history)
    assert 0.99 < multiplier < 1.01, multiplier
print(time.perf_counter() - started, (peak_kib() - at_rest) / 1024)
"""


@functools.cache
def _history() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "history.jsonl"
    _long_history(path)
    return path


def _in_fresh_process(what: str) -> tuple[float, float]:
    """Returns seconds, and MiB more than at rest."""
    command = [sys.executable, "-c", _IN_CHILD, str(_history()), what]
    seconds, mebibytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), float(mebibytes)


@benchmark("best_step_1m_s", unit="s", packages=("numpy", "pydantic"))
def best_step_seconds() -> Measured:
    """Which checkpoints stay, by a metric that first appears at line 500,000 of a million."""
    return Measured(_in_fresh_process("best")[0])


@benchmark("best_step_1m_rss_mb", unit="MiB", packages=("numpy", "pydantic"))
def best_step_memory() -> Measured:
    """What that takes of memory, beyond the process at rest."""
    return Measured(_in_fresh_process("best")[1])


@benchmark("lr_multiplier_1m_s", unit="s", packages=("numpy", "pydantic"))
def learning_rate_seconds() -> Measured:
    """The learning-rate multiplier, from a million lines that all have the metric."""
    return Measured(_in_fresh_process("rate")[0])
