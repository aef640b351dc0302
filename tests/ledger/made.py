"""Conversations, groups and ledgers for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art_ray.ledger import Ledger, LedgerConfig
from art_ray.trajectories import Choice, Trajectory, TrajectoryGroup


def ledger_at(base: Path, reporters: list[str] | None = None, **values: Any) -> Ledger:
    values = {"base_path": str(base), "project": "demo", "name": "agent", **values}
    return Ledger(LedgerConfig(report_metrics=reporters or [], **values))


def lines_of(ledger: Ledger) -> list[dict[str, Any]]:
    path = ledger.folder / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def parquet_files(ledger: Ledger) -> list[Path]:
    return sorted((ledger.folder / "trajectories").glob("*/*.parquet"))


def answer(content: str | None = "yes", num_tokens: int = 3, version: int | None = 2, **fields: Any) -> Choice:
    """An answer as our servers return it; with `version=None` one of a hosted model, without token ids."""
    tokens = [f"t{i}" for i in range(num_tokens)]
    scored = [
        {"token": text, "bytes": list(text.encode()), "logprob": -0.25 * i, "top_logprobs": []}
        for i, text in enumerate(tokens)
    ]
    sampled = {
        "logprobs": {"content": scored, "refusal": None},
        "token_ids": list(range(100, 100 + num_tokens)),
        "prompt_token_ids": [7, 8, 9],
        "policy_version": version,
        "temperature": 1.0,
    }
    message = {"role": "assistant", "content": content, "refusal": None, **fields.pop("message", {})}
    return Choice.model_validate(
        {"finish_reason": "stop", "index": 0, "message": message, **({} if version is None else sampled), **fields}
    )


def conversation(*items: Any) -> list[Any]:
    return [{"role": "user", "content": "yes or no?"}, *items]


def group_of(*rewards: float, **values: Any) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(conversation(answer()), reward=reward) for reward in rewards], **values)
