"""A run as it lies on the disk: which there are below a base path, and what each holds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from art_ray.errors import ArtRayError, ConfigError, InvalidNameError, LedgerFormatError, UnknownMetricError
from art_ray.ledger import History, iterate_trajectory_groups_parquet
from art_ray.ledger.history import StepMeans, row_of
from art_ray.ledger.paths import model_dir, step_files, validate_part
from art_ray.trajectories import TrajectoryGroup
from art_ray.types import nearest

__all__ = ["Run", "find_run", "groups_in", "ranges", "runs_below"]

_PARQUET_NAME = re.compile(r"(\d{4,})(?:\.\d{3,})?\.parquet")
_CONTENTS = ("history.jsonl", "model.json", "trajectories", "checkpoints")
"""A folder that has one of these is a model's."""
_MOST_NAMED = 12
_TAIL_BYTES = 1 << 20
"""Of a history; longer than any line."""


@dataclass(frozen=True)
class Run:
    """The files of one model. Reading them starts nothing and changes nothing."""

    folder: Path

    @property
    def label(self) -> str:
        """`project/name`, as the folder says it; the folder itself where it lies elsewhere."""
        parts = self.folder.absolute().parts
        return f"{parts[-3]}/{parts[-1]}" if len(parts) > 3 and parts[-2] == "models" else str(self.folder)

    @property
    def about(self) -> dict[str, str]:
        """How JSON names it."""
        return {"run": self.label, "path": str(self.folder)}

    @cached_property
    def history(self) -> History:
        """Its history."""
        return History(self.folder / "history.jsonl")

    @property
    def checkpoints_dir(self) -> Path:
        """Where its checkpoints lie, if it has any."""
        return self.folder / "checkpoints"

    def step_means(self, metric: str) -> StepMeans:
        """Returns the mean of `metric` at each step; empty where it never had a finite value.

        Raises:
            UnknownMetricError: no line of the history has it; names the nearest one.
        """
        found = self.history.step_means(metric)
        if not len(found.steps) and metric not in (known := self.history.metrics()):
            raise UnknownMetricError(
                f"{self.label} has no metric {metric!r}{nearest(metric, known)}. "
                f"There are: {', '.join(known) or 'none yet'}."
            )
        return found

    def last_row(self) -> dict[str, Any]:
        """Returns the last line of the history that can be read; empty where there is none."""
        found: dict[str, Any] = {}
        for line, _ in self.history.lines(max(0, self.history.size_bytes() - _TAIL_BYTES)):
            found = row_of(line) or found
        return found

    def last_activity(self) -> datetime | None:
        """Returns when it was last logged to, or else when a folder of it last changed; None where nothing tells."""
        with contextlib.suppress(KeyError, ValueError, TypeError):
            at = datetime.fromisoformat(self.last_row()["recorded_at"])
            return at if at.tzinfo else at.astimezone()  # ART writes local times
        with contextlib.suppress(OSError):
            return datetime.fromtimestamp(self.folder.stat().st_mtime, UTC)
        return None

    def splits(self) -> list[str]:
        """Returns the names of the splits that have trajectories, sorted."""
        try:
            return sorted(path.name for path in (self.folder / "trajectories").iterdir() if self.steps(path.name))
        except OSError:
            return []

    def steps(self, split: str) -> list[int]:
        """Returns the steps that have trajectories of `split`, ascending."""
        try:
            names = os.listdir(self.folder / "trajectories" / split)
        except OSError:
            return []
        return sorted({int(match[1]) for match in map(_PARQUET_NAME.fullmatch, names) if match})

    def files(self, split: str, step: int | None) -> tuple[int, list[Path]]:
        """Returns a step and the files of its trajectories, in the order in which they were logged.

        Args:
            split: the part of the data.
            step: the step; None: the newest one that has any.

        Raises:
            ConfigError: no such split or step; names those that are there.
        """
        steps = self.steps(validate_part("split", split))
        if not steps:
            splits = self.splits()
            there = f"There are: {', '.join(splits)}." if splits else "It has no trajectories at all."
            raise ConfigError(f"{self.label} has no trajectories of split {split!r}{nearest(split, splits)}. {there}")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ConfigError(
                f"{self.label} has no trajectories of step {step} in split {split!r}. There are: {ranges(steps, step)}."
            )
        return step, step_files(self.folder / "trajectories" / split, step)


def groups_in(files: Iterable[Path]) -> Iterator[TrajectoryGroup]:
    """Yields the groups in parquet files, one after the other, with a row group in memory at a time.

    Raises:
        LedgerFormatError: a file that cannot be read; names it.
    """
    for path in files:
        try:
            yield from iterate_trajectory_groups_parquet(path)
        except ArtRayError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:  # pages that were damaged, columns of another type
            raise LedgerFormatError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def runs_below(base_path: Path) -> list[Run]:
    """Returns all models below `base_path`, sorted by project and name."""
    return [Run(path) for path in sorted(base_path.expanduser().glob("*/models/*")) if _is_model(path)]


def find_run(name: str, base_path: Path) -> Run:
    """Returns the run that `name` means: a model's folder, or `project/name` below `base_path`.

    Raises:
        ConfigError: there is none; names the nearest ones that are there.
    """
    folder = Path(name).expanduser()
    if _is_model(folder):
        return Run(folder)
    project, _, model = name.partition("/")
    with contextlib.suppress(InvalidNameError):
        if _is_model(folder := model_dir(base_path, project, model)):
            return Run(folder)
    known = [run.label for run in runs_below(base_path)]
    shown = ", ".join(known[:_MOST_NAMED]) + (
        f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    )
    there = f"There are: {shown}." if known else "There is none: is --base-path right?"
    raise ConfigError(
        f"no run {name!r}: neither a model's folder nor a project/name below {base_path}{nearest(name, known)}. {there}"
    )


def ranges(steps: list[int], around: int | None = None) -> str:
    """Returns ascending steps as text, `0–5, 8`; of many ranges those nearest to `around`."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    if len(found) > _MOST_NAMED:
        at = 0 if around is None else around
        near = sorted(sorted(found, key=lambda pair: min(abs(pair[0] - at), abs(pair[1] - at)))[:_MOST_NAMED])
        return f"{_shown(near)} and {len(found) - len(near)} further ranges"
    return _shown(found)


def _shown(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in pairs)


def _is_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in _CONTENTS)
