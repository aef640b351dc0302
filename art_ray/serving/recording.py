"""What plain OpenAI clients were answered, kept by trajectory: agents in any process or language can be trained.

A client names its trajectory by header or path and needs to keep nothing: whoever runs the rollout fetches the
exchanges afterwards and makes a conversation of them. Pure: no input or output, and the clock is given.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from art_ray.trajectories import MessagesAndChoices, messages_of

__all__ = ["Exchange", "Recorder", "StreamedAnswer", "conversations"]


# front ──Exchange (as JSON)──> whoever runs the rollout
@dataclass(frozen=True)
class Exchange:
    """One request of a trajectory and one answer to it."""

    messages: list[dict[str, Any]]
    """The conversation as it was sent."""
    tools: list[dict[str, Any]] | None
    """Tool definitions as they were sent."""
    choice: dict[str, Any]
    """The answer, with ids, log-probabilities and version; as `Choice` reads it."""

    def as_json(self) -> dict[str, Any]:
        """Returns the exchange as plain values."""
        return {"messages": self.messages, "tools": self.tools, "choice": self.choice}


@dataclass
class _Kept:
    exchanges: list[Exchange] = field(default_factory=list)
    size_bytes: int = 0
    used: float = 0.0


class Recorder:
    """The exchanges of the trajectories that are being rolled out, within bounds of memory and time.

    Args:
        capacity_bytes: bodies kept in all; the trajectories that were used longest ago are dropped above it.
        ttl_s: seconds after its last use for which a trajectory is kept.
        clock: seconds, rising; a test gives its own.
    """

    def __init__(
        self, capacity_bytes: int = 512 * 2**20, ttl_s: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity_bytes, self._ttl_s, self._clock = capacity_bytes, ttl_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._size_bytes = 0
        self.dropped = 0
        """Trajectories that were dropped before anyone asked for them to be forgotten."""

    def record(self, trajectory: str, exchanges: list[Exchange], size_bytes: int) -> None:
        """Adds the answers to one request, whose bodies are `size_bytes` long, to its trajectory."""
        kept = self._kept.setdefault(trajectory, _Kept())
        kept.exchanges += exchanges
        kept.size_bytes += size_bytes
        kept.used = self._clock()
        self._size_bytes += size_bytes
        self._kept.move_to_end(trajectory)
        self._drop_what_does_not_fit()

    def exchanges(self, trajectory: str) -> list[Exchange] | None:
        """Returns what was recorded for a trajectory, in the order of the answers; None where nothing is kept."""
        kept = self._kept.get(trajectory)
        return None if kept is None else list(kept.exchanges)

    def forget(self, trajectory: str) -> None:
        """Drops a trajectory; no effect where nothing is kept."""
        kept = self._kept.pop(trajectory, None)
        if kept is not None:
            self._size_bytes -= kept.size_bytes

    def _drop_what_does_not_fit(self) -> None:
        oldest_kept = self._clock() - self._ttl_s
        while self._kept:
            trajectory, kept = next(iter(self._kept.items()))
            if self._size_bytes <= self._capacity_bytes and kept.used >= oldest_kept:
                return
            self.forget(trajectory)
            self.dropped += 1


class StreamedAnswer:
    """Puts the chunks of a streamed answer together again, as the client's own library would."""

    def __init__(self) -> None:
        self._state = ChatCompletionStreamState()
        self._last: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Takes the next labelled chunk."""
        self._state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        for choice in chunk.get("choices") or []:
            if choice.get("finish_reason"):
                self._last[choice.get("index", 0)] = choice

    def choices(self) -> list[dict[str, Any]]:
        """Returns the choices that came to their end."""
        complete = []
        for choice in self._state.current_completion_snapshot.choices if self._last else []:
            last = self._last.get(choice.index)
            if last is not None:
                whole = choice.model_dump(exclude={"message": {"parsed"}})
                labels = {name: value for name, value in last.items() if name not in ("delta", "logprobs")}
                answer = {**whole, **labels}
                answer["token_ids"] = answer.pop("all_token_ids", None)
                complete.append(answer)
        return complete


def conversations(exchanges: list[Exchange]) -> list[tuple[MessagesAndChoices, list[dict[str, Any]] | None]]:
    """Returns the conversations that a trajectory's exchanges make, each with its tools, in the order they began.

    An exchange whose messages repeat a whole conversation continues it; any other begins one of its own: a sub-agent,
    or the same agent after its history was summarised.
    """
    found: list[tuple[MessagesAndChoices, list[dict[str, Any]] | None]] = []
    for exchange in exchanges:
        choice = Choice.model_validate(exchange.choice)
        for index, (items, tools) in enumerate(found):
            known = messages_of(items)
            sent = exchange.messages
            if tools == exchange.tools and len(sent) > len(known) and all(map(_same, known, sent)):
                found[index] = ([*items, *sent[len(known) :], choice], tools)
                break
        else:
            found.append(([*exchange.messages, choice], exchange.tools))
    return found


def _same(known: dict[str, Any], sent: dict[str, Any]) -> bool:
    """Whether a client sent a message back as it was known; libraries differ in how they write what is empty."""
    names = {"role", "content", "tool_calls", "tool_call_id"}
    return all((_plain(known.get(name)) or None) == (_plain(sent.get(name)) or None) for name in names)


def _plain(value: Any) -> Any:
    """Returns content given as parts of text as that text."""
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(part.get("text", "") for part in value)
    return value
