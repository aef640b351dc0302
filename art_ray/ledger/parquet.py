"""Trajectory groups as parquet files: ten columns that ART reads, then ours, and back again without loss.

One row per trajectory. What belongs to a group is on each of its rows (as ART has it) or, for failures and for what
JSON cannot say, on its first row. Groups without a trajectory have no row: they are in the file's metadata.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from art_ray.errors import LedgerFormatError
from art_ray.ledger.answers import Columns, TokenReader, decode_message
from art_ray.ledger.codec import decoded
from art_ray.trajectories import History, RolloutFailure, Trajectory, TrajectoryGroup

__all__ = [
    "FORMAT_VERSION",
    "SCHEMA",
    "file_metadata",
    "iterate_trajectory_groups_parquet",
    "read_trajectory_groups_parquet",
]

FORMAT_VERSION = 1
_VERSION_KEY = "art_ray.format_version"
NUM_GROUPS_KEY = "art_ray.num_groups"
ROWLESS_KEY = "art_ray.groups_without_rows"

MESSAGE = pa.struct(
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
        ("messages", pa.list_(MESSAGE)),
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
        rowless = dict(json.loads(texts.get(ROWLESS_KEY, "[]")))
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
    failures = decoded(residue.get("exceptions")) or columns.get("group_exceptions") or []
    return TrajectoryGroup(
        trajectories,
        exceptions=[RolloutFailure(**failure) for failure in failures],
        metadata=_from_json("metadata", columns["group_metadata"], residue) or {},
        metrics=_from_json("metrics", columns["group_metrics"], residue) or {},
        logs=decoded(residue.get("logs")) or columns["group_logs"] or [],
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
        logs=decoded(residue.get("logs")) or row["logs"] or [],
    )
