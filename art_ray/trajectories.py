"""One episode (`Trajectory`), its siblings (`TrajectoryGroup`), and what the engine said about each sampled answer."""

from __future__ import annotations

import asyncio
import inspect
import math
import operator
import time
import traceback as traceback_module
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeAlias

import pydantic
from openai.types.chat.chat_completion import Choice

__all__ = [
    "Choice",
    "History",
    "Message",
    "Messages",
    "MessagesAndChoices",
    "PendingTrajectoryGroup",
    "RolloutFailure",
    "Sampling",
    "Tools",
    "Trajectory",
    "TrajectoryGroup",
    "as_groups",
    "as_number",
    "has_spread",
    "mean_and_deviation",
    "messages_of",
]

Message: TypeAlias = dict[str, Any]
"""An OpenAI chat message: `role`, `content` (text or a list of parts), perhaps `tool_calls` or `tool_call_id`."""
Messages: TypeAlias = list[Any]
"""A conversation of `Message` alone. Typed loosely, so that type checkers let it pass as OpenAI's `messages`."""
Tools: TypeAlias = list[dict[str, Any]]
"""Tool definitions in OpenAI's form."""


def as_message(value: object) -> object:
    """Returns an OpenAI message object as the dict that it is on the wire, and a dict or `Choice` unchanged."""
    if isinstance(value, (dict, Choice)):
        return value
    if isinstance(value, pydantic.BaseModel) and hasattr(value, "role"):
        return value.model_dump(exclude_none=True)
    raise ValueError(f"a message is a dict or an openai Choice, got {type(value).__name__}")


MessagesAndChoices: TypeAlias = list[Annotated[Choice | Message, pydantic.BeforeValidator(as_message)]]
"""A conversation. A `Choice` is an answer as the server returned it, a dict is anything else."""


def as_number(value: object) -> Any:
    """Returns numpy and torch scalars as the Python number they hold, and anything else unchanged."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):  # type: ignore[attr-defined]
        item = getattr(value, "item", None)
        return item() if callable(item) else value
    return value


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of finite values and their population standard deviation; zeros where there are none.

    In two passes: the mean of squares minus the square of the mean loses small spreads of large values. The values are
    scaled by a power of two, which rounds nothing, so that no sum or square of them overflows.
    """
    if not values:
        return 0.0, 0.0
    exponent = math.frexp(max(map(abs, values)))[1]
    scaled = [math.ldexp(value, -exponent) for value in values]
    mean = math.fsum(scaled) / len(scaled)
    deviation = math.hypot(*(value - mean for value in scaled)) / math.sqrt(len(scaled))
    # No deviation is larger than the largest value; a rounded one of the largest doubles may be.
    return math.ldexp(mean, exponent), math.ldexp(min(deviation, max(map(abs, scaled))), exponent)


def has_spread(rewards: Sequence[float]) -> bool:
    """Returns whether finite rewards differ by more than residue of floating point.

    They do where their population standard deviation is above 1e-9 of the largest magnitude among them.
    """
    return len(rewards) >= 2 and mean_and_deviation(rewards)[1] > 1e-9 * max(map(abs, rewards))


Number: TypeAlias = Annotated[float | int | bool, pydantic.BeforeValidator(as_number)]
Metrics: TypeAlias = dict[str, Number]


