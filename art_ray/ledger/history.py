"""The history of a model: one JSON line per log call, read as a stream and never trusted to be whole."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pydantic_core

from art_ray.ledger.files import append_line, explained, locked, make_dirs

if TYPE_CHECKING:
    import polars

__all__ = ["History", "MetricSummary", "StepMeans", "row_of"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
_CLOSING = ord("}")
_NO_METRICS = frozenset(("step", "recorded_at"))
RELATIVE_TIE = 1e-12
"""Means closer than this share of their size are equal: they differ by the rounding of their sums."""


@dataclass(frozen=True)
class StepMeans:
    """The mean of one metric at each step that has it, in the order of steps."""

    steps: np.ndarray
    """[S] int64, ascending."""
    means: np.ndarray
    """[S] float64, all finite."""

    def best_step(self, mode: Literal["max", "min"] = "max") -> int | None:
        """Returns the step with the best mean; a tie goes to the higher step. None where there is no step."""
        if not len(self.steps):
            return None
        values = self.means if mode == "max" else -self.means
        best = values.max()
        return int(self.steps[values >= best - abs(best) * RELATIVE_TIE].max())


@dataclass
class MetricSummary:
    """What there is of one metric, over all lines that have a finite value of it."""

    count: int = 0
    """Such lines."""
    last_step: int | None = None
    """The highest step among them."""
    last: float | None = None
    """The value at that step; the one that was logged last, where there are several."""
    low: float = math.inf
    high: float = -math.inf

    def add(self, step: int, value: float) -> None:
        """Takes the value of one more line."""
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)
        if self.last_step is None or step >= self.last_step:
            self.last_step, self.last = step, value


class History:
    """The lines of a `history.jsonl`.

    Reading is a stream in bounded memory. A line that is no JSON object (a torn last line, most often) is skipped,
    counted in `num_skipped`, and reported; lines may hold any keys, and any numbers, anywhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.num_skipped = 0
        """Unreadable lines that the latest complete pass over the file met. A pass for one metric parses only lines
        that may have it, and torn ones."""

    def append(self, line: dict[str, Any]) -> None:
        """Writes `line` to disk, whole, whatever other processes write at the same moment.

        Raises:
            LedgerWriteError: it could not be written; what was there before is unharmed.
            ValueError: it contains a NaN or an infinity, which JSON has no word for.
        """
        with explained(f"writing {self.path}"):
            make_dirs(self.path.parent)
            with locked(self.path.parent):
                append_line(self.path, json.dumps(line, allow_nan=False).encode())

    def size_bytes(self) -> int:
        """Returns the size of the file; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def has_line(self, line: bytes, from_byte: int) -> bool:
        """Returns whether exactly `line` (without its end) was appended at or after `from_byte`."""
        return any(line == candidate for candidate, _ in self.lines(from_byte))

    def lines(self, from_byte: int = 0) -> Iterator[tuple[bytes, int]]:
        """Yields each complete line without its end, and the offset of the byte after it.

        A last line without an end may still be being written: it is not yielded.
        """
        for chunk, offset in self._chunks(from_byte):
            for line in chunk.splitlines(keepends=True):
                offset += len(line)
                if line.endswith(b"\n"):
                    yield line[:-1], offset

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each line as a dict, in order."""
        for rows in self._parsed(None):
            yield from rows

    def column(self, metric: str) -> Iterator[tuple[int, float]]:
        """Yields (step, value) for each line that has a finite value of `metric`, in order."""
        for rows in self._parsed(metric):
            yield from _finite_pairs(rows, metric)

    def step_means(self, metric: str) -> StepMeans:
        """Returns the mean of `metric` at each step that has a finite value of it.

        Memory: some 50 bytes per distinct step, whatever the number of lines.
        """
        found = _Sums()
        for rows in self._parsed(metric):
            found.add(*_arrays(rows, metric))
        return found.means()

    def best_step(self, metric: str, mode: Literal["max", "min"] = "max") -> int | None:
        """Returns the step with the best mean of `metric`; a tie goes to the higher step.

        None where no line has a finite value of it.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode is 'max' or 'min', got {mode!r}")
        return self.step_means(metric).best_step(mode)

    def summaries(self) -> dict[str, MetricSummary]:
        """Returns what there is of each metric, by name; one that never had a finite value is in it too.

        One pass in bounded memory, over all values of all lines.
        """
        found: dict[str, MetricSummary] = {}
        for rows in self._parsed(None):
            for metric in {key: None for row in rows for key in row if key not in _NO_METRICS}:
                seen = found.setdefault(metric, MetricSummary())
                for step, value in _finite_pairs(rows, metric):
                    seen.add(step, value)
        return found

    def metrics(self) -> list[str]:
        """Returns the names of all metrics that any line has, sorted."""
        names: set[str] = set()
        for row in self.rows():
            names.update(row)
        return sorted(names - _NO_METRICS)

    def frame(self) -> polars.DataFrame:
        """Returns one row per line, with a column for every key that any line has; absent values are null.

        `step` is Int64, metrics are Float64, and whatever is no number anywhere makes its column String.
        """
        import polars

        columns: dict[str, list[Any]] = {"step": [], "recorded_at": []}
        num_rows = 0
        for row in self.rows():
            for key, value in row.items():
                column = columns.setdefault(key, [])
                column.extend([None] * (num_rows - len(column)))
                column.append(value)
            num_rows += 1
        series = []
        for key, column in columns.items():
            column.extend([None] * (num_rows - len(column)))
            series.append(_series(polars, key, column))
        return polars.DataFrame(series)

    def _chunks(self, from_byte: int = 0) -> Iterator[tuple[bytes, int]]:
        """Yields pieces of the file that end with a line (but for a torn last one), and where each starts."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(from_byte)
            while chunk := file.read(CHUNK_BYTES):
                chunk += file.readline()
                yield chunk, from_byte
                from_byte += len(chunk)

    def _parsed(self, needed: str | None) -> Iterator[list[dict[str, Any]]]:
        """Yields lines as dicts, many at a time; with `needed`, perhaps only those lines that have this key."""
        key = json.dumps(needed)[1:-1].encode() if needed is not None else b""
        skipped = 0
        for chunk, _ in self._chunks():
            # A key that JSON escapes could be spelled in several ways: every line is then parsed.
            exact = needed is not None and b"\\" not in key
            lines = chunk.split(b"\n")
            # A torn line, which lacks the end, is taken along, to be counted.
            lines = [line for line in lines if line and (not exact or key in line or line[-1] != _CLOSING)]
            rows = _rows_at_once(lines)
            if rows is None:
                rows = [row for line in lines if (row := row_of(line)) is not None]
            skipped += len(lines) - len(rows)
            yield rows
        if skipped:
            logger.warning("%s: skipped %d line(s) that are no JSON object (torn by a crash?)", self.path, skipped)
        self.num_skipped = skipped


