"""The door of one replica: the front comes in, nobody else does, and a dead engine breaks off without an apology.

A pure ASGI application around the engine's own. It checks the key on every route and lets nothing through but what the
front asks for. Who may ask for which version, and what becomes of a request whose replica died, is the front's to say.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from art_ray.serving.asgi import Application, Message, Receive, RefusedError, Scope, Send, Sending, send_error

__all__ = ["LOST_STATUS", "ROUTES", "Door", "EngineDiedError", "has_key"]

ROUTES = {
    "/version": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
}
"""What is passed on to an engine, and how it is asked."""
LOST_STATUS = 521
"""Answered where the engine is dead and nothing was said yet: no status that an engine itself would use."""


class EngineDiedError(Exception):
    """Breaks off an answer in the middle: the server closes the connection, and the front notices."""


class Door:
    """The ASGI application that listens on a replica's port.

    Args:
        app: the engine's own OpenAI application.
        api_key: what the front sends as bearer token.
        failure: returns why the engine cannot answer, or None while it can.
    """

    def __init__(self, app: Application, *, api_key: str, failure: Callable[[], str | None]) -> None:
        self._app = app
        self._authorization = b"Bearer " + api_key.encode()
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        if not has_key(scope, self._authorization):
            refusal = RefusedError(
                401, "invalid_request_error", "the API key is missing or wrong", code="invalid_api_key"
            )
            return await send_error(send, refusal)
        if ROUTES.get(scope["path"]) != scope["method"]:
            return await send_error(send, RefusedError.bad_request("no such route", status=404))
        sending = Sending(send)
        try:
            if (failure := self._failure()) is not None:
                raise EngineDiedError(failure)
            await self._app(scope, receive, self._unless_dead(sending))
            if not sending.started:  # the engine says nothing to a client that has left, or when it dies
                raise EngineDiedError(self._failure() or "no answer")
        except EngineDiedError as died:
            if sending.started:
                raise
            await send_error(send, RefusedError(LOST_STATUS, "server_error", str(died)))

    def _unless_dead(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            # A dying engine ends its answers with an apology in the middle of a stream, or with a status of its own.
            is_apology = message["type"] == "http.response.start" and message["status"] >= 500
            if (is_apology or message["type"] == "http.response.body") and (failure := self._failure()) is not None:
                raise EngineDiedError(failure)
            await send(message)

        return sent


def has_key(scope: Scope, authorization: bytes) -> bool:
    """Returns whether the request carries exactly one key, and the right one. Takes the same time for any wrong one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], authorization)
