"""What is remembered of one model: trajectories, metrics, and what was best. Files first; reporters read them."""

from __future__ import annotations

import json
import logging
import math
import operator
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from art_ray.ledger import checkpoints, learning_rate
from art_ray.ledger.about import about
from art_ray.ledger.files import (
    append_line,
    claim,
    explained,
    locked,
    make_dirs,
    remove_abandoned,
    temporary,
    write_atomically,
)
from art_ray.ledger.history import History
from art_ray.ledger.metrics import BUILT_IN, StepMetrics, checked_metrics, warn_of_built_in
from art_ray.ledger.parquet import file_metadata
from art_ray.ledger.parquet_writer import GroupWriter
from art_ray.ledger.paths import model_dir, step_files, validate_part
from art_ray.ledger.reporters import Reporting, Subject, checked_reporters
from art_ray.ledger.state import State
from art_ray.trajectories import TrajectoryGroup
from art_ray.types import FrozenConfig

if TYPE_CHECKING:
    import polars

__all__ = ["STALE_SPLIT", "Ledger", "LedgerConfig", "LogReceipt"]

logger = logging.getLogger(__name__)

TRAINING_SPLIT = "train"
STALE_SPLIT = "stale"
"""Of groups that were too old to be trained."""
EXACT = 2**53
"""Largest size up to which every integer is a double, too."""
REMEMBERED_REQUESTS = 64
"""Requests without a parquet file that `state.json` remembers; one with a file is remembered in the file."""
_REQUEST_KEY, _RECORD_KEY = "art_ray.request_id", "art_ray.log_record"


class LedgerConfig(FrozenConfig):
    """Which model a ledger is of, and who is told."""

    base_path: str
    """Folder below which everything lies."""
    project: str
    name: str
    report_metrics: list[str] | None = None
    """Names of reporters; None: wandb if its key is in the environment; []: none."""
    model_json: dict[str, Any] = pydantic.Field(default_factory=dict, repr=False)
    """What `model.json` says about the model. Secrets are left out; see `about`."""