class _Sums:
    """Sums and counts of values by step, of any number of values in any order of steps."""

    MERGED_AT_ONCE = 100_000

    def __init__(self) -> None:
        self._steps: np.ndarray = np.empty(0, np.int64)
        self._sums: np.ndarray = np.empty(0)
        self._counts: np.ndarray = np.empty(0)
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_pending = 0

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Takes values [N] and their steps [N]."""
        self._pending.append((steps, values))
        self._num_pending += len(steps)
        # As much as there is: each merge sorts everything, and so happens ever more seldom.
        if self._num_pending > max(self.MERGED_AT_ONCE, len(self._steps)):
            self._merge()

    def means(self) -> StepMeans:
        self._merge()
        return StepMeans(self._steps, self._sums / self._counts)

    def _merge(self) -> None:
        steps, where = np.unique(np.concatenate([self._steps, *(s for s, _ in self._pending)]), return_inverse=True)
        sums = np.concatenate([self._sums, *(values for _, values in self._pending)])
        counts = np.concatenate([self._counts, np.ones(self._num_pending)])
        self._steps = steps
        self._sums, self._counts = (np.bincount(where, weights, len(steps)) for weights in (sums, counts))
        self._pending, self._num_pending = [], 0


def _rows_at_once(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """Returns all lines parsed in one call, or None where one of them is unusual."""
    try:
        rows = pydantic_core.from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    # Two objects on one line, or a line that is no object, would be counted wrongly here.
    return rows if len(rows) == len(lines) and all(type(row) is dict for row in rows) else None


def _arrays(rows: list[dict[str, Any]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of the rows that have a finite value of `metric`."""
    found = [(row["step"], row[metric]) for row in rows if metric in row and "step" in row]
    steps, values = [step for step, _ in found], [value for _, value in found]
    if set(map(type, steps)) <= {int} and set(map(type, values)) <= {float, int}:  # as our own lines have them
        with contextlib.suppress(OverflowError):  # an integer that no column can hold
            numbers = np.asarray(values, np.float64)
            finite = np.isfinite(numbers)
            return np.asarray(steps, np.int64)[finite], numbers[finite]
    pairs = list(_finite_pairs(rows, metric))
    return np.asarray([step for step, _ in pairs], np.int64), np.asarray([value for _, value in pairs], np.float64)


def _finite_pairs(rows: list[dict[str, Any]], metric: str) -> Iterator[tuple[int, float]]:
    for row in rows:
        value, step = row.get(metric), row.get("step")
        if isinstance(value, (int, float)) and isinstance(step, (int, float)):
            number = _finite(value)
            if number is not None and math.isfinite(step) and abs(step) < 2**63:
                yield int(step), number


def row_of(line: bytes) -> dict[str, Any] | None:
    """Returns a line as a dict, or None where it is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a double
        return None
    return number if math.isfinite(number) else None


def _series(polars: Any, key: str, column: list[Any]) -> polars.Series:
    if key != "recorded_at" and all(value is None or isinstance(value, (bool, int, float)) for value in column):
        if key == "step" and all(value is None or float(value).is_integer() for value in column):
            return polars.Series(key, [None if v is None else int(v) for v in column], dtype=polars.Int64)
        return polars.Series(key, [None if v is None else _number(v) for v in column], dtype=polars.Float64)
    texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in column]
    return polars.Series(key, texts, dtype=polars.String)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)
