"""Two real engines behind one URL, one of which is killed while both answer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from openai.lib.streaming.chat import ChatCompletionStreamState

from art_ray.actors import calls
from art_ray.actors.fleet_actor import FleetActor, FleetSpec
from art_ray.actors.placement import Placed, ended, placed
from art_ray.serving.listener import reserved_socket
from art_ray.trajectories import Sampling
from tests.serving.adapters import adapter_of, reference_logprobs
from tests.serving.conftest import KEY, QUESTION, spec_of
from tests.small_models import make_tiny_model

KILLS = 2
EXACT = 1e-4


class Service:
    """A fleet actor, as a backend would drive it."""

    def __init__(self, actor: Placed, base_url: str) -> None:
        self.actor, self.base_url = actor, base_url

    async def call(self, method: str, *arguments: Any, timeout_s: float = 120) -> Any:
        wait = self.actor.wait(method, method, timeout_s)
        return await calls.answer(getattr(self.actor.handle, method).remote(*arguments), wait)

    async def until(self, state: list[str], timeout_s: float = 120) -> None:
        async with asyncio.timeout(timeout_s):
            while [r["state"] for r in (await self.call("status"))["replicas"]] != state:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # another process brings it about, and does not tell


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
async def service(ray_instance: None, tiny: Path, tmp_path: Path):
    port = reserved_socket("127.0.0.1")
    engine = spec_of(tiny, weights="merged", replicas=2, probe_interval_s=1.0, request_timeout_s=120)
    spec = FleetSpec("vllm:p/m", engine, port.getsockname()[1], tmp_path, {"CPU": 1.0}, place_s=60, stop_s=20)
    actor = placed(FleetActor, "fleet:p/m", spec)
    try:
        service = Service(actor, "")
        service.base_url = (await service.call("start", timeout_s=300)).base_url
        yield service
    finally:
        await ended(actor, 60)
        port.close()


async def whole(client: openai.AsyncOpenAI, max_tokens: int) -> Any:
    options: Any = {"extra_body": {"ignore_eos": True}}
    answer = await client.chat.completions.create(
        model="policy",
        messages=QUESTION,
        max_tokens=max_tokens,
        **options,  # type: ignore[arg-type]
    )
    return answer.choices[0]


async def streamed(client: openai.AsyncOpenAI, max_tokens: int) -> Any:
    state = ChatCompletionStreamState()
    options: Any = {"extra_body": {"ignore_eos": True}}
    async for chunk in await client.chat.completions.create(
        model="policy",
        messages=QUESTION,
        max_tokens=max_tokens,
        stream=True,
        **options,  # type: ignore[arg-type]
    ):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


@pytest.mark.timeout(400)
async def test_a_killed_engine_costs_no_request_and_returns(service: Service, tiny: Path, tmp_path: Path):
    rng = random.Random(0)
    for step in range(1, KILLS + 1):
        version = adapter_of(tiny, tmp_path, step=step)
        await service.call("publish", step, (ray.put(version),))
        async with openai.AsyncOpenAI(base_url=service.base_url, api_key=KEY, max_retries=0, timeout=120) as client:
            asking = [asyncio.create_task((streamed if number % 2 else whole)(client, 300)) for number in range(12)]
            await asyncio.wait(asking, timeout=rng.uniform(0.2, 1.0))
            status = await service.call("status")
            victim = rng.choice(status["replicas"])
            os.kill(max(victim["pids"]), signal.SIGKILL)
            choices = await asyncio.gather(*asking)
        for choice in choices:
            sampling = Sampling.of(choice)
            assert sampling is not None
            assert len(sampling.token_ids) == 300
            assert set(sampling.policy_versions) == {step}
            expected = reference_logprobs(
                tiny, tmp_path / str(step), sampling.prompt_token_ids, sampling.token_ids, sampling.temperature
            )
            assert max(abs(a - b) for a, b in zip(sampling.logprobs, expected, strict=True)) < EXACT
        await service.until(["ready", "ready"])
        restarts = [replica["restarts"] for replica in (await service.call("status"))["replicas"]]
        assert sum(restarts) == step, "the killed one came back, and no other was lost"