@dataclass(frozen=True)
class LogReceipt:
    """What one log call wrote."""

    parquet_path: str | None
    """None where no groups were given."""
    metrics: dict[str, float] = field(default_factory=dict)
    """As in the history, with the split's prefix; what is null there is NaN here."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """How many rollouts ended as each `Outcome`, as far as logging knows; they sum to the number given."""


@dataclass(frozen=True)
class _Record:
    """One log call as it is kept for a repetition of its request."""

    line: str
    """The line of the history, exactly."""
    from_byte: int
    """The line is not before this byte of the history."""
    outcomes: dict[str, int]

    def receipt(self, path: Path | None) -> LogReceipt:
        row = json.loads(self.line)
        metrics = {
            key: math.nan if value is None else value
            for key, value in row.items()
            if key not in ("step", "recorded_at")
        }
        return LogReceipt(None if path is None else str(path), metrics, self.outcomes)


class Ledger:
    """The files of one model. Any number of ledgers, in any number of processes, may write to one model at once.

    Creating one writes nothing and opens no run of a reporter. Methods may be called from any thread.

    Raises:
        InvalidNameError: a project or name that cannot be part of a path.
        ConfigError: an unknown reporter, or one whose package is absent.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self.folder = model_dir(config.base_path, config.project, config.name)
        self._history = History(self.folder / "history.jsonl")
        self._state = State(self.folder)
        self._about = about({"project": config.project, "name": config.name, **config.model_json})
        subject = Subject(self.folder, config.project, config.name, self._about)
        self._reporting = Reporting(checked_reporters(config.report_metrics), subject)
        self._lock = threading.RLock()
        self._model_written = False
        self._receipts: OrderedDict[str, LogReceipt] = OrderedDict()
        self._requests_of_files: dict[Path, str | None] = {}

    def log(
        self,
        groups: Iterable[TrajectoryGroup] | None,
        *,
        split: str,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> LogReceipt:
        """Writes groups to a parquet file and one line to the history; on return both are on disk, or neither is.

        Args:
            groups: consumed once, as they come; a row group of them is in memory at a time.
            split: the folder and the metrics' prefix.
            step: the step they belong to.
            metrics: more values for the same line. Nothing at all given: nothing is written.
            request_id: a call with the id of an earlier one, of this process or one before it, writes nothing that the
                earlier one had written, and returns the same receipt.

        Raises:
            TypeError: an item that is no group, or a value that is no number or could not be read back.
            InvalidNameError: a split that cannot be part of a path.
            LedgerWriteError: the disk did not take it; nothing earlier is harmed.
        """
        validate_part("split", split)
        step = checked_step(step)
        given = {} if metrics is None else checked_metrics(metrics, "metrics")
        with self._lock, explained(f"logging {split!r} at step {step} to {self.folder}"):
            receipt = self._repeated(request_id, split, step) if request_id is not None else None
            if receipt is None:
                receipt = self._log(groups, split, step, given, request_id)
            if request_id is not None:
                self._receipts[request_id] = receipt
                while len(self._receipts) > REMEMBERED_REQUESTS:
                    self._receipts.popitem(last=False)
        if receipt.metrics:
            self._reporting.history_grew()
        return receipt

    def write_model(self) -> None:
        """Writes `model.json`, if it does not say so already. The first `log` does this, too."""
        with explained(f"writing {self.folder / 'model.json'}"):
            make_dirs(self.folder)
            content = json.dumps(self._about, indent=1).encode()
            path = self.folder / "model.json"
            if not (path.exists() and path.read_bytes() == content):
                write_atomically(path, content)

    def history(self) -> polars.DataFrame:
        """Returns the history as a frame: one row per line, one column per key that ever appeared."""
        return self._history.frame()

    def best_step(self, metric: str, mode: Literal["max", "min"] = "max") -> int | None:
        """Returns the step with the best mean of `metric`; None where it has no finite value. See `History`."""
        return self._history.best_step(metric, mode)

    def steps_to_keep(
        self, metric: str, latest_step: int, default_metric: str = checkpoints.DEFAULT_METRIC
    ) -> list[int]:
        """Returns the steps whose checkpoints must stay. See `checkpoints.steps_to_keep`."""
        return checkpoints.steps_to_keep(self._history, metric, latest_step, default_metric)

    def learning_rate_multiplier(self) -> float:
        """Returns the factor for the learning rate of the next step. See `learning_rate`."""
        return learning_rate.learning_rate_multiplier(self._history)

    def close(self, timeout_s: float = 30.0) -> None:
        """Gives reporters up to `timeout_s` seconds to send what they have not; what is left is sent at the next start.

        The ledger may be used again: reporters then start again, in the same runs.
        """
        self._reporting.close(timeout_s)

    def _log(
        self,
        groups: Iterable[TrajectoryGroup] | None,
        split: str,
        step: int,
        given: dict[str, float],
        request_id: str | None,
    ) -> LogReceipt:
        remaining = iter(groups if groups is not None else ())
        first = next(remaining, None)
        if first is None and not given:
            return LogReceipt(None)
        self._prepare_folder()
        if first is None:
            record = self._record(split, step, given, StepMetrics())
            self._remember(request_id, record)
            with explained(f"writing {self._history.path}"), locked(self.folder):
                append_line(self._history.path, record.line.encode())
            return record.receipt(None)
        folder = self.folder / "trajectories" / split
        with explained(f"writing the trajectories of step {step} to {folder}"):
            make_dirs(folder)
            with temporary(folder) as beside:
                record = self._write_groups(beside, _chained(first, remaining), split, step, given, request_id)
                with locked(self.folder):
                    path = claim(beside, folder, step)
                    try:
                        append_line(self._history.path, record.line.encode())
                    except OSError:
                        path.unlink()  # the call failed: no trace of it stays, and it may be made again
                        raise
        return record.receipt(path)

    def _write_groups(
        self,
        path: Path,
        groups: Iterator[TrajectoryGroup],
        split: str,
        step: int,
        given: dict[str, float],
        request_id: str | None,
    ) -> _Record:
        computed = StepMetrics()
        writer = GroupWriter(path, for_training=split == TRAINING_SPLIT, are_stale=split == STALE_SPLIT)
        try:
            for group in groups:
                rows, outcomes = writer.write(group)
                computed.add(group, rows)
                computed.outcomes.update(outcomes)
            record = self._record(split, step, given, computed, with_groups=True)
            kept = {_RECORD_KEY: json.dumps(asdict(record))}
            writer.close(kept if request_id is None else {**kept, _REQUEST_KEY: request_id})
        except BaseException:
            writer.abandon()
            raise
        return record

    def _record(
        self, split: str, step: int, given: dict[str, float], computed: StepMetrics, *, with_groups: bool = False
    ) -> _Record:
        values = computed.result() if with_groups else {}
        for name in [name for name in given if with_groups and name in BUILT_IN]:
            warn_of_built_in(name)
        values |= {name: value for name, value in given.items() if not (with_groups and name in BUILT_IN)}
        line: dict[str, Any] = {}
        for name, value in values.items():
            finite = math.isfinite(value)
            if not finite:
                logger.warning("%s/%s is %s at step %d: written as null", split, name, value, step)
            exact = not finite or abs(value) <= EXACT  # a larger integer is one only to some readers of JSON
            line[f"{split}/{name}"] = (value if exact else float(value)) if finite else None
        line["step"] = step
        line["recorded_at"] = datetime.now(UTC).isoformat(timespec="microseconds")
        outcomes = {outcome.value: number for outcome, number in computed.outcomes.items()}
        return _Record(json.dumps(line, allow_nan=False), self._history.size_bytes(), outcomes)

    def _prepare_folder(self) -> None:
        if not self._model_written:
            self.write_model()
            remove_abandoned(self.folder)
            self._model_written = True

    def _repeated(self, request_id: str, split: str, step: int) -> LogReceipt | None:
        """Returns the receipt of an earlier call with this id, after adding what it had no time to write."""
        if request_id in self._receipts:
            return self._receipts[request_id]
        path = self._file_of(request_id, split, step)
        if path is not None:
            kept = json.loads(file_metadata(path)[_RECORD_KEY])
        else:
            kept = self._state.read().get("requests", {}).get(request_id)
            if kept is None:
                return None
        record = _Record(**kept)
        line = record.line.encode()
        with explained(f"writing {self._history.path}"), locked(self.folder):
            if not self._history.has_line(line, record.from_byte):
                append_line(self._history.path, line)
        return record.receipt(path)

    def _file_of(self, request_id: str, split: str, step: int) -> Path | None:
        for path in reversed(step_files(self.folder / "trajectories" / split, step)):
            if path not in self._requests_of_files:
                try:
                    self._requests_of_files[path] = file_metadata(path).get(_REQUEST_KEY)
                except (OSError, ValueError):
                    self._requests_of_files[path] = None  # not ours, or damaged: surely not this request
            if self._requests_of_files[path] == request_id:
                return path
        return None

    def _remember(self, request_id: str | None, record: _Record) -> None:
        if request_id is None:
            return
        with self._state.changed() as state:
            requests = state.setdefault("requests", {})
            requests[request_id] = asdict(record)
            for oldest in list(requests)[:-REMEMBERED_REQUESTS]:
                del requests[oldest]


def _chained(first: TrajectoryGroup, rest: Iterator[TrajectoryGroup]) -> Iterator[TrajectoryGroup]:
    yield first
    yield from rest


def checked_step(step: object) -> int:
    """Returns `step` as an int.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative, or too large for a file's column.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"step must be an integer, got {type(step).__name__}: {step!r:.80}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"step must be 0 or more, got {number}")
    return number
