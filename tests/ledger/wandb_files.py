"""Reads what wandb wrote offline: its records are its own protobuf messages, in the framing of LevelDB's log files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
HEADER = 7
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position, parts = HEADER, b""
    while position + HEADER <= len(content):
        rest = BLOCK - position % BLOCK
        if rest < HEADER:
            position += rest
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        part = content[position + HEADER : position + HEADER + length]
        if kind == 0 or len(part) < length:
            return
        position += HEADER + length
        parts += part
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


class OfflineRun:
    """All that the offline folders below a model's folder say, in the order in which they were made."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        self.rows: list[dict[str, Any]] = []
        self.ids: set[str] = set()
        self.step_metrics: dict[str, str] = {}
        self.config: dict[str, Any] = {}
        for path in self.files:
            for record in records(path):
                self._take(record)

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.ids.add(record.run.run_id)
            self.config |= {_key(item): json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "metric":
            self.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "history":
            self.rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})

    def values(self) -> set[tuple[int, str, float]]:
        """(step, metric, value) of everything that was reported."""
        return {
            (row["training_step"], key, value)
            for row in self.rows
            for key, value in row.items()
            if not key.startswith("_") and key != "training_step"
        }


def values_of(history_rows: list[dict[str, Any]]) -> set[tuple[int, str, float]]:
    return {
        (row["step"], key, value)
        for row in history_rows
        for key, value in row.items()
        if "/" in key and value is not None
    }
