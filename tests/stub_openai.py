"""A stub of a server that speaks OpenAI's chat completions over HTTP: it says what a test tells it to say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = str | tuple[int, Any] | None
"""The text of an answer; or a status and a body; or None: none ever comes."""


@dataclass
class StubOpenAI:
    """Serves on a port of its own from `with` to the end of the block.

    Args:
        answers: called with each request's body; says what the answer is.
        tokens: what `usage` says of each answer.
        finish_reason: of each answer.
    """

    answers: Callable[[dict[str, Any]], Answer]
    tokens: int = 10
    finish_reason: str = "stop"
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, in the order in which they came."""
    keys: set[str] = field(default_factory=set)
    """What clients named as their key."""
    most_at_once: int = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._ending, self._lock, self._now = threading.Event(), threading.Lock(), 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()  # waits for the threads of its requests

    def answered(self, body: dict[str, Any], key: str) -> tuple[int, Any] | None:
        with self._lock:
            self.requests.append(body)
            self.keys.add(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.answers(body)
        finally:
            with self._lock:
                self._now -= 1
        if answer is None:
            self._ending.wait()
            return None
        return answer if isinstance(answer, tuple) else (200, self._completion(body, answer))

    def _completion(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        choice = {
            "index": 0,
            "finish_reason": self.finish_reason,
            "message": {"role": "assistant", "content": text},
        }
        return {
            "id": "stub",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": 0, "completion_tokens": self.tokens, "total_tokens": self.tokens},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubOpenAI

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = self.stub.answered(body, (self.headers["authorization"] or "").removeprefix("Bearer "))
        self.close_connection = True
        if answer is None:
            return
        status, value = answer
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
