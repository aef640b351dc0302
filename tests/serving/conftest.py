"""What the serving tests share: one two-layer model, and one engine per way of serving, started once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from art_ray.serving.adapter import AdapterVersion, LoadedVersion
from art_ray.serving.config import ServingConfig
from art_ray.serving.engine import Engine
from art_ray.serving.fleet import Fleet
from art_ray.serving.spec import EngineSpec
from tests.serving.adapters import adapter_of
from tests.small_models import make_tiny_model

KEY = "a-key-of-the-tests"
QUESTION = [{"role": "user", "content": "Say yes, no or maybe."}]


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for something that another thread or process brings about, and that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 with SmolLM2's tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters for `tiny`, one per step of 0 to 4; 0 is untrained."""
    folder = tmp_path_factory.mktemp("adapters")
    for step in range(5):
        adapter_of(tiny, folder, step=step)
    return folder


def spec_of(model: Path, **serving: object) -> EngineSpec:
    """A specification for tests: float32, so that log-probabilities can be compared; little memory."""
    values = {
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_gib": 0.25,
        "max_num_seqs": 64,
        "max_versions": 3,
        "max_body_mib": 1.0,
    }
    return EngineSpec(
        base_model=str(model), name="policy", api_key=KEY, max_lora_rank=4, serving=ServingConfig(**values | serving)
    )


class InProcess:
    """A `ReplicaPort` to an engine of this process, which can hold one."""

    def __init__(self, spec: EngineSpec, name: str = "replica") -> None:
        self.name = name
        self.engine = Engine(spec)
        self.start, self.stage, self.load = self.engine.start, self.engine.stage, self.engine.load
        self.unload, self.sleep, self.wake = self.engine.unload, self.engine.sleep, self.engine.wake
        self.probe, self.end = self.engine.probe, self.engine.stop


class Replica:
    """A fleet of one started engine, and the adapters that may be loaded into it."""

    def __init__(self, spec: EngineSpec, model: Path, adapters: Path) -> None:
        self._port = InProcess(spec)
        self.fleet = Fleet(spec, lambda index, restarts: self._port)
        self.engine, self.model, self.adapters = self._port.engine, model, adapters
        self.base_url = ""

    async def start(self) -> None:
        self.base_url = (await self.fleet.start()).base_url
        self.endpoint = await self.engine.start()

    def status(self) -> dict[str, Any]:
        return self.fleet.status()

    def version(self, step: int, contents: int | None = None) -> AdapterVersion:
        """Version `step`, with the adapter of `contents` where that is another one."""
        return AdapterVersion.from_directory(step, self.adapters / str(step if contents is None else contents))

    async def publish(self, version: AdapterVersion) -> LoadedVersion:
        return await self.fleet.publish(version.step, version)

    async def load(self, step: int, contents: int | None = None, *, holder: str | None = None) -> LoadedVersion:
        return await self.fleet.publish(step, self.version(step, contents), holder=holder)

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=KEY, max_retries=0, **options)


@pytest.fixture(scope="session", params=["adapter", "merged"])
async def replica(request: pytest.FixtureRequest, tiny: Path, adapters: Path) -> AsyncIterator[Replica]:
    """One engine for all tests of one way of serving; what it answered before its first version is checked here."""
    replica = Replica(spec_of(tiny, weights=request.param), tiny, adapters)
    assert replica.engine.status()["state"] == "not started"
    try:
        await replica.start()
        base_url, endpoint = replica.base_url, replica.endpoint
        await replica.start()
        assert (replica.base_url, replica.endpoint) == (base_url, endpoint), "again: no second engine, no second port"
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
            for model in ("policy", "policy@0", str(tiny), "(no version)"):
                refused = await client.post(f"{base_url}/chat/completions", json={"model": model, "messages": QUESTION})
                assert refused.status_code == 404, "a started engine serves nothing before its first version"
                assert "no version yet" in refused.text
        yield replica
    finally:
        await replica.fleet.stop()


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[openai.AsyncOpenAI]:
    async with replica.client() as client:
        yield client
