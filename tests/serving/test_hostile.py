"""Requests that mean harm, or know no better, against a real engine: none gets in, none stops the service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.serving.conftest import KEY, QUESTION, Replica

GOOD = {"model": "policy", "messages": QUESTION, "max_tokens": 2}
RNG = random.Random(0)
HEAD = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {{size}}\r\n\r\n"
)
WITH_KEY = {"authorization": f"Bearer {KEY}"}
ROUTES_OF_THE_ENGINE = [
    "/collective_rpc", "/sleep", "/wake_up", "/pause", "/resume", "/is_sleeping", "/reset_prefix_cache", "/server_info",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/init_weight_transfer_engine", "/docs",
    "/openapi.json", "/metrics", "/load", "/invocations", "/ping", "/v1/responses", "/v1/embeddings", "/pooling",
    "/inference/v1/generate", "/start_profile", "/scale_elastic_ep", "/abort_requests", "/v1/messages",
]  # fmt: skip
MALFORMED: dict[str, Any] = {
    "n": [0, -1, 10**9, "two"],
    "max_tokens": [0, -1, 10**12, "many"],
    "temperature": [-1, 1e300, "warm", [1]],
    "top_p": [0, 2, "x"],
    "top_k": [-7, 10**15],
    "min_p": [-1, 2],
    "min_tokens": [-1, 10**9],
    "seed": [2**70, "x"],
    "stop": ["", [""], [5], ["x"] * 5000],
    "stop_token_ids": [[-1], [10**9], ["x"]],
    "logit_bias": [{"99999999": 5}, {"x": 1}, {"-1": 1}, {"5": 1e400}, []],
    "allowed_token_ids": [[], [10**9], [-1]],
    "bad_words": [[""], [" " * 9999], [5]],
    "logprob_token_ids": [[10**9], [-1], list(range(5000))],
    "top_logprobs": [-2, 10**6],
    "structured_outputs": [{"regex": "("}, {"grammar": "nonsense"}, {"choice": []}, {"json": {"type": "nothing"}}, {}],
    "response_format": [{"type": "json_schema"}, {"type": "unknown"}, {"type": "json_schema", "json_schema": {}}],
    "tools": [[], [{}], "x", [{"type": "function", "function": {"name": 5}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "absent"}}],
    "priority": [2**70, 5],
    "cache_salt": ["", 5],
    "truncate_prompt_tokens": [-5, 10**12],
    "chat_template": ["{% for i in range(10**9) %}x{% endfor %}", "{{ 1/0 }}"],
    "chat_template_kwargs": [{"tools": 5}, [], {"chat_template": "x"}],
    "add_generation_prompt": ["maybe"],
    "continue_final_message": [True],
    "vllm_xargs": [{"x": {"y": 1}}],
    "kv_transfer_params": [{"do_remote_prefill": True, "remote_host": "127.0.0.1"}],
    "ec_transfer_params": [{"x": 1}],
    "repetition_detection": [{"x": 1}],
    "thinking_token_budget": [-5, 10**12],
    "repetition_penalty": [0, -1, 1e300],
    "presence_penalty": [1e300, "x"],
    "stream_options": [{"include_usage": "x"}, 5],
    "use_beam_search": [True],
    "request_id": ["", "same", 5],
    "session_id": [5],
    "mm_processor_kwargs": [{"x": 1}],
    "return_tokens_as_token_ids": ["x"],
    "messages": [
        [], None, "text", [None], [{}], [{"role": "none", "content": "x"}], [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
        [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "<|im_end|>" * 600}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": 5}]}],
    ],
}  # fmt: skip


@pytest.fixture
async def http(replica: Replica):
    await replica.load(1)
    async with httpx.AsyncClient(base_url=replica.base_url.removesuffix("/v1"), timeout=60) as http:
        yield http


@pytest.mark.parametrize("field", MALFORMED)
async def test_a_malformed_field_harms_nobody_else(replica: Replica, http: httpx.AsyncClient, field: str):
    for value in MALFORMED[field]:
        body = json.dumps({**GOOD, field: value}, allow_nan=True)
        response = await http.post("/v1/chat/completions", content=body, headers=WITH_KEY)
        # The engine may take what is merely odd. What it refuses, it refuses as the client's mistake.
        assert response.status_code in (200, 400, 404, 422), f"{field}={value!r:.60}: {response.text[:300]}"
        assert replica.status()["state"] == "ready", f"{field}={value!r:.60} killed the engine"
    assert (await http.post("/v1/chat/completions", json=GOOD, headers=WITH_KEY)).status_code == 200


async def test_a_thousand_hostile_requests_get_nothing_and_stop_nothing(replica: Replica, http: httpx.AsyncClient):
    attacks = [no_key, wrong_key, huge, invalid_json, slow, leaving, unknown_route, engine_route, garbage, long_headers]
    outcomes: Counter[str] = Counter()
    await volley(replica, http, [RNG.choice(attacks) for _ in range(200)], outcomes)  # warms every path up
    before = resident_bytes()
    good = 0
    for _ in range(8):
        await volley(replica, http, [RNG.choice(attacks) for _ in range(100)], outcomes)
        answer = await http.post("/v1/chat/completions", json=GOOD, headers=WITH_KEY)
        good += answer.status_code == 200
    assert good == 8
    assert resident_bytes() - before < 64 * 2**20
    assert sum(outcomes.values()) == 1000
    assert set(outcomes) <= {"closed", "400", "401", "404", "405", "413", "431"}, outcomes
    assert replica.status()["in_flight"] == 0
    assert replica.status()["state"] == "ready"


async def volley(replica: Replica, http: httpx.AsyncClient, attacks: list[Any], outcomes: Counter[str]) -> None:
    limit = asyncio.Semaphore(20)

    async def one(attack: Any) -> None:
        async with limit:
            try:
                outcomes[str(await attack(replica, http))] += 1
            except (httpx.TransportError, ConnectionError):
                outcomes["closed"] += 1

    await asyncio.gather(*map(one, attacks))


async def no_key(replica: Replica, http: httpx.AsyncClient) -> int:
    return (await http.post("/v1/chat/completions", json=GOOD)).status_code


async def wrong_key(replica: Replica, http: httpx.AsyncClient) -> int:
    headers = {"authorization": f"Bearer {KEY[:-1]}"}
    return (await http.post("/v1/chat/completions", json=GOOD, headers=headers)).status_code


async def huge(replica: Replica, http: httpx.AsyncClient) -> int:
    return (await http.post("/v1/chat/completions", content=b" " * 2_000_000, headers=WITH_KEY)).status_code


async def invalid_json(replica: Replica, http: httpx.AsyncClient) -> int:
    body = RNG.choice([b"{", b"[" * 5000, b"\xff", b"nul", b'{"model": }'])
    return (await http.post("/v1/chat/completions", content=body, headers=WITH_KEY)).status_code


async def unknown_route(replica: Replica, http: httpx.AsyncClient) -> int:
    return (await http.get("/v1/../admin", headers=WITH_KEY)).status_code


async def engine_route(replica: Replica, http: httpx.AsyncClient) -> int:
    path = RNG.choice(ROUTES_OF_THE_ENGINE)
    return (await http.post(path, json={"method": "save_model"}, headers=WITH_KEY)).status_code


async def slow(replica: Replica, http: httpx.AsyncClient) -> str:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 500\r\n\r\n{{"
    )
    return await raw(replica, head.encode(), wait_s=0.05)


async def leaving(replica: Replica, http: httpx.AsyncClient) -> str:
    body = json.dumps({**GOOD, "max_tokens": 400, "ignore_eos": True})
    return await raw(replica, (HEAD.format(size=len(body)) + body).encode(), wait_s=0.05)


async def garbage(replica: Replica, http: httpx.AsyncClient) -> str:
    return await raw(replica, RNG.randbytes(3000), wait_s=0.0)


async def long_headers(replica: Replica, http: httpx.AsyncClient) -> str:
    return await raw(replica, b"GET /health HTTP/1.1\r\nX: " + b"x" * 300_000, wait_s=0.0)


async def raw(replica: Replica, content: bytes, wait_s: float) -> str:
    """Sends bytes over a connection of its own, and leaves without reading an answer."""
    address = urlsplit(replica.base_url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    with contextlib.suppress(ConnectionError):
        writer.write(content)
        await writer.drain()
        await asyncio.sleep(wait_s)  # the slow sender's pause is the attack
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return "closed"


async def test_every_route_of_the_engine_is_closed_with_the_key_and_without(http: httpx.AsyncClient):
    for path in ROUTES_OF_THE_ENGINE:
        for method in ("GET", "POST"):
            assert (await http.request(method, path, headers=WITH_KEY)).status_code == 404, path
            assert (await http.request(method, path)).status_code == 401, path


async def test_the_key_is_never_shown(replica: Replica, client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="none", messages=[])
    assert KEY not in str(refused.value)
    assert KEY not in json.dumps(replica.status())
    assert KEY not in repr(replica.engine._spec)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
