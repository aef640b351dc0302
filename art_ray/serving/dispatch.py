"""Passes each request to a replica, and to another one if that replica dies.

An ASGI application in the engine's place, beneath the front: what arrives here is allowed, names a version that is
held, and asks for token ids. Requests wait here, in order and with a deadline, while every replica has as much to do as
it can take. An answer that is not streamed is passed on once it is complete, so that its request can be repeated from
its beginning when a replica is lost; one that is streamed goes on after the last token that came through.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art_ray.serving.asgi import Receive, RefusedError, Scope, Send
from art_ray.serving.door import LOST_STATUS
from art_ray.serving.resumption import CannotResumeError, Stream
from art_ray.serving.routing import Rotation

if TYPE_CHECKING:
    import aiohttp

__all__ = ["TRAJECTORY", "Dispatch", "ReplicaLostError"]

TRAJECTORY = "art_ray.trajectory"
"""Key of the ASGI scope under which the front says whose request it is."""
ATTEMPTS = 3
"""Replicas that one request may see die: it may be what kills them."""
CONNECT_TIMEOUT_S = 10.0
_HOP_BY_HOP = {b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"date", b"server"}
_NOT_SENT_ON = {b"host", b"content-length", b"transfer-encoding", b"connection", b"authorization", b"accept-encoding"}


class ReplicaLostError(Exception):
    """The replica that was asked died, or is taken to be dead."""


@dataclass
class _Reached:
    """How a replica in rotation is reached, and how those that ask it learn that it is lost."""

    url: str
    max_model_len: int
    lost: asyncio.Future[str]


class Dispatch:
    """The replicas' common place in front of them. Everything here runs in one event loop.

    Args:
        rotation: who may be asked, and how much each has to do.
        api_key: what the replicas' doors want.
        queue_timeout_s: how long a request may wait for its turn.
        on_lost: called with name and reason when an answer shows that a replica is lost.
        hopeless: returns why no replica will come back, or None while one may.
        resumes: whether streams go on elsewhere; not where the engine makes other fields than text of the tokens.
    """

    def __init__(
        self,
        rotation: Rotation,
        *,
        api_key: str,
        queue_timeout_s: float,
        on_lost: Callable[[str, str], None],
        hopeless: Callable[[], str | None],
        resumes: bool = True,
    ) -> None:
        self._rotation = rotation
        self._api_key = api_key
        self._queue_timeout_s = queue_timeout_s
        self._on_lost = on_lost
        self._hopeless = hopeless
        self._resumes = resumes
        self._reached: dict[str, _Reached] = {}
        self._waiting: deque[tuple[asyncio.Future[str], str | None]] = deque()
        self._last_loss = ""
        self._session: aiohttp.ClientSession | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests that each replica in rotation is answering."""
        return self._rotation.replicas

    def add(self, replica: str, url: str, max_model_len: int) -> None:
        """Takes a replica into rotation; `url` is its address without a path."""
        self._reached[replica] = _Reached(url, max_model_len, asyncio.get_running_loop().create_future())
        self._rotation.add(replica)
        self._admit()

    def remove(self, replica: str, reason: str) -> None:
        """Takes a replica out of rotation. Requests that it is answering are repeated elsewhere."""
        self._rotation.remove(replica)
        reached = self._reached.pop(replica, None)
        if reached is not None:
            self._last_loss = f"{replica}: {reason}"
            reached.lost.set_result(reason)
        self.notice()

    def notice(self) -> None:
        """Ends the waiting of all requests once no replica will come back."""
        if (why := self._hopeless()) is not None:
            while self._waiting:
                turn, _ = self._waiting.popleft()
                if not turn.done():
                    turn.set_exception(_hopeless(why))

    async def close(self) -> None:
        """Closes the connections to the replicas."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request of the front."""
        body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
        stream = Stream(scope["path"], body)
        try:
            await self._answered(scope, receive, send, stream)
        except CannotResumeError as refusal:
            error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
            event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event})

    async def _answered(self, scope: Scope, receive: Receive, send: Send, stream: Stream) -> None:
        for _ in range(ATTEMPTS):
            async with self._turn(scope.get(TRAJECTORY)) as replica:
                reached = self._reached[replica]
                try:
                    path, asked = stream.request(reached.max_model_len)
                    asking = self._ask(reached, path, scope, asked, send, stream)
                    return await _unless_left_or_lost(asking, receive, reached.lost)
                except ReplicaLostError as lost:
                    reason = str(lost)
            self._on_lost(replica, reason)
            if stream.is_complete:
                return await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            if not self._resumes:
                stream.refuse("the engine parses reasoning out of its tokens")
        if stream.is_started:
            raise CannotResumeError(f"{ATTEMPTS} replicas were lost")
        raise RefusedError(503, "server_error", f"{ATTEMPTS} replicas died while they answered; the last: {reason}")

    async def _ask(self, reached: _Reached, path: str, scope: Scope, body: bytes, send: Send, stream: Stream) -> None:
        import aiohttp

        headers = [
            (name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name not in _NOT_SENT_ON
        ]
        headers.append(("Authorization", f"Bearer {self._api_key}"))
        try:
            async with self._connected().request(
                scope["method"], reached.url + path, data=body or None, headers=headers
            ) as answer:
                if answer.status == LOST_STATUS:
                    raise ReplicaLostError((await answer.json())["error"]["message"])
                if answer.content_type == "text/event-stream":
                    await _passed_on(answer, send, stream)
                else:
                    content = await answer.read()
                    if stream.is_started:
                        raise CannotResumeError(content.decode(errors="replace"))
                    await _started(answer, send)
                    await send({"type": "http.response.body", "body": content})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error

    def _connected(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False, trust_env=False
            )
        return self._session

    @asynccontextmanager
    async def _turn(self, trajectory: str | None) -> AsyncIterator[str]:
        replica = await self._next(trajectory)
        try:
            yield replica
        finally:
            self._rotation.end(replica)
            self._admit()

    async def _next(self, trajectory: str | None) -> str:
        """Waits for a replica with room; the request counts on it when this returns."""
        if not self._waiting and (replica := self._rotation.choose(trajectory)) is not None:
            self._rotation.begin(replica, trajectory)
            return replica
        if (why := self._hopeless()) is not None:
            raise _hopeless(why)
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, trajectory))
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it came with the cancellation
                self._rotation.end(turn.result())
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not turn)
            self._admit()
            if isinstance(error, TimeoutError):
                raise self._too_late() from None
            raise

    def _admit(self) -> None:
        """Gives those who wait their turns, in order, as far as there is room."""
        while self._waiting:
            turn, trajectory = self._waiting[0]
            if not turn.done():
                replica = self._rotation.choose(trajectory)
                if replica is None:
                    return
                self._rotation.begin(replica, trajectory)
                turn.set_result(replica)
            self._waiting.popleft()

    def _too_late(self) -> RefusedError:
        busy = self._rotation.replicas
        found = f"requests in flight: {busy}" if busy else f"no replica is in rotation; lost last was {self._last_loss}"
        return RefusedError(
            503, "server_error", f"no replica had room within {self._queue_timeout_s:g} s (queue_timeout_s); {found}"
        )


def _hopeless(why: str) -> RefusedError:
    return RefusedError(503, "server_error", f"no replica is left, and none will come back:\n{why}")


async def _unless_left_or_lost(asking: Coroutine[Any, Any, None], receive: Receive, lost: asyncio.Future[str]) -> None:
    """Awaits `asking`; gives it up when the client leaves, and raises when the replica is taken to be dead."""
    work = asyncio.ensure_future(asking)
    leaving = asyncio.ensure_future(receive())
    ends: set[asyncio.Future[Any]] = {work, leaving, lost}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if lost.done():
            raise ReplicaLostError(lost.result())
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.wait({work, leaving})
    return None


async def _passed_on(answer: aiohttp.ClientResponse, send: Send, stream: Stream) -> None:
    if not stream.is_started:
        stream.is_started = True
        await _started(answer, send)
    async for part in answer.content.iter_any():
        if events := stream.passed(part):
            await send({"type": "http.response.body", "body": events, "more_body": True})
    await send({"type": "http.response.body", "body": stream.end()})


async def _started(answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _HOP_BY_HOP]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
