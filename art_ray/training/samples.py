"""From trajectories to token sequences: the ids that the engine returned, and never a text tokenized again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from art_ray.trajectories import Choice, History, Message, Sampling, Trajectory, messages_of
from art_ray.types import Outcome

__all__ = ["Answers", "Refusal", "TrainingSample", "Turn", "joined", "samples_of"]


@dataclass(frozen=True)
class TrainingSample:
    """One flat token sequence. All arrays have its length T; entries of tokens that are not trained mean nothing."""

    tokens: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    """Whether the policy sampled this token, so that it enters the loss."""
    logprobs: npt.NDArray[np.float32]
    """Natural log-probability of the token under the policy that sampled it; NaN where it is unknown, so that its
    importance ratio is taken as 1."""
    temperatures: npt.NDArray[np.float32]
    """Divisor of the logits that the token was sampled from."""
    versions: npt.NDArray[np.int64]
    """Policy version that sampled the token; -1 where none did."""
    advantage: float = 0.0
    """Of the trajectory, for each of its trained tokens."""
    trajectory: int = 0
    """Counts the trained trajectories of a step: the sequences of one trajectory share it."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        """The number of tokens that enter the loss."""
        return int(self.trained.sum())

    def with_advantage(self, advantage: float, trajectory: int) -> TrainingSample:
        """Returns this sequence with its place in the step."""
        return replace(self, advantage=advantage, trajectory=trajectory)


@dataclass(frozen=True)
class Turn:
    """One answer: what the policy saw, and what it said."""

    prompt: Sequence[int]
    """Ids of everything before the answer. [P]"""
    completion: Sequence[int]
    """Ids of the answer. [C]"""
    logprobs: Sequence[float] | None
    """[C], or None where they are unknown."""
    temperature: float
    versions: Sequence[int] | None
    """[C], or None where no policy version sampled it."""


@dataclass(frozen=True)
class Refusal:
    """Why a trajectory is not trained."""

    outcome: Outcome
    reason: str


Answers = Callable[[list[Message], list[dict[str, Any]] | None], tuple[list[int], list[int]]]
"""The chat template: (messages whose last is an answer, tools) -> (ids before the answer, ids of the answer)."""


def samples_of(
    trajectory: Trajectory, max_tokens: int, render: Answers | None = None, *, is_sampling_exact: bool = True
) -> list[TrainingSample] | Refusal:
    """Returns the token sequences of one trajectory, its additional histories included, or why there are none.

    Args:
        trajectory: one episode.
        max_tokens: the longest sequence that fits.
        render: the chat template; given only where answers without token ids are to be trained too, with ratio 1.
        is_sampling_exact: whether every answer must come from softmax(logits / temperature), as importance ratios need.
            Where not, all temperatures are taken as 1.
    """
    histories = [History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)]
    samples: list[TrainingSample] = []
    for history in [*histories, *trajectory.additional_histories]:
        turns = _turns_of(history, render, is_sampling_exact)
        if isinstance(turns, Refusal):
            return turns
        samples += [sample for sample in joined(turns) if sample.num_trained]
    if not samples:
        return Refusal(Outcome.NO_LOGPROBS, "no answer in it carries sampled token ids")
    longest = max(map(len, samples))
    if longest > max_tokens:
        return Refusal(Outcome.TOO_LONG, f"a sequence of {longest} tokens; max_tokens_per_row is {max_tokens}")
    return samples


def _turns_of(history: History, render: Answers | None, is_sampling_exact: bool) -> list[Turn] | Refusal:
    turns = []
    for position, item in enumerate(history.messages_and_choices):
        sampling = Sampling.of(item) if isinstance(item, Choice) else None
        if sampling is not None:
            if is_sampling_exact and (sampling.temperature <= 0 or sampling.restrictions):
                how = ", ".join(f"{key}={value}" for key, value in sampling.restrictions.items())
                reason = how or f"temperature={sampling.temperature}"
                return Refusal(Outcome.RESTRICTED_SAMPLING, f"an answer was sampled with {reason}")
            turns.append(
                Turn(
                    sampling.prompt_token_ids,
                    sampling.token_ids,
                    sampling.logprobs,
                    sampling.temperature if is_sampling_exact else 1.0,
                    sampling.policy_versions,
                )
            )
        elif render is not None and (isinstance(item, Choice) or item.get("role") == "assistant"):
            prompt, completion = render(messages_of(history.messages_and_choices[: position + 1]), history.tools)
            turns.append(Turn(prompt, completion, None, 1.0, None))
        elif isinstance(item, Choice):
            return Refusal(Outcome.NO_LOGPROBS, "an answer came without token ids, log-probabilities or version")
    return turns


def joined(turns: Sequence[Turn]) -> list[TrainingSample]:
    """Returns the turns of one conversation as sequences.

    A turn whose prompt extends everything before it (prompt and answer of the previous turn) continues that sequence:
    what the prompt adds is context. Any other prompt (the template dropped earlier reasoning, the history was edited
    or summarised) starts a new sequence. A turn without tokens adds nothing.
    """
    growing: list[_Growing] = []
    for turn in turns:
        if not turn.completion:
            continue
        prompt = list(turn.prompt)
        current = growing[-1] if growing else None
        if current is None or prompt[: len(current.tokens)] != current.tokens:
            current = _Growing()
            growing.append(current)
        current.extend(prompt[len(current.tokens) :], turn)
    return [sequence.finished() for sequence in growing]


@dataclass
class _Growing:
    """A sequence to which turns are still added."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def extend(self, context: list[int], turn: Turn) -> None:
        num_context, num_sampled = len(context), len(turn.completion)
        self.tokens += [*context, *turn.completion]
        self.trained += [False] * num_context + [True] * num_sampled
        self.logprobs += [float("nan")] * num_context + list(turn.logprobs or [float("nan")] * num_sampled)
        self.temperatures += [1.0] * num_context + [turn.temperature] * num_sampled
        self.versions += [-1] * num_context + list(turn.versions or [-1] * num_sampled)

    def finished(self) -> TrainingSample:
        trained = np.array(self.trained, dtype=np.bool_)
        trained[0] = False  # nothing before it could have predicted it
        return TrainingSample(
            tokens=np.array(self.tokens, dtype=np.int64),
            trained=trained,
            logprobs=np.array(self.logprobs, dtype=np.float32),
            temperatures=np.array(self.temperatures, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
        )
