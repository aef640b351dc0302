"""Rewards by an LLM judge that compares the attempts of a group: `ruler`.

A judge that fails, whatever the reason, leaves its group "not scored" (rewards of NaN): no score is ever made up.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import openai

from art_ray.errors import ConfigError
from art_ray.rewards.question import FORM, RUBRIC, Question, question_about
from art_ray.rewards.verdict import UnusableVerdict, Verdict, read_verdict
from art_ray.trajectories import Trajectory, TrajectoryGroup
from art_ray.utils import limit_concurrency

__all__ = ["Judge", "JudgingModel", "ruler"]

logger = logging.getLogger(__name__)

MAX_REPEATED_CHARS = 4000
"""Of an unusable answer, this much is shown to the judge again."""
PASSING_STATUSES = (408, 409, 429)
"""Refusals that may be none a moment later, as those from 500 on; any other ends the attempts."""


@runtime_checkable
class JudgingModel(Protocol):
    """Anything that can be asked as `art_ray.Model` can."""

    def openai_client(self) -> openai.AsyncOpenAI:
        """Returns the client to ask."""

    def get_inference_name(self) -> str:
        """Returns what to send as `model=`."""


@dataclass(frozen=True)
class Judge:
    """An LLM that compares attempts, and how it is asked.

    Raises:
        ConfigError: a client that is not asynchronous, or a number that is out of range.
    """

    client: openai.AsyncOpenAI = field(repr=False)
    """Of any server that speaks OpenAI's chat completions. Its own retries take place within `timeout_s`."""
    model: str
    """What is sent as `model=`."""
    timeout_s: float = 120.0
    """Seconds until a request is given up."""
    max_attempts: int = 3
    """How often a group is asked about, the first time included, before it counts as not scored."""
    max_concurrency: int = 16
    """Requests to one client that run at once; the others wait their turn, which takes nothing of their `timeout_s`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of every request: `{"temperature": 0}`, `{"reasoning_effort": "low"}`, …"""

    def __post_init__(self) -> None:
        if isinstance(self.client, openai.OpenAI):
            raise ConfigError("Judge: the client is an openai.OpenAI; give it an openai.AsyncOpenAI")
        for name, least in [("max_attempts", 1), ("max_concurrency", 1)]:
            if getattr(self, name) < least:
                raise ConfigError(f"Judge: {name} is at least {least}, got {getattr(self, name)}")
        if not self.timeout_s > 0:
            raise ConfigError(f"Judge: timeout_s is more than 0, got {self.timeout_s}")


async def ruler(group: TrajectoryGroup, *, judge: Judge | JudgingModel, rubric: str = RUBRIC) -> TrajectoryGroup:
    """Returns the group with rewards from 0 to 1 by an LLM judge that has compared its trajectories.

    One request shows the judge the whole group, the messages that all trajectories begin with once; equal trajectories
    are shown once and get one score. An answer that misses a trajectory or gives something other than numbers from 0
    to 1 is sent back with what is wrong with it. Where `max_attempts` did not help, all rewards become NaN, the
    group's `logs` say why, and a warning is logged.

    Each trajectory keeps its former reward as metric `independent_reward`, where it was one, and the judge's
    explanation in its `logs`. The group gains the metrics `judge_failed` (0 or 1), `judge_attempts` and `judge_tokens`
    (prompts and answers, as far as the server says). Failed rollouts are kept, and not shown. `group` is not changed.

    Args:
        group: finished trajectories. A single one is scored by the rubric alone; of none, nothing is asked.
        judge: a `Judge`, or a model of art_ray, which is asked with the defaults of `Judge`.
        rubric: what to look for, in words.

    Raises:
        TypeError: `group` is no finished group, or `judge` is nothing that can be asked.

    Example:
        ``after_each=functools.partial(ruler, judge=judge)`` scores every group of `gather_trajectory_groups` while
        others are still being rolled out.
    """
    if not isinstance(group, TrajectoryGroup):
        raise TypeError(f"ruler takes a finished TrajectoryGroup, got {type(group).__name__}: gather or await it first")
    judge = _judge(judge)
    if not group.trajectories:
        return _copied(group, [])
    question = question_about(group.trajectories, rubric)
    hearing = _Hearing(judge, question)
    verdicts = await hearing.held()
    if verdicts is None:
        reason = f"not scored by judge {judge.model!r}: {'; '.join(hearing.failures)}"
        logger.warning("a group of %d trajectories is %s", len(group), reason)
        judged = [_with_reward(trajectory, math.nan) for trajectory in group]
    else:
        reason = None
        judged = [
            _with_reward(trajectory, verdict.score, f"judge {judge.model!r}: {verdict.explanation}")
            for trajectory, verdict in zip(group, (verdicts[id] for id in question.id_of), strict=True)
        ]
    metrics = {
        "judge_failed": float(verdicts is None),
        "judge_attempts": hearing.num_attempts,
        "judge_tokens": hearing.num_tokens,
    }
    return _copied(group, judged, metrics, reason)