@dataclass(frozen=True)
class Sampling:
    """What the engine said about one sampled answer: the exact tokens, how likely each was, and who sampled it.

    It travels as additional fields of the `Choice`, which the serving front adds to every answer.
    """

    prompt_token_ids: list[int]
    """Ids of the whole rendered prompt. [P]"""
    token_ids: list[int]
    """Ids that were sampled, the end-of-turn token included where it was sampled. [T]"""
    logprobs: list[float]
    """Natural log-probability of each sampled id under the sampling distribution (after the temperature). [T]"""
    policy_versions: list[int]
    """The version that sampled each token. [T]"""
    temperature: float
    """Divisor of the logits; 0 is greedy."""
    restrictions: dict[str, Any] = field(default_factory=dict)
    """Options of the request that made the distribution another than softmax(logits / temperature): top_p, top_k, …"""

    @classmethod
    def of(cls, choice: Choice) -> Sampling | None:
        """Returns what `choice` carries; None where ids, log-probabilities or version are absent, disagree or are odd.

        Odd is what no engine of ours says (a negative id, a NaN, a text): it is a foreign server's own use of a name.
        """
        try:
            return cls._of(choice, choice.model_extra or {})
        except (AttributeError, OverflowError, TypeError, ValueError):
            return None

    @classmethod
    def _of(cls, choice: Choice, extra: dict[str, Any]) -> Sampling | None:
        token_ids, prompt_token_ids = extra.get("token_ids"), extra.get("prompt_token_ids")
        version = extra.get("policy_version")
        content = choice.logprobs.content if choice.logprobs else None
        if content is not None and (token_ids is None or len(token_ids) != len(content)):
            # Clients that put a streamed answer together keep the log-probability of each token, its id beside it.
            named = [(token.model_extra or {}).get("token_id") for token in content]
            token_ids = token_ids if None in named else named
        if token_ids is None or prompt_token_ids is None or version is None or content is None:
            return None
        [version] = _integers([version], below=2**63)
        versions = extra.get("policy_versions") or [version] * len(token_ids)
        if not len(token_ids) == len(content) == len(versions):
            return None
        temperature = extra.get("temperature")
        return cls(
            prompt_token_ids=_integers(prompt_token_ids, below=2**31),
            token_ids=_integers(token_ids, below=2**31),
            logprobs=[_finite(token.logprob) for token in content],
            policy_versions=_integers(versions, below=2**63),
            temperature=1.0 if temperature is None else _finite(temperature, at_least=0.0),
            restrictions=dict(extra.get("sampling_restrictions") or {}),
        )


def _integers(values: Sequence[Any], below: int) -> list[int]:
    """Returns the integers in `values`, or raises a `TypeError` or `ValueError` where one is none of 0 … below - 1."""
    integers = list(map(operator.index, values))
    if integers and not 0 <= min(integers) <= max(integers) < below:
        raise ValueError(f"integers from 0 to {below - 1} expected")
    return integers


def _finite(value: Any, at_least: float = -math.inf) -> float:
    """Returns a finite number as a float, or raises a `ValueError` or `TypeError` where `value` is none."""
    number = as_number(value)
    if isinstance(number, bool) or not (
        isinstance(number, (int, float)) and math.isfinite(number) and number >= at_least
    ):
        raise ValueError(f"a finite number expected, got {number!r:.80}")
    return float(number)


def messages_of(items: MessagesAndChoices) -> Messages:
    """Returns a conversation as plain message dicts, each answer as the assistant message that continues it."""
    return [_message_of(item) if isinstance(item, Choice) else dict(item) for item in items]


def _message_of(choice: Choice) -> Message:
    message: Message = {"role": "assistant", "content": choice.message.content or ""}
    if choice.message.tool_calls:
        message["tool_calls"] = [call.model_dump(exclude_none=True) for call in choice.message.tool_calls]
    for name in ("reasoning", "reasoning_content"):
        if text := (choice.message.model_extra or {}).get(name):
            message[name] = text
    return message


class History(pydantic.BaseModel):
    """A further conversation of the same episode: a sub-agent's, or the one before a summary."""

    messages_and_choices: MessagesAndChoices
    tools: list[dict[str, Any]] | None = None

    def messages(self) -> Messages:
        """Returns the conversation as plain message dicts."""
        return messages_of(self.messages_and_choices)


