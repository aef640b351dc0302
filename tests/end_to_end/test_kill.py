"""The driver killed or interrupted: nothing of ours survives it, and the same script goes on where it stood."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from art_ray.training import checkpoint
from tests.processes import Marked, python, wait_until
from tests.small_models import make_tiny_model

DRIVER = Path(__file__).with_name("driver.py")
STEPS = 3
MOMENTS = [
    ("registering", 4.0, signal.SIGKILL),
    ("training step 2", 0.5, signal.SIGKILL),
    (f"training step {STEPS}", 0.5, signal.SIGINT),
]
"""What the driver has said, the seconds within which the blow falls after that, and which it is."""


@pytest.mark.timeout(600)
def test_a_driver_ended_at_any_moment_leaves_nothing_behind_and_resumes(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    command = python(str(DRIVER), f"--base-path={tmp_path}/art", f"--base-model={model}", f"--steps={STEPS}")
    checkpoints = tmp_path / "art" / "tests" / "models" / "driven" / "checkpoints"
    reached = -1
    for said, within_s, blow in MOMENTS:
        driver = Marked(command, tmp_path / f"{said}.log")
        try:
            driver.wait_for_output(said, 180)
            _let_pass(random.uniform(0, within_s))
            driver.process.send_signal(blow)
            driver.process.wait(60)
            driver.wait_until_gone(30)
        finally:
            driver.end_all()
        newest = checkpoint.newest_step(checkpoints)
        if newest is not None:
            assert newest >= reached
            reached = newest
            checkpoint.verify(checkpoints, newest)

    driver = Marked(command, tmp_path / "last.log")
    try:
        output = driver.succeed(240)
        driver.wait_until_gone(30)
    finally:
        driver.end_all()
    assert f"registered at step {reached}" in output
    assert checkpoint.newest_step(checkpoints) == STEPS
    lines = [json.loads(line) for line in (checkpoints.parent / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, STEPS + 1))


def _let_pass(seconds: float) -> None:
    """Waits for a random moment: what is tested here is that no moment is special."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, seconds + 1, "a random moment")
