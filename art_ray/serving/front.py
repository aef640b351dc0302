"""The front: everything a client reaches of the served policy, behind one URL.

A pure ASGI application around another one, which passes requests to the replicas. It checks the key on every route
(`/health` alone answers without it, with one word), lets nothing through but the routes of its list, bounds the body,
resolves the model's name to a version that is held, keeps that version leased while it answers, and writes into every
answer who sampled it. What it does not know it passes on unchanged.

An agent that names its trajectory, by the header `X-Art-Trajectory-Id` or by a base URL that ends in
`/trajectories/{id}/v1`, stays on the version it began with (while several are held), and its exchanges are kept for
`GET /v1/trajectories/{id}` until `DELETE` of the same.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from art_ray.errors import VersionNotServedError
from art_ray.serving.answer import Labelling
from art_ray.serving.asgi import (
    Application,
    Receive,
    RefusedError,
    Scope,
    Send,
    Sending,
    header_of,
    parsed_object,
    read_body,
    replay,
    send_error,
    send_json,
)
from art_ray.serving.dispatch import TRAJECTORY
from art_ray.serving.door import ROUTES, has_key
from art_ray.serving.gate import BusyError, VersionGate
from art_ray.serving.labels import prepare_request
from art_ray.serving.recording import Exchange, Recorder

__all__ = ["TRAJECTORY_HEADER", "Front", "FrontLimits"]

TRAJECTORY_HEADER = b"x-art-trajectory-id"
_CHAT = "/v1/chat/completions"
_OF_NO_VERSION = {"/tokenize", "/detokenize"}
_ROUTES = {"/health": "GET", "/v1/models": "GET", **ROUTES}
_ID = r"[!-.0-~]{1,200}"  # visible ASCII without a slash
_TRAJECTORY = re.compile(rf"/v1/trajectories/({_ID})")
_WITHIN_TRAJECTORY = re.compile(rf"/trajectories/({_ID})(/v1/.*)")
_REPLACED = {b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding", b"authorization"}


@dataclass(frozen=True)
class FrontLimits:
    """What one request may cost."""

    body_bytes: int
    request_timeout_s: float
    pin_ttl_s: float
    body_timeout_s: float = 60.0
    """Seconds that a client has to send its body."""


class Front:
    """The ASGI application that clients talk to.

    Args:
        app: passes a request on to an engine.
        gate: knows the versions and counts the requests on them.
        engine_model: the name under which the engine knows a version.
        api_key: what clients must send as bearer token.
        limits: bounds of one request.
        failure: returns why nobody will answer (an engine's last words), or None while somebody may.
        on_left: awaited when a version may have become free, so that it can be unloaded.
        refused_fields: returns the fields of a request that would harm an engine, each with the reason; None and False
            pass.
        pins: returns whether a trajectory's first version is kept for it; if not, the current one answers each request.
        recorder: keeps the exchanges of named trajectories.
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
        refused_fields: Callable[[], Mapping[str, str]] = dict,
        pins: Callable[[], bool] = lambda: True,
        recorder: Recorder | None = None,
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
        self._recorder = recorder or Recorder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one connection, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            sending = Sending(send)
            try:
                await self._answer(scope, receive, sending)
            except RefusedError as refusal:
                if not sending.started:
                    await send_error(send, refusal)

    async def _answer(self, scope: Scope, receive: Receive, send: Sending) -> None:
        if scope["path"] == "/health" and scope["method"] == "GET":
            return await self._health(scope, send)
        if not has_key(scope, self._authorization):
            raise RefusedError(401, "invalid_request_error", "the API key is missing or wrong", code="invalid_api_key")
        if match := _TRAJECTORY.fullmatch(scope["path"]):
            return await self._recorded(scope["method"], match[1], send)
        scope, trajectory = _located(scope)
        path, method = scope["path"], scope["method"]
        if path not in _ROUTES:
            raise RefusedError.bad_request(f"no route {path!r:.120}; there are {sorted(_ROUTES)}", status=404)
        if method != _ROUTES[path]:
            raise RefusedError.bad_request(f"{path} takes {_ROUTES[path]}, not {method!r:.20}", status=405)
        if path == "/v1/models":
            return await send_json(send, 200, self._models())
        if (failure := self._failure()) is not None:
            raise RefusedError(503, "server_error", f"no engine is left. Last words:\n{failure}")
        if method == "GET":
            return await self._app(scope, receive, send)
        body = await read_body(scope, receive, self._limits.body_bytes, self._limits.body_timeout_s)
        if path in _OF_NO_VERSION:
            asked = {name: value for name, value in parsed_object(body).items() if name != "model"}
            return await self._app(scope, replay(json.dumps(asked).encode(), receive), send)
        return await self._generate(scope, receive, send, parsed_object(body), trajectory)

    async def _health(self, scope: Scope, send: Sending) -> None:
        """Tells anyone whether the engine can answer; why it cannot, those who have the key."""
        failure = self._failure()
        if failure is not None and not has_key(scope, self._authorization):
            failure = "failed"  # what the engine wrote last may hold a prompt, a path or a secret
        await send_json(send, 200 if failure is None else 503, {"status": failure or "ok"})

    def _models(self) -> dict[str, Any]:
        table = self._gate.table
        cards = [
            {"id": table.served_name(step), "object": "model", "created": 0, "owned_by": "art_ray"}
            for step in table.steps
        ]
        return {"object": "list", "data": cards}

    async def _recorded(self, method: str, trajectory: str, send: Send) -> None:
        exchanges = self._recorder.exchanges(trajectory)
        if method == "DELETE":
            self._recorder.forget(trajectory)
            self._gate.table.unpin(trajectory)
            if self._on_left is not None:
                await self._on_left()
            return await send_json(send, 200, {"id": trajectory, "deleted": exchanges is not None})
        if method != "GET":
            raise RefusedError.bad_request(f"a trajectory takes GET and DELETE, not {method!r:.20}", status=405)
        if exchanges is None:
            raise RefusedError.bad_request(
                f"nothing is recorded for trajectory {trajectory!r}"
                f" ({self._recorder.dropped} trajectories were dropped for lack of room or time)",
                status=404,
            )
        content = {"id": trajectory, "exchanges": [exchange.as_json() for exchange in exchanges]}
        return await send_json(send, 200, content)

    async def _generate(
        self, scope: Scope, receive: Receive, send: Sending, request: dict[str, Any], trajectory: str | None
    ) -> None:
        for name, reason in self._refused_fields().items():
            if (value := request.get(name)) is not None and value is not False:  # 0 asks for something
                raise RefusedError.bad_request(f"{name!r} is refused: {reason}", name)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                step = await self._enter(request.get("model"), trajectory if self._pins() else None)
                try:
                    await self._forward(scope, receive, send, request, step, trajectory)
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
        self,
        scope: Scope,
        receive: Receive,
        send: Sending,
        request: dict[str, Any],
        step: int,
        trajectory: str | None,
    ) -> None:
        is_chat = scope["path"] == _CHAT
        body = json.dumps(prepare_request(request, self._engine_model(step), is_chat)).encode()
        headers = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
        headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]

        def record(choices: list[dict[str, Any]], size_bytes: int) -> None:
            assert trajectory is not None
            exchanges = [Exchange(request.get("messages") or [], request.get("tools"), choice) for choice in choices]
            self._recorder.record(trajectory, exchanges, size_bytes + len(body))

        labelling = Labelling(
            send,
            request,
            step,
            self._gate.table.served_name(step),
            self._failure,
            record if is_chat and trajectory is not None else None,
        )
        await self._app({**scope, "headers": headers, TRAJECTORY: trajectory}, replay(body, receive), labelling)
        labelling.finish()


def _located(scope: Scope) -> tuple[Scope, str | None]:
    """Returns the scope with the trajectory taken out of its path, and the trajectory's id by path or header."""
    named = header_of(scope, TRAJECTORY_HEADER)
    by_header = None if named is None else named.decode("latin-1")
    if by_header is not None and not re.fullmatch(_ID, by_header):
        raise RefusedError.bad_request("a trajectory's id is 1 to 200 visible ASCII characters without a slash")
    match = _WITHIN_TRAJECTORY.fullmatch(scope["path"])
    if match is None:
        return scope, by_header
    if by_header not in (None, match[1]):
        raise RefusedError.bad_request(f"the path names trajectory {match[1]!r}, the header {by_header!r}")
    return {**scope, "path": match[2], "raw_path": match[2].encode()}, match[1]
