"""The engine's answer on its way to the client: labelled, and recorded where its trajectory is known."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from art_ray.serving.asgi import Message, RefusedError, Send
from art_ray.serving.labels import StreamLabels, label_answer
from art_ray.serving.recording import StreamedAnswer

__all__ = ["Labelling"]

logger = logging.getLogger(__name__)


class Labelling:
    """Takes the engine's answer, message by message, and sends it on with its labels.

    Args:
        send: where the answer goes.
        request: what the client asked.
        step: the version that answers.
        served_name: its public name.
        failure: returns why the engine cannot answer, or None while it can.
        record: called with the complete choices and the size of the answer in bytes; None: nothing is recorded.
    """

    def __init__(
        self,
        send: Send,
        request: dict[str, Any],
        step: int,
        served_name: str,
        failure: Callable[[], str | None],
        record: Callable[[list[dict[str, Any]], int], None] | None = None,
    ) -> None:
        self._send = send
        self._request, self._step, self._served_name = request, step, served_name
        self._failure, self._record = failure, record
        self._start: Message | None = None
        self._stream: StreamLabels | None = None
        self._streamed = StreamedAnswer()
        self._buffer = bytearray()
        self._size_bytes = 0

    async def __call__(self, message: Message) -> None:
        """Takes one message of the engine."""
        if message["type"] == "http.response.start":
            self._start = message
            if _content_type(message).startswith(b"text/event-stream"):
                self._stream = StreamLabels(self._request, self._step, self._served_name)
                await self._send(message)
        elif message["type"] == "http.response.body":
            body, more = message.get("body", b""), bool(message.get("more_body"))
            self._buffer += body
            self._size_bytes += len(body)
            if self._stream is not None:
                await self._send({"type": "http.response.body", "body": self._events(not more), "more_body": more})
            elif not more:
                await self._send_whole()
        else:
            await self._send(message)

    def finish(self) -> None:
        """Ends the answer; refuses in the engine's place where it said nothing, as when the client has left."""
        if self._start is None:
            raise RefusedError(503, "server_error", self._failure() or "the engine gave no answer")
        if self._stream is not None and self._record is not None and (choices := self._streamed.choices()):
            self._record(choices, self._size_bytes)

    async def _send_whole(self) -> None:
        assert self._start is not None
        body, status = bytes(self._buffer), self._start["status"]
        # The engine answers a client that has left with `null`.
        if status == 200 and isinstance(said := json.loads(body), dict):
            answer = label_answer(said, self._request, self._step, self._served_name)
            if self._record is not None:
                self._record(answer["choices"], self._size_bytes)
            body = json.dumps(answer, ensure_ascii=False).encode()
        elif status >= 500 and (failure := self._failure()) is not None:
            raise RefusedError(503, "server_error", f"the engine died. Its last words:\n{failure}")
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _events(self, last: bool) -> bytes:
        """Returns the complete events of the buffer, labelled, and keeps an incomplete one for later."""
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
        chunk = self._stream.label(chunk)
        if self._record is not None:
            try:
                self._streamed.add(chunk)
            except Exception as error:  # the client gets its stream, whatever the recording makes of it
                logger.warning("a streamed answer cannot be recorded: %s: %s", type(error).__name__, error)
                self._record = None
        return b"data: " + json.dumps(chunk, ensure_ascii=False).encode()


def _content_type(start: Message) -> bytes:
    return next((bytes(value) for name, value in start["headers"] if name.lower() == b"content-type"), b"")
