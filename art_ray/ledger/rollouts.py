"""Finished groups of a step that was not taken yet: kept, so that a process that dies while it gathers loses none.

`{model's folder}/rollouts/{step:04d}/{key}.parquet` holds one group. Once its step is behind, `forget_before` deletes
it: what was trained lies in `trajectories/`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from art_ray.ledger.files import explained, make_dirs, temporary
from art_ray.ledger.parquet import read_trajectory_groups_parquet
from art_ray.ledger.parquet_writer import GroupWriter
from art_ray.ledger.paths import validate_part
from art_ray.trajectories import TrajectoryGroup

__all__ = ["KeptRollouts"]


class KeptRollouts:
    """The kept groups of one model. Creating it writes nothing.

    Args:
        folder: the model's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "rollouts"

    def keep(self, step: int, key: str, group: TrajectoryGroup) -> None:
        """Writes a group; when it returns, the group outlives this process. Again: no effect.

        Raises:
            LedgerWriteError: the disk did not take it.
        """
        path = self._path(step, key)
        if path.exists():
            return
        with explained(f"keep the group {key!r} of step {step}"):
            make_dirs(path.parent)
            with temporary(path.parent) as unfinished:
                writer = GroupWriter(unfinished)
                try:
                    writer.write(group)
                    writer.close({})
                except BaseException:
                    writer.abandon()
                    raise
                unfinished.replace(path)

    def recall(self, step: int, key: str) -> TrajectoryGroup | None:
        """Returns a kept group; None where there is none."""
        path = self._path(step, key)
        if not path.exists():
            return None
        (group,) = read_trajectory_groups_parquet(path)
        return group

    def forget_before(self, step: int) -> None:
        """Deletes what was kept for earlier steps."""
        for folder in self._folder.glob("[0-9]*"):
            if folder.name.isdigit() and int(folder.name) < step:
                shutil.rmtree(folder, ignore_errors=True)

    def _path(self, step: int, key: str) -> Path:
        return self._folder / f"{step:04d}" / f"{validate_part('key', key)}.parquet"
