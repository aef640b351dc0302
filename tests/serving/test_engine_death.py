"""Engines that die, engines that cannot start, and owners that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from art_ray.errors import ConfigError, DeadlineError, EngineError
from art_ray.serving.adapter import AdapterVersion
from art_ray.serving.door import LOST_STATUS
from art_ray.serving.engine import Engine
from art_ray.serving.guard import TAG, processes_of
from tests.serving.conftest import KEY, QUESTION, spec_of, until

OWNER = """
import asyncio, sys
from pathlib import Path
from art_ray.serving.engine import Engine
from tests.serving.conftest import spec_of
if __name__ == "__main__":
    asyncio.run(Engine(spec_of(Path(sys.argv[1]))).start())
"""


def runs_of(owner: int) -> set[str]:
    """The names of the runs of which process `owner` is the owner."""
    return {path.name for path in Path("/dev/shm").glob(f"art_ray-{owner}-*")}


def run_of(owner: int) -> str | None:
    """The name of the only run of `owner`."""
    return next(iter(runs_of(owner)), None)


@pytest.mark.parametrize("processes", [1, 2], ids=["while the engine's core starts", "while its worker starts"])
def test_an_owner_killed_during_the_start_takes_the_engine_with_it(tiny: Path, tmp_path: Path, processes: int):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def started() -> bool:
        assert owner.poll() is None, owner.stderr.read().decode()[-2000:] if owner.stderr else ""
        run = run_of(owner.pid)
        # Python's resource tracker, which ends by itself, is one of the run's processes too.
        return run is not None and len(processes_of(run)) > processes

    asyncio.run(until(started, 120))
    run = run_of(owner.pid)
    assert run is not None
    segments = set(Path("/dev/shm").glob("psm_*"))
    owner.kill()
    owner.wait()
    killed = time.monotonic()
    asyncio.run(until(lambda: not processes_of(run) and run_of(owner.pid) is None, 20))
    assert time.monotonic() - killed < 10
    assert set(Path("/dev/shm").glob("psm_*")) <= segments


async def test_a_killed_engine_breaks_off_every_answer_and_leaves_nothing(tiny: Path, adapters: Path):
    others = runs_of(os.getpid())
    engine = Engine(spec_of(tiny))
    endpoint = await engine.start()
    try:
        await engine.load(AdapterVersion.from_directory(1, adapters / "1"))
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=60) as client:

            async def ask(max_tokens: int) -> int | str:
                request = {"model": "policy@1", "messages": QUESTION, "max_tokens": max_tokens, "ignore_eos": True}
                try:
                    answer = await client.post("/v1/chat/completions", json=request)
                except httpx.RemoteProtocolError:
                    return "broken off"
                return answer.status_code

            assert await ask(4) == 200
            running = [asyncio.create_task(ask(400)) for _ in range(8)]
            await ask(4)  # behind the others, so that they are being answered now
            worker = max(endpoint.engine_pids)  # the last one that was started
            os.kill(worker, signal.SIGKILL)
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(*running)
            assert set(outcomes) <= {200, LOST_STATUS, "broken off"}, outcomes
            await until(lambda: engine.status()["state"] == "failed")
            assert await ask(4) == LOST_STATUS
            for asked in (engine.load(AdapterVersion.from_directory(2, adapters / "2")), engine.probe()):
                with pytest.raises(EngineError, match="died unexpectedly"):
                    await asked
    finally:
        await engine.stop()
    assert engine.status()["state"] == "stopped"
    assert runs_of(os.getpid()) == others
    assert TAG not in os.environ
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in endpoint.engine_pids[1:]))
    with pytest.raises(EngineError, match="stopped"):
        await engine.load(AdapterVersion.from_directory(2, adapters / "2"))


@pytest.fixture
def unknown_model(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text()) | {"architectures": ["NoSuchModel"], "model_type": "llama"}
    config.write_text(json.dumps(values))
    return tmp_path / "model"


async def test_an_unknown_architecture_is_told_by_name(unknown_model: Path):
    engine = Engine(spec_of(unknown_model))
    with pytest.raises(EngineError, match="NoSuchModel"):
        await engine.start()
    assert engine.status()["state"] == "failed"
    with pytest.raises(EngineError, match="NoSuchModel"):
        await engine.start()
    await engine.stop()


async def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest(tiny: Path):
    for arguments, message in (
        ({"tool_call_parsers": "hermes"}, "tool_call_parser"),
        ({"block_size": "many"}, "block-size"),
        ({"enable_auto_tool_choice": True}, "tool-call-parser"),
    ):
        engine = Engine(spec_of(tiny, engine_args=arguments))
        with pytest.raises(ConfigError, match=message):
            await engine.start()
        await engine.stop()


async def test_a_start_that_takes_too_long_ends_at_its_deadline_and_leaves_nothing(tiny: Path):
    others = runs_of(os.getpid())
    engine = Engine(spec_of(tiny, start_timeout_s=3))
    with pytest.raises(DeadlineError, match="start_timeout_s"):
        await engine.start()
    assert engine.status()["state"] == "stopped"
    assert runs_of(os.getpid()) == others


async def test_an_engine_that_was_not_started_says_so(tiny: Path, adapters: Path):
    engine = Engine(spec_of(tiny))
    with pytest.raises(EngineError, match="not started; start it first"):
        await engine.probe()
    await engine.stop()  # without effect
