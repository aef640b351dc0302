"""The front: everything a client reaches of an engine.

A pure ASGI application around another one. It checks the key on every route, lets nothing through but the routes of
its list, bounds the body, resolves the model's name to a version that is held, keeps that version leased while it
answers, and writes into every answer who sampled it. What it does not know it passes on unchanged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from art_ray.errors import VersionNotServedError
from art_ray.serving.gate import BusyError, VersionGate
from art_ray.serving.labels import StreamLabels, label_answer, prepare_request

__all__ = ["HOLDER_HEADER", "Front", "FrontLimits"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HOLDER_HEADER = b"x-art-trajectory-id"
"""Requests that carry the same value stay on one version, the one that answered the first of them."""
_CHAT = "/v1/chat/completions"
_GENERATING = {_CHAT, "/v1/completions"}
_UNCHANGED = {"/tokenize", "/detokenize", "/version"}
_ROUTES = {
    "/health": "GET",
    "/v1/models": "GET",
    "/version": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    _CHAT: "POST",
    "/v1/completions": "POST",
}


@dataclass(frozen=True)
class FrontLimits:
    """What one request may cost."""

    body_bytes: int
    request_timeout_s: float
    pin_ttl_s: float
    body_timeout_s: float = 60.0
    """Seconds that a client has to send its body."""


class RefusedError(Exception):
    """A request that is answered with an error of OpenAI's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None, code: Any = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param
        self.code = status if code is None else code


