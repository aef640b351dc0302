"""The front against `StubApp`, an ASGI application in the engine's place that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from art_ray.serving.front import Front, FrontLimits
from art_ray.serving.gate import VersionGate
from art_ray.serving.leases import VersionTable

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer secret"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "ü"}, "token_ids": [5], "finish_reason": "stop"}


class StubApp:
    """Remembers what it was asked and answers with `status` and `answer`, or with `events` as a stream."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.status = 200
        self.answer: Any = {"model": "internal", "prompt_token_ids": [1, 2], "choices": [CHOICE]}
        self.events: list[bytes] | None = None
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self.disconnected = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.headers.append(dict(scope["headers"]))
        self.requests.append((scope["path"], json.loads(message["body"] or b"{}")))
        self.asked.set()
        if not self.release.is_set():
            waiting = asyncio.create_task(self.release.wait())
            leaving = asyncio.create_task(receive())
            await asyncio.wait([waiting, leaving], return_when=asyncio.FIRST_COMPLETED)
            self.disconnected = leaving.done()
            for task in (waiting, leaving):
                task.cancel()
            if self.disconnected:
                return
        if self.events is not None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        body = json.dumps(self.answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:7], "more_body": True})
        await send({"type": "http.response.body", "body": body[7:]})


class House:
    """A front with its stub, its table, and a client that has the key."""

    def __init__(self, **options: Any) -> None:
        self.app = StubApp()
        self.table = VersionTable("policy")
        for step in (3, 4):
            self.table.add(step, f"hash{step}")
        self.table.make_current(4)
        self.failure: str | None = None
        limits = FrontLimits(
            body_bytes=10_000,
            request_timeout_s=options.pop("request_timeout_s", 30.0),
            pin_ttl_s=60.0,
            body_timeout_s=options.pop("body_timeout_s", 30.0),
        )
        self.front = Front(
            self.app,
            VersionGate(self.table, options.pop("max_requests", 8)),
            engine_model="engine-{}".format,
            api_key="secret",
            limits=limits,
            failure=lambda: self.failure,
            **options,
        )
        self.client = self.client_with(KEY)

    def client_with(self, headers: dict[str, str]) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.front), base_url="http://front", headers=headers)

    async def chat(self, **request: Any) -> httpx.Response:
        return await self.client.post(CHAT, json={"model": "policy", "messages": [], **request})


@pytest.fixture
def house() -> House:
    return House()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "secret"},
                                     {"authorization": "Bearer secret "}, {"x-api-key": "secret"}])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/tokenize", "/collective_rpc", "/metrics", "/docs", "/"])
async def test_no_route_but_health_answers_without_the_key(house: House, headers: dict[str, str], path: str):
    for method in ("GET", "POST"):
        response = await house.client_with(headers).request(method, path)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
    assert not house.app.requests


async def test_health_needs_no_key_but_tells_the_last_words_of_a_dead_engine_to_the_key_alone(house: House):
    client = house.client_with({})
    assert (await client.get("/health")).status_code == 200
    house.failure = "out of memory"
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed"})
    response = await house.client_with({"authorization": "Bearer wrong"}).get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed"})
    response = await house.client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "out of memory"})


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/sleep", "/pause", "/v1/load_lora_adapter", "/docs", "/metrics", "/v1/chat/completions/",
     "//v1/models", "/V1/models", "/reset_prefix_cache"],
)  # fmt: skip
async def test_routes_outside_the_list_are_not_reached_even_with_the_key(house: House, path: str):
    for method in ("GET", "POST"):
        assert (await house.client.request(method, path)).status_code == 404
    assert not house.app.requests


async def test_a_known_route_takes_one_method(house: House):
    assert (await house.client.get(CHAT)).status_code == 405
    assert (await house.client.delete("/v1/models")).status_code == 405