def _judge(judge: Any) -> Judge:
    if isinstance(judge, Judge):
        return judge
    if isinstance(judge, JudgingModel):
        return Judge(judge.openai_client(), judge.get_inference_name())
    raise TypeError(
        f"judge= takes an art_ray.rewards.Judge(client, model) or an art_ray.Model, got {type(judge).__name__}"
    )


def _with_reward(trajectory: Trajectory, reward: float, *logs: str) -> Trajectory:
    """Returns a copy with another reward; what is added to it later does not show in the original."""
    former = {"independent_reward": trajectory.reward} if trajectory.is_scored else {}
    return trajectory.model_copy(
        update={
            "messages_and_choices": list(trajectory.messages_and_choices),
            "additional_histories": list(trajectory.additional_histories),
            "reward": reward,
            "metrics": former | trajectory.metrics,  # judged twice, the reward before the first time is kept
            "metadata": dict(trajectory.metadata),
            "logs": [*trajectory.logs, *logs],
        }
    )


def _copied(
    group: TrajectoryGroup,
    trajectories: list[Trajectory],
    metrics: Mapping[str, float] | None = None,
    log: str | None = None,
) -> TrajectoryGroup:
    return TrajectoryGroup(
        trajectories,
        exceptions=group.exceptions,
        metadata=dict(group.metadata),
        metrics={**group.metrics, **(metrics or {})},
        logs=[*group.logs, *([log] if log else [])],
    )


class _Hearing:
    """The attempts to get an answer to one question."""

    def __init__(self, judge: Judge, question: Question) -> None:
        self._judge, self._question = judge, question
        self._messages = list(question.messages)
        self.num_attempts = 0
        self.num_tokens = 0
        self.failures: list[str] = []
        """Why each attempt so far gave no scores."""

    async def held(self) -> dict[str, Verdict] | None:
        """Returns the verdicts by id, or None where all attempts failed."""
        while self.num_attempts < self._judge.max_attempts:
            self.num_attempts += 1
            try:
                completion = await _limited(self._judge.max_concurrency)(self._judge, self._messages, self._question)
            except TimeoutError:
                self.failures.append(f"no answer within {self._judge.timeout_s:g} s")
                continue
            except openai.APIError as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:500])
                if _is_final(error):
                    return None
                continue
            except (json.JSONDecodeError, UnicodeDecodeError) as error:  # which the client lets through
                self.failures.append(f"the server's answer is no JSON: {error}")
                continue
            self.num_tokens += getattr(getattr(completion, "usage", None), "total_tokens", None) or 0
            text, cut_off = _answer_of(completion)
            try:
                return read_verdict(text, self._question.ids)
            except UnusableVerdict as unusable:
                problem = f"{unusable}{' (it was cut off at the limit of its length)' if cut_off else ''}"
                self.failures.append(f"an unusable answer: {problem}")
                self._send_back(text, problem)
        return None

    def _send_back(self, text: str, problem: str) -> None:
        """Makes the next attempt say what was wrong with this one's answer."""
        said = f"That answer cannot be used: {problem}. Answer again, with one JSON object of the form {FORM}"
        self._messages = [
            *self._question.messages,
            {"role": "assistant", "content": text[:MAX_REPEATED_CHARS] or "(nothing)"},
            {"role": "user", "content": said},
        ]


_without_schema: WeakSet[Any] = WeakSet()
"""Clients whose server refuses a request with a schema and answers the same request without."""


async def _ask(judge: Judge, messages: list[Any], question: Question) -> Any:
    """Returns the server's answer.

    Raises:
        TimeoutError: there is none after `timeout_s`.
        openai.APIError: the server refuses or cannot be reached.
    """
    request: dict[str, Any] = {**judge.options, "model": judge.model, "messages": messages}
    with_schema = {"response_format": question.response_format} | request
    async with asyncio.timeout(judge.timeout_s):
        create: Callable[..., Awaitable[Any]] = judge.client.chat.completions.create
        if judge.client not in _without_schema:
            try:
                return await create(**with_schema)
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                logger.debug("judge %r refused a request with a schema; once more without", judge.model)
        answer = await create(**request)
        _without_schema.add(judge.client)
        return answer


@functools.cache
def _limited(max_concurrency: int) -> Callable[[Judge, list[Any], Question], Awaitable[Any]]:
    """Returns `_ask` with at most this many calls of it running at once for each client."""
    return limit_concurrency(max_concurrency, derive_key=lambda judge, *_: id(judge.client))(_ask)


def _is_final(error: openai.APIError) -> bool:
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    return status is not None and status < 500 and status not in PASSING_STATUSES


def _answer_of(completion: Any) -> tuple[str, bool]:
    """Returns the text of an answer, empty where there is none, and whether it was cut off.

    Servers vary: the client lets through what is no chat completion at all.
    """
    choices = getattr(completion, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    content = getattr(getattr(choice, "message", None), "content", None)
    return content if isinstance(content, str) else "", getattr(choice, "finish_reason", None) == "length"
