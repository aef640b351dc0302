"""`StubReplica`, a replica without an engine: a real server on a port that answers by a rule, and dies when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from art_ray.errors import EngineError
from art_ray.serving.adapter import LoadedVersion
from art_ray.serving.door import LOST_STATUS
from art_ray.serving.listener import Listener
from art_ray.serving.spec import Endpoint

PROMPT = [11, 12, 13]


def next_token(prefix: Sequence[int]) -> int:
    """The only token that may follow `prefix`."""
    return (sum(prefix) * 31 + len(prefix) * 7) % 997


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class StubReplica:
    """A `ReplicaPort`. `on_token(n)` is awaited before the n-th token of an answer."""

    def __init__(self, name: str, weights: str = "adapter") -> None:
        self.name, self.weights = name, weights
        self.held: set[int] = set()
        self.is_dead = False
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.cancelled = 0
        self.dies_after_head = False
        self.calls: list[Any] = []
        self.on_token: Callable[[int], Any] | None = None
        self.on_start: Callable[[], None] = lambda: None
        self.on_load: Callable[[int], Any] | None = None
        self._listener = Listener(self._app, "127.0.0.1")

    def kill(self) -> None:
        self.is_dead = True

    async def start(self) -> Endpoint:
        self.on_start()
        url = await self._listener.start()
        return Endpoint(url, 0, (), self.weights, max_model_len=100)

    async def stage(self, version: Any) -> None:
        self._alive()
        self.calls.append(("stage", version.step))

    async def load(self, version: Any) -> LoadedVersion:
        self._alive()
        self.calls.append(("load", version.step, self.in_flight))
        if self.on_load is not None:
            await self.on_load(version.step)
        self._alive()
        self.held = self.held | {version.step} if self.weights == "adapter" else {version.step}
        return LoadedVersion(version.step, version.sha256, 0.1, 0.0)

    async def unload(self, step: int) -> None:
        self._alive()
        self.held.discard(step)

    async def probe(self) -> None:
        self._alive()

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def end(self) -> None:
        self.is_dead = True
        await self._listener.stop()

    def _alive(self) -> None:
        if self.is_dead:
            raise EngineError(f"{self.name} said: out of memory")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body)
        self.requests.append(request)
        self.in_flight += 1
        try:
            await self._answer(scope["path"], request, send)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, path: str, request: dict[str, Any], send: Any) -> None:
        if self.is_dead:
            return await _send(send, LOST_STATUS, {"error": {"message": f"{self.name} said: out of memory"}})
        assert int(request["model"].split("@")[1]) in self.held, "the front asks for what is held"
        is_chat = path.endswith("/chat/completions")
        prompt = PROMPT if is_chat else request["prompt"]
        tokens = answer_to(prompt, request["max_tokens"])
        if request.get("stream"):
            return await self._stream(is_chat, prompt, tokens, send)
        try:
            for number in range(len(tokens)):
                await self._before(number)
        except ConnectionAbortedError:
            return await _send(send, LOST_STATUS, {"error": {"message": f"{self.name} said: out of memory"}})
        content = [_logprob(token) for token in tokens]
        choice = {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
        choice["message"] = {"role": "assistant", "content": "".join(map(_text, tokens))}
        await _send(send, 200, {"id": "x", "prompt_token_ids": prompt, "choices": [choice]})
        return None

    async def _stream(self, is_chat: bool, prompt: list[int], tokens: list[int], send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.dies_after_head:
            self.kill()
            raise ConnectionAbortedError("the stub died before the first event")
        if is_chat:
            start = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await _event(send, {"id": f"of-{self.name}", "prompt_token_ids": prompt, "choices": [start]})
        for number, token in enumerate(tokens):
            await self._before(number)
            last = "length" if number == len(tokens) - 1 else None
            choice: dict[str, Any] = {"index": 0, "token_ids": [token], "finish_reason": last}
            if is_chat:
                choice |= {"delta": {"content": _text(token)}, "logprobs": {"content": [_logprob(token)]}}
            else:
                logprobs = {"tokens": [_text(token)], "token_logprobs": [-token / 1000], "top_logprobs": [{}]}
                choice |= {"text": _text(token), "logprobs": logprobs}
            await _event(send, {"id": f"of-{self.name}", "choices": [choice]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _before(self, number: int) -> None:
        if self.on_token is not None:
            await self.on_token(number)
        else:
            await asyncio.sleep(0)
        if self.is_dead:
            raise ConnectionAbortedError("the stub died in the middle of an answer")


def _text(token: int) -> str:
    return f"<{token}>"


def _logprob(token: int) -> dict[str, Any]:
    return {"token": _text(token), "logprob": -token / 1000, "bytes": [], "top_logprobs": []}


async def _send(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _event(send: Any, chunk: Any) -> None:
    body = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