async def test_models_are_the_versions_held_and_nothing_else(house: House):
    models = (await house.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["policy@3", "policy@4"]


async def test_an_answer_says_who_sampled_it_and_the_engine_never_sees_the_public_name(house: House):
    response = await house.chat(temperature=0.5, unknown_field=[1])
    assert house.app.requests == [
        (CHAT, {"model": "engine-4", "messages": [], "temperature": 0.5, "unknown_field": [1],
                "logprobs": True, "return_token_ids": True})
    ]  # fmt: skip
    assert b"authorization" not in house.app.headers[0]
    answer = response.json()
    assert answer["model"] == "policy@4"
    assert answer["choices"] == [
        {**CHOICE, "policy_version": 4, "temperature": 0.5, "sampling_restrictions": {}, "prompt_token_ids": [1, 2]}
    ]
    assert int(response.headers["content-length"]) == len(response.content)


async def test_a_pinned_version_is_asked_for_by_its_step(house: House):
    answer = (await house.chat(model="policy@3")).json()
    assert house.app.requests[0][1]["model"] == "engine-3"
    assert (answer["model"], answer["choices"][0]["policy_version"]) == ("policy@3", 3)


@pytest.mark.parametrize("model", ["policy@5", "engine-4", "SmolLM2", None, 4])
async def test_a_version_that_is_not_held_is_refused_with_those_that_are(house: House, model: Any):
    response = await house.chat(model=model)
    assert response.status_code == 404
    error = error_of(response)
    assert "held: policy@3, policy@4" in error["message"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert not house.app.requests


async def test_a_version_is_leased_exactly_while_it_answers(house: House):
    house.app.release.clear()
    answering = asyncio.create_task(house.chat(model="policy@3"))
    await house.app.asked.wait()
    assert house.table.removable() == []
    house.app.release.set()
    await answering
    assert house.table.removable() == [3]


async def test_requests_of_one_trajectory_stay_on_its_version(house: House):
    header = {"x-art-trajectory-id": "t1"}
    request = {"model": "policy", "messages": []}
    assert (await house.client.post(CHAT, json=request, headers=header)).json()["model"] == "policy@4"
    house.table.add(5, "hash5")
    house.table.make_current(5)
    assert (await house.client.post(CHAT, json=request, headers=header)).json()["model"] == "policy@4"
    assert (await house.chat()).json()["model"] == "policy@5"
    assert 4 not in house.table.removable()


async def test_with_merged_weights_a_trajectory_is_answered_by_the_current_version():
    house = House(pins=lambda: False)
    response = await house.client.post(CHAT, json={"model": "policy"}, headers={"x-art-trajectory-id": "t1"})
    assert response.status_code == 200
    assert house.table.status()["versions"][4]["holders"] == []


@pytest.mark.parametrize("value", ["", "a b", "x" * 201, "\xff", "a/b"])
async def test_a_trajectory_id_is_short_visible_ascii(house: House, value: str):
    response = await house.client.post(
        CHAT, json={"model": "policy"}, headers=[(b"x-art-trajectory-id", value.encode("latin-1"))]
    )
    assert response.status_code == 400


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_the_engines_errors_keep_status_and_text(house: House, status: int):
    house.app.status, house.app.answer = status, {"error": {"message": "too long", "code": status}}
    response = await house.chat()
    assert (response.status_code, response.json()) == (status, house.app.answer)
    assert house.table.requests == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 9_000])
async def test_a_body_that_is_no_object_is_refused(house: House, body: bytes):
    response = await house.client.post(CHAT, content=body)
    assert response.status_code == 400
    error_of(response)
    assert not house.app.requests


async def test_a_body_above_the_limit_is_refused_announced_or_not(house: House):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    for content in (b"x" * 10_001, parts()):
        response = await house.client.post(CHAT, content=content)
        assert response.status_code == 413
        error_of(response)


async def test_a_sender_that_is_too_slow_is_cut_off():
    house = House(body_timeout_s=0.05)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    response = await house.client.post(CHAT, content=parts())
    assert response.status_code == 408


async def test_an_answer_that_takes_too_long_is_cut_off_and_gives_its_version_back():
    house = House(request_timeout_s=0.05)
    house.app.release.clear()
    response = await house.chat()
    assert response.status_code == 504
    assert "request_timeout_s" in error_of(response)["message"]
    assert house.table.requests == 0


async def test_more_requests_than_allowed_are_told_to_come_back():
    house = House(max_requests=1)
    house.app.release.clear()
    first = asyncio.create_task(house.chat())
    await house.app.asked.wait()
    assert (await house.chat()).status_code == 503
    house.app.release.set()
    assert (await first).status_code == 200
    assert (await house.chat()).status_code == 200


async def test_a_dead_engine_is_told_in_its_last_words_before_and_during_a_request(house: House):
    house.app.status, house.app.answer = 500, {"error": {"message": "EngineCore encountered an issue"}}
    house.app.release.clear()
    running = asyncio.create_task(house.chat())
    await house.app.asked.wait()
    house.failure = "killed by signal 9"
    late = await house.chat()
    house.app.release.set()
    for response in (await running, late):
        assert response.status_code == 503
        assert "killed by signal 9" in error_of(response)["message"]


async def test_a_client_that_leaves_reaches_the_engine_and_gives_its_version_back(house: House):
    house.app.release.clear()
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": b'{"model": "policy"}', "more_body": False}]
    sent = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"authorization", b"Bearer secret")]}
    answering = asyncio.create_task(house.front(scope, receive, send))
    await house.app.asked.wait()
    assert house.table.requests == 1
    gone.set()
    await answering
    assert house.app.disconnected
    assert house.table.requests == 0