class Trajectory(pydantic.BaseModel):
    """One episode: a conversation, its reward, and whatever else is worth remembering about it.

    Two trajectories are equal when what they hold is; when they were made does not matter.

    Raises:
        pydantic.ValidationError (ValueError): a field that does not exist, or a value of the wrong type, here and in
            a later assignment.
    """

    model_config = pydantic.ConfigDict(extra="forbid", validate_assignment=True, ser_json_inf_nan="strings")

    messages_and_choices: MessagesAndChoices
    tools: list[dict[str, Any]] | None = None
    """Tool definitions in OpenAI's form, as sent with the requests."""
    additional_histories: list[History] = []
    reward: Annotated[float, pydantic.BeforeValidator(as_number)] = 0.0
    """Higher is better. NaN means "not scored": kept, but in no mean and not trained."""
    metrics: Metrics = {}
    metadata: dict[str, Any] = {}
    logs: list[str] = []

    _started: float = pydantic.PrivateAttr(default_factory=time.monotonic)

    def __init__(self, messages_and_choices: MessagesAndChoices | None = None, **values: Any) -> None:
        if messages_and_choices is not None:
            values["messages_and_choices"] = messages_and_choices
        super().__init__(**values)

    def messages(self) -> Messages:
        """Returns the conversation as plain message dicts, ready to be sent to a server."""
        return messages_of(self.messages_and_choices)

    def log(self, text: str) -> None:
        """Adds a line to `logs`."""
        self.logs.append(text)

    def finish(self) -> Self:
        """Sets `metrics["duration"]` to the seconds since this trajectory was made, and returns it."""
        self.metrics["duration"] = time.monotonic() - self._started
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Adds the seconds spent inside the block to `metrics["{name}_duration"]`."""
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - started

    @property
    def is_scored(self) -> bool:
        """Whether the reward is a finite number."""
        return math.isfinite(self.reward)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        mine, theirs = dict(self.__dict__), dict(other.__dict__)
        rewards = mine.pop("reward"), theirs.pop("reward")
        return (rewards[0] == rewards[1] or all(map(math.isnan, rewards))) and mine == theirs

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class RolloutFailure(pydantic.BaseModel):
    """A rollout that raised, as it is remembered: it takes no part in training."""

    type: str
    """Qualified name of the exception's class."""
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RolloutFailure:
        """Returns what is kept of `error`."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = str(error)
        except Exception as second:  # a broken __str__ must not cost the record of the failure
            message = f"<{kind.__qualname__}.__str__ raised {type(second).__qualname__}>"
        return cls(type=name, message=message, traceback="".join(traceback_module.format_exception(error)))


class TrajectoryGroup(pydantic.BaseModel):
    """The attempts at one scenario, whose rewards are compared with each other, and the attempts that failed.

    Built from trajectories and exceptions it is a group; built with awaitables among them it is a
    `PendingTrajectoryGroup`, which becomes a group when awaited or gathered.

    Raises:
        TypeError: an item that is none of the three.
    """

    model_config = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    trajectories: list[Trajectory]
    exceptions: list[RolloutFailure] = []
    metadata: dict[str, Any] = {}
    metrics: Metrics = {}
    """Values of the group as a whole, logged as `group_{name}`."""
    logs: list[str] = []

    def __new__(cls, trajectories: Iterable[Any] = (), **values: Any) -> Any:
        """Returns a group, or a `PendingTrajectoryGroup` where an item is still awaited."""
        if isinstance(trajectories, (Trajectory, BaseException)) or not isinstance(trajectories, Iterable):
            raise TypeError(f"a TrajectoryGroup takes a list of trajectories, got one {type(trajectories).__name__}")
        items = list(trajectories)
        if any(inspect.isawaitable(item) for item in items):
            # What is wrong with the rest shows here, before anything is rolled out.
            TrajectoryGroup([item for item in items if not inspect.isawaitable(item)], **values)
            return PendingTrajectoryGroup(items, values)
        group = super().__new__(cls)
        # A generator is spent by the look above; __init__ gets the items from here.
        object.__setattr__(group, "_items", items)
        return group

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]] = (),
        *,
        exceptions: Iterable[BaseException | RolloutFailure] = (),
        metadata: dict[str, Any] | None = None,
        metrics: Metrics | None = None,
        logs: list[str] | None = None,
    ) -> None:
        items = self.__dict__.pop("_items", None)
        items = list(trajectories) if items is None else items
        kept: list[Trajectory] = []
        failures: list[RolloutFailure] = []
        for position, item in enumerate(items):
            if isinstance(item, Trajectory):
                kept.append(item)
            elif isinstance(item, (BaseException, RolloutFailure)):
                failures.append(item if isinstance(item, RolloutFailure) else RolloutFailure.of(item))
            else:
                raise TypeError(
                    f"a TrajectoryGroup holds trajectories, exceptions and awaitables of them; "
                    f"item {position} is {type(item).__name__}: {item!r:.80}"
                )
        failures += [e if isinstance(e, RolloutFailure) else _failure(e) for e in exceptions]
        super().__init__(
            trajectories=kept, exceptions=failures, metadata=metadata or {}, metrics=metrics or {}, logs=logs or []
        )

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _from_dump(cls, value: Any, build: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        """Lets `model_validate` read what `model_dump` wrote, where `__init__` takes objects only."""
        if isinstance(value, dict):
            revived: dict[str, type[pydantic.BaseModel]] = {"trajectories": Trajectory, "exceptions": RolloutFailure}
            for name, kind in revived.items():
                items = value.get(name) or []
                if any(isinstance(item, dict) for item in items):
                    value = {**value, name: [kind.model_validate(item) for item in items]}
        return build(value)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def log(self, text: str) -> None:
        """Adds a line to `logs`."""
        self.logs.append(text)


def _failure(error: object) -> RolloutFailure:
    if not isinstance(error, BaseException):
        raise TypeError(f"exceptions= takes exceptions, got {type(error).__name__}: {error!r:.80}")
    return RolloutFailure.of(error)


class PendingTrajectoryGroup:
    """A group some of whose trajectories are still being rolled out. Awaiting it gives the `TrajectoryGroup`.

    A rollout that raises becomes an entry of the group's `exceptions`; use `gather_trajectory_groups` for a progress
    bar and a limit on failures.
    """

    def __init__(self, items: list[Any], values: dict[str, Any]) -> None:
        self.items = items
        """Trajectories, exceptions and awaitables, in order."""
        self.values = values
        """The keyword arguments of the group to be."""

    def __await__(self) -> Any:
        return self._resolved().__await__()

    async def _resolved(self) -> TrajectoryGroup:
        async def outcome(item: Any) -> Any:
            return await item if inspect.isawaitable(item) else item

        results = await asyncio.gather(*(outcome(item) for item in self.items), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result  # cancellation and interruption are not outcomes of a rollout
        return TrajectoryGroup(results, **self.values)


def as_groups(items: Any, is_reference: Any = None) -> list[Any]:
    """Returns what `log` and `train` were given as a list of groups, consuming an iterable once.

    Groups (and references to groups) stay as they are; trajectories and exceptions become one group.

    Args:
        items: a group, a trajectory, or an iterable of groups, or of trajectories and exceptions.
        is_reference: says whether an item stands for a group that lies elsewhere; None: nothing does.

    Raises:
        TypeError: a mixture of the two kinds, or an item that is of neither.
    """
    one = isinstance(items, (TrajectoryGroup, Trajectory, BaseException, PendingTrajectoryGroup))
    if one or (is_reference and is_reference(items)):
        items = [items]
    try:
        listed = list(items)
    except TypeError:
        raise TypeError(
            f"expected trajectory groups, or trajectories and exceptions; got {type(items).__name__}"
        ) from None
    groups: list[Any] = []
    loose: list[Any] = []
    for position, item in enumerate(listed):
        if isinstance(item, TrajectoryGroup) or (is_reference and is_reference(item)):
            groups.append(item)
        elif isinstance(item, (Trajectory, BaseException)):
            loose.append(item)
        elif isinstance(item, PendingTrajectoryGroup) or inspect.isawaitable(item):
            raise TypeError(
                f"item {position} is still awaited: pass it through gather_trajectory_groups or await it first"
            )
        else:
            raise TypeError(
                f"expected trajectory groups, or trajectories and exceptions; "
                f"item {position} is {type(item).__name__}: {item!r:.80}"
            )
    if groups and loose:
        raise TypeError(
            f"a mixture of {len(groups)} groups and {len(loose)} trajectories or exceptions: "
            "pass groups alone, or trajectories and exceptions alone (they become one group)"
        )
    return groups if not loose else [TrajectoryGroup(loose)]
