"""The few pieces of HTTP that the front needs: whole bodies in, JSON and errors of OpenAI's shape out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = [
    "Application",
    "Message",
    "Receive",
    "RefusedError",
    "Scope",
    "Send",
    "Sending",
    "header_of",
    "parsed_object",
    "read_body",
    "replay",
    "send_error",
    "send_json",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class RefusedError(Exception):
    """A request that is answered with an error of OpenAI's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None, code: Any = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param
        self.code = status if code is None else code

    @classmethod
    def bad_request(cls, message: str, param: str | None = None, status: int = 400) -> RefusedError:
        """Returns the refusal of a request that cannot be right."""
        return cls(status, "invalid_request_error", message, param)


class Sending:
    """Passes messages on and remembers whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        """Sends one message."""
        self.started = True
        await self._send(message)


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """Returns the whole body of a request.

    Raises:
        RefusedError: it is too large, does not arrive in time, or its sender left.
    """
    too_large = RefusedError.bad_request(f"the body is larger than {limit_bytes} bytes", status=413)
    length = header_of(scope, b"content-length")
    if length is not None and (not length.isdigit() or int(length) > limit_bytes):
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError.bad_request("the client left before its request was read")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit_bytes:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise RefusedError.bad_request(f"the body did not arrive within {timeout_s:g} s", status=408) from None


def parsed_object(body: bytes) -> dict[str, Any]:
    """Returns a body's JSON object, or raises `RefusedError`."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError.bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise RefusedError.bad_request(f"the body must be an object, not {type(request).__name__}")
    return request


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header of that name."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), None)


def replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the whole body first and then waits for the client to leave."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Answers with `content`."""
    body = json.dumps(content, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, refusal: RefusedError) -> None:
    """Answers with a refusal, as OpenAI's clients read it."""
    error = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": refusal.code}
    await send_json(send, refusal.status, {"error": error})
