"""Lets a streamed answer go on after the last token that came through, when the replica that sampled it was lost.

The rest is asked for as a text completion of the prompt's ids followed by the ids that were sampled, on the same
version and under the same options, so that every token is a sample given exactly the tokens before it. Pure: bytes in,
bytes out.
"""

from __future__ import annotations

import json
from typing import Any

from art_ray.serving.asgi import RefusedError
from art_ray.serving.labels import restrictions_of

__all__ = ["CannotResumeError", "Stream"]

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_KEPT = (
    "model", "temperature", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "priority", "cache_salt", "user", "stream_options",
)  # fmt: skip
"""Options that mean the same for the rest of an answer. A seed does not: it would draw the same numbers once more."""


class CannotResumeError(RefusedError):
    """A streamed answer that ends here, because its replica was lost and another cannot go on with it."""

    def __init__(self, why: str) -> None:
        super().__init__(503, "server_error", f"the engine died in the middle of this answer; it cannot go on: {why}")


class Stream:
    """One request, and what came through of its answer where that is streamed.

    Args:
        path: of the request.
        body: of the request, as the engine gets it.
    """

    def __init__(self, path: str, body: bytes) -> None:
        self._path, self._body = path, body
        self._buffer = b""
        self.is_started = False
        """Whether the client was told that a stream begins, which cannot be said twice."""
        self._first: dict[str, Any] | None = None
        """The first chunk that came through."""
        self._prompt_token_ids: list[int] | None = None
        self._token_ids: list[int] = []
        self._usage_before = 0
        self._is_resumed = False
        self._ended = False
        self._has_other_fields = False
        self._why_not: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client was sent a part of the answer."""
        return self._first is not None

    @property
    def is_complete(self) -> bool:
        """Whether all of the answer's tokens came through, with the reason of its end."""
        return self._ended

    def refuse(self, why: str) -> None:
        """Says that this answer must not go on elsewhere."""
        self._why_not = self._why_not or why

    def request(self, max_model_len: int) -> tuple[str, bytes]:
        """Returns path and body of what to ask the next replica, whose contexts are `max_model_len` tokens long.

        Raises:
            CannotResumeError: a part of the answer came through, and the rest cannot be asked for.
        """
        self._buffer = b""
        if not self.has_begun:
            return self._path, self._body
        request = json.loads(self._body)
        if (why := self._why_not or self._obstacle(request)) is not None:
            raise CannotResumeError(why)
        assert self._prompt_token_ids is not None
        self._is_resumed, self._usage_before = True, len(self._token_ids)
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        if limit is None:
            limit = max_model_len - len(self._prompt_token_ids) if self._path == _CHAT else 16  # OpenAI's defaults
        rest = {name: request[name] for name in _KEPT if name in request}
        rest |= {
            "prompt": self._prompt_token_ids + self._token_ids,
            "max_tokens": limit - len(self._token_ids),
            "logprobs": (request.get("top_logprobs") or 0) if self._path == _CHAT else request.get("logprobs") or 0,
            "return_token_ids": True,
            "stream": True,
        }
        return _TEXT, json.dumps(rest).encode()

    def passed(self, part: bytes) -> bytes:
        """Takes what the engine sent; returns the complete events in it, as the client is to have them."""
        *events, self._buffer = (self._buffer + part).split(b"\n\n")
        return b"".join(event + b"\n\n" for event in map(self._event, events) if event)

    def end(self) -> bytes:
        """Returns what is left at the end of the engine's answer."""
        rest, self._buffer = self._buffer, b""
        return rest

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        chunk = json.loads(event[len(b"data: ") :])
        if "choices" not in chunk:
            return event
        if self._is_resumed:
            chunk = self._as_continued(chunk)
            event = b"data: " + json.dumps(chunk, ensure_ascii=False).encode()
        self._note(chunk)
        return event

    def _note(self, chunk: dict[str, Any]) -> None:
        self._first = self._first or chunk
        if chunk.get("prompt_token_ids") is not None:
            self._prompt_token_ids = chunk["prompt_token_ids"]
        for choice in chunk["choices"]:
            if choice.get("prompt_token_ids") is not None:
                self._prompt_token_ids = choice["prompt_token_ids"]
            self._token_ids += choice.get("token_ids") or []
            self._ended = self._ended or bool(choice.get("finish_reason"))
            self._has_other_fields = self._has_other_fields or choice.get("index", 0) > 0
            delta = choice.get("delta") or {}
            self._has_other_fields = self._has_other_fields or any(
                value for name, value in delta.items() if name not in ("role", "content")
            )

    def _obstacle(self, request: dict[str, Any]) -> str | None:
        """Returns why the rest of the answer cannot be asked for; None where it can."""
        if self._prompt_token_ids is None:
            return "the ids of its prompt are not known"
        if (request.get("n") or 1) != 1 or request.get("echo") or request.get("best_of"):
            return "it has several choices, or repeats its prompt"
        if request.get("tools") or self._has_other_fields:
            return "it has more than text: tool calls or reasoning"
        if restrictions := restrictions_of(request):
            return f"its sampling depends on all of its tokens ({', '.join(restrictions)})"
        return None

    def _as_continued(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Returns a chunk of the rest as one of the answer that it continues."""
        assert self._first is not None
        names = ("id", "object", "created", "model")
        continued = chunk | {name: self._first[name] for name in names if name in self._first}
        if (usage := chunk.get("usage")) is not None:
            continued["usage"] = {
                **usage,
                "prompt_tokens": usage["prompt_tokens"] - self._usage_before,
                "completion_tokens": usage.get("completion_tokens", 0) + self._usage_before,
            }
        choices = [{**choice, "prompt_token_ids": None} for choice in chunk["choices"]]
        continued["choices"] = [_as_chat(choice) for choice in choices] if self._path == _CHAT else choices
        return continued


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns a choice of a streamed text completion in the form of a streamed chat."""
    chat = {name: value for name, value in choice.items() if name not in ("text", "logprobs")}
    chat["delta"] = {"content": choice["text"]}
    if (logprobs := choice.get("logprobs")) is not None:
        tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
        chat["logprobs"] = {
            "content": [
                {**_token(token, logprob), "top_logprobs": [_token(*entry) for entry in (top or {}).items()]}
                for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
            ]
        }
    return chat


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
