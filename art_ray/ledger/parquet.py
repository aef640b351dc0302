"""Trajectory groups as parquet files: ten columns that ART reads, then ours, and back again without loss.

One row per trajectory. What belongs to a group is on each of its rows (as ART has it) or, for failures and for what JSON
cannot say, on its first row. Groups without a trajectory have no row: they are in the file's metadata.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from art_ray.errors import LedgerFormatError
from art_ray.ledger.answers import Columns, TokenReader, Tokens, conversation_columns, decode_message, plain_conversation
from art_ray.ledger.codec import decoded, encoded, flat_json_text, is_encodable_text, json_text, readable
from art_ray.ledger.metrics import checked_metrics, checked_number
from art_ray.trajectories import History, RolloutFailure, Trajectory, TrajectoryGroup, has_spread
from art_ray.types import Outcome

__all__ = [
    "FORMAT_VERSION",
    "SCHEMA",
    "GroupWriter",
    "file_metadata",
    "iterate_trajectory_groups_parquet",
    "read_trajectory_groups_parquet",
]

FORMAT_VERSION = 1
_VERSION_KEY = "art_ray.format_version"
_NUM_GROUPS_KEY = "art_ray.num_groups"
_ROWLESS_KEY = "art_ray.groups_without_rows"

ROWS_AT_ONCE = 2048
"""Rows of one row group, at most; memory holds one row group while writing, and one while reading."""
CHARACTERS_AT_ONCE = 32 << 20
"""A row group also ends when its texts reach this length; a single row may be longer."""

_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("trainable", pa.bool_()),
    ]
)
_FAILURE = pa.struct([("type", pa.string()), ("message", pa.string()), ("traceback", pa.string())])

SCHEMA = pa.schema(
    [
        # As ART has them, in its order.
        ("group_index", pa.int64()),
        ("group_metadata", pa.string()),
        ("group_metrics", pa.string()),
        ("group_logs", pa.list_(pa.string())),
        ("reward", pa.float64()),
        ("metrics", pa.string()),
        ("metadata", pa.string()),
        ("tools", pa.string()),
        ("logs", pa.list_(pa.string())),
        ("messages", pa.list_(_MESSAGE)),
        # What people query.
        ("outcome", pa.string()),
        ("duration", pa.float64()),
        ("num_answers", pa.int32()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        # How `token_ids` and `logprobs` divide into answers.
        ("answer_lengths", pa.list_(pa.int32())),
        ("answer_versions", pa.list_(pa.int64())),
        ("prompt_token_ids", pa.list_(pa.list_(pa.int32()))),
        # On a group's first row.
        ("group_exceptions", pa.list_(_FAILURE)),
        # What no column says; null on most rows.
        ("group_residue", pa.string()),
        ("residue", pa.string()),
    ],
    metadata={_VERSION_KEY: str(FORMAT_VERSION)},
)


_OF_TRAJECTORY = (
    "metrics", "metadata", "tools", "logs", "duration", "num_answers", "finish_reason", "policy_version", "residue"
)  # fmt: skip
_OF_ROW = (
    "group_index", "group_metadata", "group_metrics", "group_logs", "reward", *_OF_TRAJECTORY, "outcome",
    "group_exceptions", "group_residue",
)  # fmt: skip
"""The columns that a row is made of, in the order in which the writer keeps them; the others come from lists."""


class GroupWriter:
    """Writes groups to a parquet file as they come, one row group in memory at a time.

    Args:
        path: the file; it is complete only after `close`.
        for_training: whether rows say what training will make of them, as far as logging knows.
    """

    def __init__(self, path: Path, *, for_training: bool = False) -> None:
        # Dictionaries pay where values repeat. Free text and token ids do not, and hashing them costs a third of the time.
        repeated = ["group_index", "group_metadata", "group_metrics", "outcome", "finish_reason", "policy_version", "tools",
                    "messages.list.element.role"]  # fmt: skip
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=repeated)
        self._for_training = for_training
        self._rowless: list[tuple[int, dict[str, Any]]] = []
        self._num_groups = 0
        self._clear()

    def write(self, group: TrajectoryGroup) -> tuple[list[tuple[float, Mapping[str, float]]], list[Outcome]]:
        """Adds a group; returns the checked reward and metrics of each trajectory, and the outcome of each rollout.

        Raises:
            TypeError: a value in it is no number where one is needed, or could not be read back.
        """
        index, where = self._num_groups, f"group {self._num_groups}"
        if not isinstance(group, TrajectoryGroup):
            raise TypeError(f"{where} is {type(group).__name__}, not a TrajectoryGroup: {group!r:.80}")
        shared, residue = _group_columns(group, where)
        checked = [_checked(trajectory, f"{where}, trajectory {i}") for i, trajectory in enumerate(group.trajectories)]
        spread = has_spread([reward for reward, _ in checked if math.isfinite(reward)])
        outcomes = []
        failures = [_failure(failure) for failure in group.exceptions]
        for i, (trajectory, (reward, metrics)) in enumerate(zip(group.trajectories, checked, strict=True)):
            tokens, columns = self._columns_of(trajectory, metrics, f"{where}, trajectory {i}")
            outcomes.append(outcome := self._outcome(reward, tokens, spread))
            of_first = (failures or None, residue) if i == 0 else (None, None)
            self._rows.append((index, *shared.values(), reward, *columns, str(outcome), *of_first))
        if not group.trajectories:
            self._rowless.append((index, {**shared, "group_exceptions": failures, "group_residue": residue}))
        self._num_groups += 1
        if len(self._rows) >= ROWS_AT_ONCE or self._characters >= CHARACTERS_AT_ONCE:
            self._flush()
        return checked, outcomes + [Outcome.FAILED] * len(failures)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Writes what is left and the end of the file, with `metadata` in it."""
        self._flush()
        own = {_NUM_GROUPS_KEY: str(self._num_groups), _ROWLESS_KEY: json_text(self._rowless)}
        self._file.add_key_value_metadata({**metadata, **own})
        self._file.close()

    def abandon(self) -> None:
        """Lets go of the file, which is to be deleted."""
        try:
            self._file.close()
        except OSError:  # the disk that made us give up may refuse this, too
            pass

    def _outcome(self, reward: float, tokens: Tokens, spread: bool) -> Outcome:
        if not math.isfinite(reward):
            return Outcome.NOT_SCORED
        if not self._for_training:
            return Outcome.SCORED
        if not tokens.token_ids:
            return Outcome.NO_LOGPROBS
        return Outcome.SCORED if spread else Outcome.NO_SPREAD

    def _columns_of(
        self, trajectory: Trajectory, metrics: Mapping[str, float], where: str
    ) -> tuple[Tokens, tuple[Any, ...]]:
        """Returns the tokens of a trajectory and its columns `_OF_TRAJECTORY`; keeps its messages and tokens."""
        tokens = Tokens()
        residue: dict[str, Any] = {}
        self._add_messages(trajectory, tokens, residue, where)
        if trajectory.additional_histories:
            residue["histories"] = [
                _history(history, tokens, f"{where}, history {i}")
                for i, history in enumerate(trajectory.additional_histories)
            ]
        metadata = _json_column("metadata", trajectory.metadata, residue, where)
        tools = _json_column("tools", trajectory.tools, residue, where)
        if trajectory.tools is not None and not trajectory.tools:
            residue["tools"] = []
        duration = metrics.get("duration")
        columns = (
            _metrics_column(metrics, residue),
            metadata,
            tools,
            _texts_column("logs", trajectory.logs, residue, where),
            None if duration is None else float(duration),
            tokens.num_answers,
            tokens.finish_reason,
            min(tokens.versions, default=None),
            rest := json_text(residue) if residue else None,
        )
        self._tokens.append(tokens)
        self._characters += sum(len(text) for text in (metadata, tools, rest) if text)
        if tokens.prompt_token_ids:
            self._characters += 4 * sum(map(len, tokens.prompt_token_ids))
        return tokens, columns

    def _add_messages(self, trajectory: Trajectory, tokens: Tokens, residue: dict[str, Any], where: str) -> None:
        plain = plain_conversation(trajectory.messages_and_choices)
        if plain is not None:
            roles, contents = plain
            absent = [None] * len(roles)
            fields: Any = roles, contents, absent, absent, [False] * len(roles)
            self._characters += sum(map(len, contents))
        else:
            columns, in_messages = conversation_columns(trajectory.messages_and_choices, tokens, where)
            if in_messages:
                residue["messages"] = in_messages
            fields = zip(*columns, strict=True)
            self._characters += sum(len(column[1]) for column in columns if column[1])
        for kept, values in zip(self._messages, fields, strict=False):  # no fields at all: an empty conversation
            kept += values
        self._message_ends.append(len(self._messages[0]))

    def _clear(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._messages: list[list[Any]] = [[] for _ in _MESSAGE]
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
        arrays = [pa.array(values, type=entry.type) for values, entry in zip(self._messages, _MESSAGE, strict=True)]
        return pa.ListArray.from_arrays(
            pa.array(self._message_ends, type=pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(_MESSAGE))
        )


def _checked(trajectory: Trajectory, where: str) -> tuple[float, Mapping[str, float]]:
    return float(checked_number(trajectory.reward, f"{where}: reward")), checked_metrics(
        trajectory.metrics, f"{where}: metrics"
    )


def _group_columns(group: TrajectoryGroup, where: str) -> tuple[dict[str, Any], str | None]:
    residue: dict[str, Any] = {}
    columns = {
        "group_metadata": _json_column("metadata", group.metadata, residue, where),
        "group_metrics": _metrics_column(checked_metrics(group.metrics, f"{where}: metrics"), residue),
        "group_logs": _texts_column("logs", group.logs, residue, where),
    }
    encodable = [failure for failure in group.exceptions if not _is_encodable(failure)]
    if encodable:
        residue["exceptions"] = [failure.model_dump() for failure in group.exceptions]
    return columns, json_text(residue) if residue else None


def _is_encodable(failure: RolloutFailure) -> bool:
    return all(is_encodable_text(text) for text in (failure.type, failure.message, failure.traceback))


def _failure(failure: RolloutFailure) -> dict[str, str]:
    return {name: text.encode("utf-8", "replace").decode() for name, text in failure.model_dump().items()}


def _metrics_column(metrics: dict[str, float], residue: dict[str, Any]) -> str | None:
    """Returns finite metrics as JSON; ART's reader takes no null, so that the others are in the residue alone."""
    if not metrics:
        return None
    text = flat_json_text(metrics)
    if text is None and not all(map(math.isfinite, metrics.values())):
        residue["metrics"] = encoded(metrics, "metrics")
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return text or (json_text(metrics) if metrics else None)


def _json_column(name: str, value: Any, residue: dict[str, Any], where: str) -> str | None:
    if not value:
        return None
    if type(value) is dict and (text := flat_json_text(value)) is not None:
        return text
    exact = encoded(value, f"{where}: {name}")
    shown = readable(exact)
    if shown != exact:
        residue[name] = exact
    return json_text(shown)


def _texts_column(name: str, texts: list[str], residue: dict[str, Any], where: str) -> list[str] | None:
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{where}: a line of {name} must be a text, got {type(text).__name__}: {text!r:.80}")
    if all(map(is_encodable_text, texts)):
        return list(texts) or None
    residue[name] = list(texts)
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


def file_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the texts in a parquet file's metadata.

    Raises:
        LedgerFormatError: it is no parquet file.
    """
    try:
        with pq.ParquetFile(path) as file:
            return _texts_of(file)
    except pa.ArrowInvalid as error:
        raise LedgerFormatError(f"{os.fspath(path)} is no parquet file: {error}") from None


def _texts_of(file: pq.ParquetFile) -> dict[str, str]:
    found = file.metadata.metadata or {}
    return {key.decode(): value.decode() for key, value in found.items() if key.startswith(b"art_ray.")}


def read_trajectory_groups_parquet(path: str | os.PathLike[str]) -> list[TrajectoryGroup]:
    """Returns the trajectory groups in a file that art_ray or ART wrote, equal to those that were logged.

    Raises:
        FileNotFoundError: there is no such file.
        LedgerFormatError: a file of a newer format version, or none of the two.
    """
    return list(iterate_trajectory_groups_parquet(path))


def iterate_trajectory_groups_parquet(path: str | os.PathLike[str]) -> Iterator[TrajectoryGroup]:
    """Yields the groups of `read_trajectory_groups_parquet` in order, with one row group in memory at a time."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise LedgerFormatError(f"{os.fspath(path)} is no parquet file: {error}") from None
    with file:
        texts = _texts_of(file)
        _refuse_newer(path, texts)
        missing = [name for name in SCHEMA.names[:10] if name not in file.schema_arrow.names]
        if "reward" in missing or "messages" in missing or "group_index" in missing:
            raise LedgerFormatError(f"{os.fspath(path)} holds no trajectories: it lacks the columns {missing}")
        rowless = {index: columns for index, columns in json.loads(texts.get(_ROWLESS_KEY, "[]"))}
        yield from _groups_of(_rows_of(file), rowless)


def _refuse_newer(path: str | os.PathLike[str], texts: Mapping[str, str]) -> None:
    version = texts.get(_VERSION_KEY, "0")
    if not version.isdecimal() or int(version) > FORMAT_VERSION:
        raise LedgerFormatError(
            f"{os.fspath(path)} has format version {version}; this art_ray reads versions up to {FORMAT_VERSION}: "
            "install a newer one"
        )


def _rows_of(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    names = [name for name in file.schema_arrow.names if name in SCHEMA.names]
    for batch in file.iter_batches(batch_size=256, columns=names):
        yield from batch.to_pylist()


def _groups_of(rows: Iterator[dict[str, Any]], rowless: dict[int, dict[str, Any]]) -> Iterator[TrajectoryGroup]:
    pending = sorted(rowless.items())
    current: int | None = None
    first: dict[str, Any] = {}
    trajectories: list[Trajectory] = []
    for row in rows:
        if row["reward"] is None and row["messages"] is None:
            continue  # ART skips these, too
        if row["group_index"] != current:
            if current is not None:
                yield _group(first, trajectories)
            current, first, trajectories = row["group_index"], row, []
            while pending and pending[0][0] < current:
                yield _group(pending.pop(0)[1], [])
        trajectories.append(_trajectory(row))
    if current is not None:
        yield _group(first, trajectories)
    for _, columns in pending:
        yield _group(columns, [])


def _group(columns: Mapping[str, Any], trajectories: list[Trajectory]) -> TrajectoryGroup:
    residue = json.loads(columns.get("group_residue") or "{}")
    failures = residue.get("exceptions") or columns.get("group_exceptions") or []
    return TrajectoryGroup(
        trajectories,
        exceptions=[RolloutFailure(**failure) for failure in failures],
        metadata=_from_json("metadata", columns["group_metadata"], residue) or {},
        metrics=_from_json("metrics", columns["group_metrics"], residue) or {},
        logs=residue.get("logs") or columns["group_logs"] or [],
    )


def _from_json(name: str, column: str | None, residue: Mapping[str, Any]) -> Any:
    return decoded(residue[name]) if name in residue else json.loads(column) if column else None


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    residue = json.loads(row.get("residue") or "{}")
    tokens = TokenReader(
        row.get("prompt_token_ids") or [],
        row.get("answer_lengths") or [],
        row.get("token_ids") or [],
        row.get("logprobs") or [],
    )
    in_messages = residue.get("messages", {})
    items = [
        decode_message(Columns(**message), in_messages.get(str(position)), tokens)
        for position, message in enumerate(row["messages"] or [])
    ]
    histories = [
        History(
            messages_and_choices=[
                decode_message(Columns(*fields), history["residues"].get(str(position)), tokens)
                for position, fields in enumerate(history["messages"])
            ],
            tools=decoded(history["tools"]) if "tools" in history else None,
        )
        for history in residue.get("histories", [])
    ]
    return Trajectory(
        items,
        tools=_from_json("tools", row.get("tools"), residue),
        additional_histories=histories,
        reward=math.nan if row["reward"] is None else row["reward"],
        metrics=_from_json("metrics", row["metrics"], residue) or {},
        metadata=_from_json("metadata", row["metadata"], residue) or {},
        logs=residue.get("logs") or row["logs"] or [],
    )
