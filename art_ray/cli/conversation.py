"""Conversations as they are shown: turn by turn, whatever their messages hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from art_ray.cli.output import number
from art_ray.ledger.codec import encoded, readable
from art_ray.trajectories import Choice, History, MessagesAndChoices, Sampling, Trajectory, TrajectoryGroup

__all__ = [
    "Call",
    "Part",
    "Tally",
    "Turn",
    "as_json",
    "conversations_of",
    "group_as_json",
    "numbered",
    "shown",
    "turn_as_json",
    "turns_of",
]


@dataclass(frozen=True)
class Part:
    """A piece of a message's content."""

    kind: str
    """"text", or what else it is: "image_url", "refusal", …"""
    text: str
    """The text, or the address or JSON of what is no text."""


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the answer asks for it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message, or one answer."""

    role: str
    parts: list[Part]
    calls: list[Call] = field(default_factory=list)
    responds_to: str | None = None
    """Id of the call whose result this is."""
    reasoning: str | None = None
    is_answer: bool = False
    """Whether it is an answer as a server returned it."""
    finish_reason: str | None = None
    sampling: Sampling | None = None
    """What the engine said about it; None where ids, log-probabilities or version are unknown."""
    token_texts: list[str] = field(default_factory=list)
    """[T], where `sampling` is known."""

    @property
    def text(self) -> str:
        """The texts of the content, one after the other."""
        return "".join(part.text for part in self.parts if part.kind == "text")


@dataclass
class Tally:
    """What there was in the groups that were looked at."""

    groups: int = 0
    trajectories: int = 0
    failures: int = 0
    scored: int = 0
    _sum: float = 0.0

    def add(self, group: TrajectoryGroup) -> None:
        """Counts one more."""
        rewards = [trajectory.reward for trajectory in group if trajectory.is_scored]
        self.groups += 1
        self.trajectories += len(group)
        self.failures += len(group.exceptions)
        self.scored += len(rewards)
        self._sum += sum(rewards)

    @property
    def mean_reward(self) -> float | None:
        """Over the trajectories that have one."""
        return self._sum / self.scored if self.scored else None

    def __str__(self) -> str:
        groups = f"{self.groups} group{'s' * (self.groups != 1)}"
        trajectories = f"{self.trajectories} trajector{'y' if self.trajectories == 1 else 'ies'}"
        return f"{groups}, {trajectories}, {self.failures} failed, mean reward {number(self.mean_reward)}"

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers by name."""
        return {
            "groups": self.groups,
            "trajectories": self.trajectories,
            "scored": self.scored,
            "failures": self.failures,
            "mean_reward": self.mean_reward,
        }


def conversations_of(trajectory: Trajectory) -> list[tuple[str, History]]:
    """Returns the conversations of a trajectory with their names: its own, "", then the additional ones."""
    own = History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)
    further = trajectory.additional_histories
    return [("", own), *((f"additional history {i}", history) for i, history in enumerate(further))]


def turns_of(items: MessagesAndChoices) -> Iterator[Turn]:
    """Yields a conversation's turns."""
    for item in items:
        yield _answer(item) if isinstance(item, Choice) else _turn(item)


def shown(value: Any) -> str:
    """Returns any value of a trajectory as text: itself, or JSON."""
    return value if isinstance(value, str) else json.dumps(as_json(value), ensure_ascii=False)


def as_json(value: Any) -> Any:
    """Returns any value of a trajectory as types of JSON."""
    return readable(encoded(value, "value"))


def group_as_json(index: int, group: TrajectoryGroup) -> dict[str, Any]:
    """Returns a group with all its messages, and of each answer how it was sampled."""
    return {
        "group": index,
        "metadata": as_json(group.metadata),
        "metrics": as_json(group.metrics),
        "logs": group.logs,
        "failures": [failure.model_dump() for failure in group.exceptions],
        "trajectories": [_trajectory_as_json(trajectory) for trajectory in group],
    }