class Front:
    """The ASGI application that clients talk to.

    Args:
        app: the engine's own OpenAI application.
        gate: knows the versions and counts the requests on them.
        engine_model: the name under which the engine knows a version.
        api_key: what clients must send as bearer token.
        limits: bounds of one request.
        failure: returns why the engine cannot answer (its last words), or None while it can.
        on_left: awaited after each generating request, so that versions nobody needs any more can be unloaded.
        refused_fields: fields of a request that would harm the engine, each with the reason; None and False pass.
        pins: whether a holder's first version is kept for it; without, each request is answered by the current one.
    """

    def __init__(
        self,
        app: Application,
        gate: VersionGate,
        *,
        engine_model: Callable[[int], str],
        api_key: str,
        limits: FrontLimits,
        failure: Callable[[], str | None] = lambda: None,
        on_left: Callable[[], Awaitable[None]] | None = None,
        refused_fields: Mapping[str, str] = MappingProxyType({}),
        pins: bool = True,
    ) -> None:
        self._app = app
        self._gate = gate
        self._engine_model = engine_model
        self._authorization = b"Bearer " + api_key.encode()
        self._limits = limits
        self._failure = failure
        self._on_left = on_left
        self._refused_fields = refused_fields
        self._pins = pins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            sending = _Sending(send)
            try:
                await self._answer(scope, receive, sending)
            except RefusedError as refusal:
                if not sending.started:
                    await _send_json(send, refusal.status, _error(refusal))

    async def _answer(self, scope: Scope, receive: Receive, send: _Sending) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health" and method == "GET":
            failure = self._failure()
            return await _send_json(send, 200 if failure is None else 503, {"status": failure or "ok"})
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._authorization):
            raise RefusedError(401, "invalid_request_error", "the API key is missing or wrong", code="invalid_api_key")
        if path not in _ROUTES:
            raise RefusedError(404, "invalid_request_error", f"no route {path!r:.120}; there are {sorted(_ROUTES)}")
        if method != _ROUTES[path]:
            raise RefusedError(405, "invalid_request_error", f"{path} takes {_ROUTES[path]}, not {method!r:.20}")
        if path == "/v1/models":
            return await _send_json(send, 200, self._models())
        self._check_engine()
        if method == "GET":
            return await self._app(scope, receive, send)
        body = await self._body(scope, receive)
        if path in _UNCHANGED:
            return await self._app(scope, _replay(body, receive), send)
        return await self._generate(scope, receive, send, _parsed(body))

    def _check_engine(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise RefusedError(503, "server_error", f"the engine died. Its last words:\n{failure}")

    def _models(self) -> dict[str, Any]:
        table = self._gate.table
        cards = [
            {"id": table.served_name(step), "object": "model", "created": 0, "owned_by": "art_ray"}
            for step in table.steps
        ]
        return {"object": "list", "data": cards}

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        too_large = RefusedError(413, "invalid_request_error", f"the body is larger than {limit} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "invalid_request_error", "the client left before its request was read")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise RefusedError(
                408, "invalid_request_error", f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            ) from None

    async def _generate(self, scope: Scope, receive: Receive, send: _Sending, request: dict[str, Any]) -> None:
        for name, reason in self._refused_fields.items():
            if (value := request.get(name)) is not None and value is not False:  # 0 asks for something
                raise RefusedError(400, "invalid_request_error", f"{name!r} is refused: {reason}", name)
        holder = _holder(scope) if self._pins else None
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                step = await self._enter(request.get("model"), holder)
                try:
                    await self._forward(scope, receive, send, request, step)
                finally:
                    await self._leave(step)
        except TimeoutError:
            # A stream that has begun is simply cut: its client sees that the end is missing.
            raise RefusedError(
                504, "server_error", f"no answer within {self._limits.request_timeout_s:g} s (request_timeout_s)"
            ) from None

    async def _enter(self, model: object, holder: str | None) -> int:
        try:
            step = await self._gate.enter(model, holder)
        except VersionNotServedError as error:
            raise RefusedError(404, "invalid_request_error", str(error), "model", "model_not_found") from None
        except BusyError as error:
            raise RefusedError(503, "server_error", str(error)) from None
        if holder is not None:
            self._gate.table.pin(step, holder, self._limits.pin_ttl_s)
        return step

    async def _leave(self, step: int) -> None:
        await self._gate.leave(step)
        if self._on_left is not None:
            await self._on_left()

    async def _forward(
        self, scope: Scope, receive: Receive, send: _Sending, request: dict[str, Any], step: int
    ) -> None:
        body = json.dumps(prepare_request(request, self._engine_model(step), scope["path"] == _CHAT)).encode()
        headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        labelling = _Labelling(send, request, step, self._gate.table.served_name(step), self._failure)
        await self._app({**scope, "headers": headers}, _replay(body, receive), labelling)
        await labelling.finish()


_REPLACED = {b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding", b"authorization"}


class _Sending:
    """Passes messages on and remembers whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self._send(message)


class _Labelling:
    """Takes the engine's answer, message by message, and sends it on with its labels."""

    def __init__(
        self, send: Send, request: dict[str, Any], step: int, served_name: str, failure: Callable[[], str | None]
    ) -> None:
        self._send = send
        self._request, self._step, self._served_name = request, step, served_name
        self._failure = failure
        self._start: Message | None = None
        self._stream: StreamLabels | None = None
        self._buffer = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if _content_type(message).startswith(b"text/event-stream"):
                self._stream = StreamLabels(self._request, self._step, self._served_name)
                await self._send(message)
        elif message["type"] == "http.response.body":
            self._buffer += message.get("body", b"")
            more = bool(message.get("more_body"))
            if self._stream is not None:
                await self._send({"type": "http.response.body", "body": self._events(not more), "more_body": more})
            elif not more:
                await self._send_whole()
        else:
            await self._send(message)

    async def finish(self) -> None:
        """Answers in the engine's place where it ended without a word, as it does when the client has left."""
        if self._start is None:
            raise RefusedError(503, "server_error", self._failure() or "the engine gave no answer")

    async def _send_whole(self) -> None:
        assert self._start is not None
        body, status = bytes(self._buffer), self._start["status"]
        if status == 200:
            answer = label_answer(json.loads(body), self._request, self._step, self._served_name)
            body = json.dumps(answer, ensure_ascii=False).encode()
        elif status >= 500 and (failure := self._failure()) is not None:
            raise RefusedError(503, "server_error", f"the engine died. Its last words:\n{failure}")
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _events(self, last: bool) -> bytes:
        """Returns the complete events of the buffer, labelled, and keeps an incomplete one for later."""
        assert self._stream is not None
        events = []
        while (end := self._buffer.find(b"\n\n")) >= 0:
            events.append(self._event(bytes(self._buffer[:end])) + b"\n\n")
            del self._buffer[: end + 2]
        if last:
            events.append(bytes(self._buffer))
            self._buffer.clear()
        return b"".join(events)

    def _event(self, event: bytes) -> bytes:
        assert self._stream is not None
        if not event.startswith(b"data: {"):
            return event  # the end mark, or a comment
        chunk = json.loads(event[len(b"data: ") :])
        if "choices" not in chunk:
            return event  # an error that the engine reports inside the stream
        return b"data: " + json.dumps(self._stream.label(chunk), ensure_ascii=False).encode()


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request_error", f"the body is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise RefusedError(400, "invalid_request_error", f"the body must be an object, not {type(request).__name__}")
    return request


def _holder(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == HOLDER_HEADER:
            text: str = value.decode("latin-1")
            if not re.fullmatch(r"[!-~]{1,200}", text):
                raise RefusedError(
                    400, "invalid_request_error", f"{HOLDER_HEADER.decode()} takes 1 to 200 visible ASCII characters"
                )
            return text
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the whole body first and then waits for the client to leave."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _content_type(start: Message) -> bytes:
    return next((bytes(value) for name, value in start["headers"] if name.lower() == b"content-type"), b"")


def _error(refusal: RefusedError) -> dict[str, Any]:
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


async def _send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