async def test_a_stream_passes_event_by_event_with_its_labels(house: House):
    def event(**choice: Any) -> bytes:
        return b"data: " + json.dumps({"model": "internal", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n"

    whole = event(delta={"content": "a"}, token_ids=[5]) + event(delta={}, token_ids=[6], finish_reason="stop")
    # Cut where no event ends: whatever the engine sends together need not be one event.
    house.app.events = [
        whole[:25],
        whole[25:70],
        whole[70:],
        b': ping\n\ndata: {"error": {"code": 1}}\n\n',
        b"data: [DONE]\n\n",
    ]
    response = await house.chat(stream=True)
    lines = [line for line in response.text.split("\n\n") if line]
    first, last = json.loads(lines[0][6:]), json.loads(lines[1][6:])
    assert first["model"] == last["model"] == "policy@4"
    assert first["choices"][0]["policy_version"] == 4
    assert last["choices"][0]["all_token_ids"] == [5, 6]
    assert lines[2:] == [": ping", 'data: {"error": {"code": 1}}', "data: [DONE]"]
    assert house.table.requests == 0


async def test_a_text_completion_is_labelled_too(house: House):
    house.app.answer = {
        "model": "internal",
        "choices": [{"index": 0, "text": "a", "prompt_token_ids": [1], "token_ids": [5]}],
    }
    response = await house.client.post("/v1/completions", json={"model": "policy", "prompt": "a", "top_p": 0.5})
    choice = response.json()["choices"][0]
    assert (choice["policy_version"], choice["prompt_token_ids"]) == (4, [1])
    assert choice["sampling_restrictions"] == {"top_p": 0.5}


async def test_a_websocket_is_closed(house: House):
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    await house.front({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_field_that_would_harm_the_engine_is_refused_with_the_reason():
    house = House(refused_fields=lambda: {"prompt_logprobs": "the engine dies of it"})
    assert (await house.chat(prompt_logprobs=None)).status_code == 200
    response = await house.chat(prompt_logprobs=0)
    assert response.status_code == 400
    assert "dies of it" in error_of(response)["message"]


async def recorded(house: House, trajectory: str) -> list[dict[str, Any]]:
    response = await house.client.get(f"/v1/trajectories/{trajectory}")
    assert response.status_code == 200
    return response.json()["exchanges"]


async def test_a_trajectory_named_by_header_or_by_path_finds_its_exchanges(house: House):
    request = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
    await house.client.post(CHAT, json=request, headers={"x-art-trajectory-id": "t1"})
    await house.client.post(f"/trajectories/t1{CHAT}", json=request)
    await house.client.post(f"/trajectories/t2{CHAT}", json={**request, "messages": []})
    await house.chat()
    assert [path for path, _ in house.app.requests] == [CHAT] * 4
    first, second = await recorded(house, "t1")
    assert first == second
    assert first["messages"] == request["messages"]
    assert first["tools"] == request["tools"]
    assert first["choice"]["policy_version"] == 4
    assert first["choice"]["prompt_token_ids"] == [1, 2]
    assert len(await recorded(house, "t2")) == 1


async def test_a_forgotten_trajectory_is_gone_and_gives_its_version_back(house: House):
    await house.client.post(f"/trajectories/t1{CHAT}", json={"model": "policy@3", "messages": []})
    assert house.table.removable() == []
    assert (await house.client.delete("/v1/trajectories/t1")).json() == {"id": "t1", "deleted": True}
    assert house.table.removable() == [3]
    assert (await house.client.get("/v1/trajectories/t1")).status_code == 404
    assert (await house.client.delete("/v1/trajectories/t1")).json() == {"id": "t1", "deleted": False}


async def test_recordings_need_the_key(house: House):
    for path in ("/v1/trajectories/t1", f"/trajectories/t1{CHAT}"):
        assert (await house.client_with({}).get(path)).status_code == 401


async def test_a_trajectory_prefix_opens_no_other_route(house: House):
    for path in ("/trajectories/t1/health", "/trajectories/t1/sleep", "/trajectories/t1/v1/trajectories/t1",
                 "/trajectories/a/b/v1/models", "/trajectories//v1/models"):  # fmt: skip
        assert (await house.client.get(path)).status_code == 404
    assert not house.app.requests


async def test_path_and_header_must_name_one_trajectory(house: House):
    response = await house.client.post(
        f"/trajectories/t1{CHAT}", json={"model": "policy"}, headers={"x-art-trajectory-id": "t2"}
    )
    assert response.status_code == 400


async def test_an_error_is_not_recorded(house: House):
    house.app.status, house.app.answer = 400, {"error": {"message": "too long"}}
    await house.client.post(f"/trajectories/t1{CHAT}", json={"model": "policy", "messages": []})
    assert (await house.client.get("/v1/trajectories/t1")).status_code == 404


async def test_a_stream_that_cannot_be_recorded_still_reaches_its_client(house: House):
    house.app.events = [b'data: {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 5}]}}]}\n\n'] * 2
    response = await house.client.post(f"/trajectories/t1{CHAT}", json={"model": "policy", "stream": True})
    assert response.status_code == 200
    assert response.text.count("data: {") == 2


async def test_two_keys_are_no_key(house: House):
    headers = [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer wrong")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(house.front), base_url="http://front") as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_a_body_that_is_announced_too_large_is_not_even_read(house: House):
    async def receive() -> Any:
        raise AssertionError("the body was read")

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer secret"), (b"content-length", b"10001")]
    await house.front({"type": "http", "method": "POST", "path": CHAT, "headers": headers}, receive, send)
    assert sent[0]["status"] == 413
