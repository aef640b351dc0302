"""Writing trajectory groups to parquet, one row group in memory at a time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from art_ray.ledger.answers import NO_TOKENS, Tokens, conversation_columns, plain_conversation
from art_ray.ledger.codec import (
    encoded,
    finite_json_text,
    flat_json_text,
    is_encodable_text,
    json_text,
    readable,
    shown,
)
from art_ray.ledger.metrics import checked_metrics, checked_number
from art_ray.ledger.parquet import MESSAGE, NUM_GROUPS_KEY, ROWLESS_KEY, SCHEMA
from art_ray.trajectories import History, RolloutFailure, Trajectory, TrajectoryGroup, has_spread
from art_ray.types import Outcome

__all__ = ["GroupWriter"]

ROWS_AT_ONCE = 2048
"""Rows of one row group, at most; memory holds one row group while writing."""
CHARACTERS_AT_ONCE = 32 << 20
"""A row group also ends when its texts reach this length; a single row may be longer."""
_OF_TRAJECTORY = (
    "metrics", "metadata", "tools", "logs", "duration", "num_answers", "finish_reason", "policy_version", "residue"
)  # fmt: skip
_OF_ROW = (
    "group_index", "group_metadata", "group_metrics", "group_logs", "reward", *_OF_TRAJECTORY, "outcome",
    "group_exceptions", "group_residue",
)  # fmt: skip
"""The columns that a row is made of, in the order in which the writer keeps them; the others come from lists."""


_REPEATED = [
    "group_index", "group_metadata", "group_metrics", "outcome", "finish_reason", "policy_version", "tools",
    "messages.list.element.role",
]  # fmt: skip
"""Dictionaries pay where values repeat; free text and token ids do not, and hashing them takes a third of the time."""


_SOUGHT = ["group_index", "reward", "outcome", "policy_version", "duration"]
"""Columns whose smallest and largest value readers may use to pass over row groups."""


class GroupWriter:
    """Writes groups to a parquet file as they come, one row group in memory at a time.

    Args:
        path: the file; it is complete only after `close`.
        for_training: whether rows say why training will pass them over, as far as groups tell: no spread, or tokens
            that are not known exactly.
        are_stale: whether the groups were too old to be trained.
    """

    def __init__(self, path: Path, *, for_training: bool = False, are_stale: bool = False) -> None:
        self._file = pq.ParquetWriter(
            path, SCHEMA, compression="zstd", use_dictionary=_REPEATED, write_statistics=_SOUGHT
        )
        self._for_training = for_training
        self._are_stale = are_stale
        self._rowless: list[tuple[int, dict[str, Any]]] = []
        self._num_groups = 0
        self._clear()

    def write(self, group: TrajectoryGroup) -> tuple[list[tuple[float, dict[str, float]]], list[Outcome]]:
        """Adds a group; returns the checked reward and metrics of each trajectory, and the outcome of each rollout.

        Raises:
            TypeError: a value in it is no number where one is needed, or could not be read back.
        """
        index, where = self._num_groups, f"group {self._num_groups}"
        if not isinstance(group, TrajectoryGroup):
            raise TypeError(f"{where} is {type(group).__name__}, not a TrajectoryGroup")
        shared, residue = _group_columns(group, where)
        checked = [_checked(trajectory, f"{where}, trajectory {i}") for i, trajectory in enumerate(group.trajectories)]
        spread = has_spread([reward for reward, _ in checked if math.isfinite(reward)])
        of_group = (index, *shared.values())
        outcomes = []
        failures = [_failure(failure) for failure in group.exceptions]
        for i, (trajectory, (reward, metrics)) in enumerate(zip(group.trajectories, checked, strict=True)):
            tokens, columns = self._columns_of(trajectory, metrics, f"{where}, trajectory {i}")
            outcomes.append(outcome := self._outcome(reward, tokens, spread))
            of_first = (failures or None, residue) if i == 0 else (None, None)
            self._rows.append((*of_group, reward, *columns, str(outcome), *of_first))
        if not group.trajectories:
            self._rowless.append((index, {**shared, "group_exceptions": failures, "group_residue": residue}))
        self._num_groups += 1
        if len(self._rows) >= ROWS_AT_ONCE or self._characters >= CHARACTERS_AT_ONCE:
            self._flush()
        return checked, outcomes + [Outcome.FAILED] * len(failures)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Writes what is left and the end of the file, with `metadata` in it."""
        self._flush()
        own = {NUM_GROUPS_KEY: str(self._num_groups), ROWLESS_KEY: json_text(self._rowless)}
        self._file.add_key_value_metadata({**metadata, **own})
        self._file.close()

    def abandon(self) -> None:
        """Lets go of the file, which is to be deleted."""
        with contextlib.suppress(OSError):  # the disk that made us give up may refuse this, too
            self._file.close()

    def _outcome(self, reward: float, tokens: Tokens, spread: bool) -> Outcome:
        if not math.isfinite(reward):
            return Outcome.NOT_SCORED
        if self._are_stale:
            return Outcome.STALE
        if not self._for_training:
            return Outcome.SCORED
        if not tokens.can_be_trained:
            return Outcome.NO_LOGPROBS
        return Outcome.SCORED if spread else Outcome.NO_SPREAD

    def _columns_of(
        self, trajectory: Trajectory, metrics: dict[str, float], where: str
    ) -> tuple[Tokens, tuple[Any, ...]]:
        """Returns the tokens of a trajectory and its columns `_OF_TRAJECTORY`; keeps its messages and tokens."""
        residue: dict[str, Any] = {}
        tokens = self._add_messages(trajectory, residue, where)
        metadata = _metadata_column(trajectory.metadata, residue, where)
        tools = _tools_column(trajectory.tools, residue, where)
        logs = _texts_column("logs", trajectory.logs, residue, where)
        shown_metrics = _metrics_column(metrics, residue)
        rest = json_text(residue) if residue else None
        self._tokens.append(tokens)
        self._characters += len(metadata or "") + len(rest or "")
        duration = metrics.get("duration")
        return tokens, (
            shown_metrics,
            metadata,
            tools,
            logs,
            None if duration is None else float(duration),
            tokens.num_answers,
            tokens.finish_reason,
            min(tokens.versions) if tokens.versions else None,
            rest,
        )

    def _add_messages(self, trajectory: Trajectory, residue: dict[str, Any], where: str) -> Tokens:
        """Keeps the messages of a trajectory, and returns the tokens in them and in its further histories."""
        items = trajectory.messages_and_choices
        if not isinstance(items, list):
            raise TypeError(f"{where}: messages_and_choices must be a list, got {shown(items)}")
        plain = plain_conversation(items)
        if plain is not None:
            self._messages[0] += plain[0]
            self._messages[1] += plain[1]
            self._characters += plain[2]
        tokens = Tokens() if plain is None or trajectory.additional_histories else NO_TOKENS
        if plain is None:
            columns, in_messages = conversation_columns(items, tokens, where)
            if in_messages:
                residue["messages"] = in_messages
            self._pad_messages()
            for kept, values in zip(self._messages, zip(*columns, strict=True), strict=False):  # none, if it is empty
                kept += values
            self._characters += sum(len(fields[1]) for fields in columns if fields[1])
        if trajectory.additional_histories:
            residue["histories"] = [
                _history(history, tokens, f"{where}, history {i}")
                for i, history in enumerate(trajectory.additional_histories)
            ]
        self._message_ends.append(len(self._messages[0]))
        self._characters += 4 * sum(map(len, tokens.prompt_token_ids))
        return tokens

    def _pad_messages(self) -> None:
        """Fills in what plain messages leave out: tool calls and their id, and that they are not trained."""
        for kept, absent in zip(self._messages[2:], (None, None, False), strict=True):
            kept += [absent] * (len(self._messages[0]) - len(kept))

    def _clear(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._messages: list[list[Any]] = [[] for _ in MESSAGE]
        self._message_ends = [0]
        self._tokens: list[Tokens] = []
        self._characters = 0

    def _flush(self) -> None:
        if not self._rows:
            return
        arrays = {"messages": self._message_array(), **_token_arrays(self._tokens)}
        for name, values in zip(_OF_ROW, zip(*self._rows, strict=True), strict=True):
            arrays[name] = pa.array(values, type=SCHEMA.field(name).type)
        self._clear()
        table = pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
        self._file.write_table(table, row_group_size=1 << 30)

    def _message_array(self) -> pa.ListArray:
        roles, contents, *others = self._messages
        arrays = [pa.array(roles, type=pa.string()), pa.array(contents, type=pa.string())]
        if others[0]:
            self._pad_messages()
            arrays += [pa.array(kept, type=entry.type) for kept, entry in zip(others, list(MESSAGE)[2:], strict=True)]
        else:  # every message is a plain one
            absent = pa.nulls(len(roles), pa.string())
            arrays += [absent, absent, pa.array(np.zeros(len(roles), bool))]
        return pa.ListArray.from_arrays(
            pa.array(self._message_ends, type=pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(MESSAGE))
        )


def _checked(trajectory: Trajectory, where: str) -> tuple[float, dict[str, float]]:
    reward = trajectory.reward
    if type(reward) is not float:
        reward = float(checked_number(reward, f"{where}: reward"))
    return reward, checked_metrics(trajectory.metrics, f"{where}: metrics")


def _group_columns(group: TrajectoryGroup, where: str) -> tuple[dict[str, Any], str | None]:
    residue: dict[str, Any] = {}
    columns = {
        "group_metadata": _metadata_column(group.metadata, residue, where),
        "group_metrics": _metrics_column(checked_metrics(group.metrics, f"{where}: metrics"), residue),
        "group_logs": _texts_column("logs", group.logs, residue, where),
    }
    encodable = [failure for failure in group.exceptions if not _is_encodable(failure)]
    if encodable:
        residue["exceptions"] = [encoded(failure.model_dump(), where) for failure in group.exceptions]
    return columns, json_text(residue) if residue else None


def _is_encodable(failure: RolloutFailure) -> bool:
    return all(is_encodable_text(text) for text in (failure.type, failure.message, failure.traceback))


def _failure(failure: RolloutFailure) -> dict[str, str]:
    return {name: text.encode("utf-8", "replace").decode() for name, text in failure.model_dump().items()}


def _metrics_column(metrics: dict[str, float], residue: dict[str, Any]) -> str | None:
    """Returns finite metrics as JSON; ART's reader takes no null, so that the others are in the residue alone."""
    if not metrics:
        return None
    if (text := finite_json_text(metrics)) is not None:
        return text
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    exact = encoded(metrics, "metrics")
    if exact != finite:
        residue["metrics"] = exact
    return json_text(finite) if finite else None


def _metadata_column(metadata: dict[str, Any], residue: dict[str, Any], where: str) -> str | None:
    """Returns metadata as JSON; what ART's reader refuses there (null, lists, dicts) as the JSON text of it."""
    if not isinstance(metadata, dict):
        raise TypeError(f"{where}: metadata must be a dict, got {shown(metadata)}")
    if not metadata:
        return None
    if (text := flat_json_text(metadata)) is not None:
        return text
    exact = encoded(metadata, f"{where}: metadata")
    column = {
        key: value if isinstance(value, (str, int, float)) else json_text(value)
        for key, value in readable(exact).items()
    }
    if column != exact:
        residue["metadata"] = exact
    return json_text(column)


def _tools_column(tools: list[dict[str, Any]] | None, residue: dict[str, Any], where: str) -> str | None:
    if tools is None:
        return None
    exact = encoded(tools, f"{where}: tools")
    column = readable(exact)
    if column != exact or not tools:
        residue["tools"] = exact
    return json_text(column) if tools else None


def _texts_column(name: str, texts: list[str], residue: dict[str, Any], where: str) -> list[str] | None:
    if not isinstance(texts, list):
        raise TypeError(f"{where}: {name} must be a list of texts, got {shown(texts)}")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{where}: a line of {name} must be a text, got {shown(text)}")
    if all(map(is_encodable_text, texts)):
        return list(texts) or None
    residue[name] = encoded(list(texts), where)
    return [text.encode("utf-8", "replace").decode() for text in texts]


def _history(history: History, tokens: Tokens, where: str) -> dict[str, Any]:
    columns, residues = conversation_columns(history.messages_and_choices, tokens, where)
    kept = {"messages": columns, "residues": residues}
    return kept if history.tools is None else {**kept, "tools": encoded(history.tools, f"{where}: tools")}


def _token_arrays(rows: list[Tokens]) -> dict[str, pa.Array]:
    """Returns the token columns; a row without sampled tokens has null in each."""

    def lists(per_row: list[Any], flat: pa.Array) -> pa.ListArray:
        ends = np.cumsum([0, *map(len, per_row)]).tolist()
        # In a list array, a null offset makes the row that starts there null.
        offsets = [end if row is not None and len(row) else None for end, row in zip(ends, rows_or_none, strict=False)]
        return pa.ListArray.from_arrays(pa.array([*offsets, ends[-1]], type=pa.int32()), flat)

    names = ("token_ids", "logprobs", "answer_lengths", "answer_versions", "prompt_token_ids")
    if not any(row.token_ids for row in rows):
        return {name: pa.nulls(len(rows), SCHEMA.field(name).type) for name in names}
    rows_or_none = [row.token_ids for row in rows]
    answers = [answer for row in rows for answer in row.token_ids]
    prompts = [prompt for row in rows for prompt in row.prompt_token_ids]
    tokens_per_row = [range(sum(map(len, row.token_ids))) for row in rows]
    prompt_ends = pa.array(np.cumsum([0, *map(len, prompts)]), type=pa.int32())
    return {
        "token_ids": lists(tokens_per_row, pa.array(_joined(answers, np.int32))),
        "logprobs": lists(
            tokens_per_row, pa.array(_joined([values for row in rows for values in row.logprobs], np.float32))
        ),
        "answer_lengths": lists(rows_or_none, pa.array([len(answer) for answer in answers], type=pa.int32())),
        "answer_versions": lists(
            rows_or_none, pa.array([version for row in rows for version in row.versions], type=pa.int64())
        ),
        "prompt_token_ids": lists(
            rows_or_none, pa.ListArray.from_arrays(prompt_ends, pa.array(_joined(prompts, np.int32)))
        ),
    }


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