def _trajectory_as_json(trajectory: Trajectory) -> dict[str, Any]:
    own, *further = (
        {"tools": as_json(history.tools), "messages": [turn_as_json(item) for item in history.messages_and_choices]}
        for _, history in conversations_of(trajectory)
    )
    return {
        "reward": trajectory.reward,
        "metrics": as_json(trajectory.metrics),
        "metadata": as_json(trajectory.metadata),
        "logs": trajectory.logs,
        **own,
        "additional_histories": further,
    }


def turn_as_json(item: Any, *, with_tokens: bool = False) -> dict[str, Any]:
    """Returns a message with the fields it was logged with; of an answer also how it was sampled."""
    message = as_json(_fields_of(item))
    if not isinstance(item, Choice):
        return {"message": message}
    turn = _answer(item)
    return {
        "message": message,
        "finish_reason": turn.finish_reason,
        "sampling": None if turn.sampling is None else _sampling_as_json(turn.sampling, turn.token_texts, with_tokens),
    }


def _sampling_as_json(sampling: Sampling, texts: list[str], with_tokens: bool) -> dict[str, Any]:
    found = {
        "temperature": sampling.temperature,
        "restrictions": as_json(sampling.restrictions),
        "prompt_tokens": len(sampling.prompt_token_ids),
        "tokens": len(sampling.token_ids),
        "logprob": sum(sampling.logprobs),
        "versions": sorted(set(sampling.policy_versions)),
    }
    if with_tokens:
        found |= {
            "prompt_token_ids": sampling.prompt_token_ids,
            "token_ids": sampling.token_ids,
            "token_texts": texts,
            "token_logprobs": sampling.logprobs,
            "token_versions": sampling.policy_versions,
        }
    return found


def _fields_of(item: Any) -> Any:
    if not isinstance(item, Choice):
        return item
    return item.model_dump(exclude_unset=True, exclude={"logprobs"}, warnings=False).get("message")


def _answer(choice: Choice) -> Turn:
    turn = _turn(_fields_of(choice))
    sampling = Sampling.of(choice)
    scored = choice.logprobs.content if sampling is not None and choice.logprobs else None
    reason = choice.finish_reason
    return Turn(
        **{name: value for name, value in vars(turn).items() if name in ("parts", "calls", "responds_to", "reasoning")},
        role=turn.role if turn.role != "?" else "assistant",
        is_answer=True,
        finish_reason=None if reason is None else str(reason),
        sampling=sampling,
        token_texts=[str(token.token) for token in scored or []],
    )


def _turn(message: Any) -> Turn:
    """Returns a message as a turn. Nothing about it is certain: it came from a file, or from any server."""
    if not isinstance(message, dict):
        return Turn("?", [Part("message", shown(message))])
    role, name = message.get("role"), message.get("name")
    parts = list(_parts(message.get("content")))
    if message.get("refusal"):
        parts.append(Part("refusal", shown(message["refusal"])))
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls")
    call_id = message.get("tool_call_id")
    return Turn(
        role=("?" if role is None else shown(role)) + (f" ({shown(name)})" if name else ""),
        parts=parts,
        calls=[_call(call) for call in (calls if isinstance(calls, list) else [calls] if calls else [])],
        responds_to=None if call_id is None else shown(call_id),
        reasoning=shown(reasoning) if reasoning else None,
    )


def _parts(content: Any) -> Iterator[Part]:
    if content is None or content == "":
        return
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield Part("text", part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield Part("text", part["text"])
        elif kind == "image_url":
            yield Part("image_url", _address(part.get("image_url")))
        else:
            yield Part(kind if isinstance(kind, str) else "content", shown(part))


def _address(image: Any) -> str:
    url = image.get("url") if isinstance(image, dict) else image
    return shown(url)


def _call(call: Any) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return Call("", "", shown(call))
    return Call(shown(call.get("id") or ""), shown(function.get("name") or ""), shown(function.get("arguments") or ""))


def numbered(groups: Iterable[TrajectoryGroup], only: int | None) -> Iterator[tuple[int, TrajectoryGroup]]:
    """Yields groups with their positions; with `only`, the one at that position."""
    for index, group in enumerate(groups):
        if only is None or index == only:
            yield index, group
