"""Trajectories as an engine would return them, made from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from openai.types.chat.chat_completion import Choice

from art_ray.training import checkpoint
from art_ray.training.samples import TrainingSample
from art_ray.trajectories import Trajectory, TrajectoryGroup


def choice(
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    temperature: float = 1.0,
    version: int = 0,
    **more: Any,
) -> Choice:
    """An answer of `tokens` to a rendered `prompt`, with what the serving front adds."""
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    content = [{"token": str(t), "logprob": p, "top_logprobs": []} for t, p in zip(tokens, logprobs, strict=True)]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "text that is never tokenized"},
            "logprobs": {"content": content},
            "prompt_token_ids": list(prompt),
            "token_ids": list(tokens),
            "policy_version": version,
            "temperature": temperature,
            **more,
        }
    )


def trajectory(prompt: Sequence[int], tokens: Sequence[int], reward: float, **more: Any) -> Trajectory:
    """One question and one answer."""
    return Trajectory([{"role": "user", "content": "?"}, choice(prompt, tokens, **more)], reward=reward)


def random_groups(
    seed: int = 0, num_groups: int = 2, group_size: int = 3, prompt: int = 10, answer: int = 6, vocabulary: int = 49152
) -> list[TrajectoryGroup]:
    """Groups with one random prompt each and random answers, rewards 0, 1, 2, …"""
    generator = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        prompt_ids = generator.integers(3, vocabulary, prompt).tolist()
        members = [
            trajectory(
                prompt_ids,
                generator.integers(3, vocabulary, answer + i % 3).tolist(),
                float(i),
                logprobs=(-generator.random(answer + i % 3) * 3 - 8).tolist(),
            )
            for i in range(group_size)
        ]
        groups.append(TrajectoryGroup(members))
    return groups


def sample(tokens: Sequence[int], trained: Sequence[int], advantage: float = 1.0, **more: Any) -> TrainingSample:
    """A sequence whose tokens at the positions `trained` were sampled with log-probability -1."""
    mask = np.zeros(len(tokens), dtype=np.bool_)
    mask[list(trained)] = True
    return TrainingSample(
        tokens=np.array(tokens, dtype=np.int64),
        trained=mask,
        logprobs=np.asarray(more.pop("logprobs", np.full(len(tokens), -1.0)), dtype=np.float32),
        temperatures=np.asarray(more.pop("temperatures", np.ones(len(tokens))), dtype=np.float32),
        versions=np.zeros(len(tokens), dtype=np.int64),
        advantage=advantage,
        **more,
    )


def complete_steps(checkpoints_dir: Path) -> list[int]:
    """The steps in a checkpoint directory, each read against its hashes."""
    steps = sorted(int(path.name) for path in checkpoints_dir.glob("[0-9]*"))
    return [checkpoint.verify(checkpoints_dir, step).step for step in steps]
