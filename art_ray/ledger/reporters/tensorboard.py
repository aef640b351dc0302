"""TensorBoard, as a view of the history."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from art_ray.ledger.reporters.base import Subject, numbers_of

__all__ = ["TensorboardReporter"]


class TensorboardReporter:
    """Event files in the model's folder, under `tensorboard/`."""

    def __init__(self, subject: Subject) -> None:
        self._folder = subject.folder / "tensorboard"
        self._writer: Any = None

    def begin(self) -> dict[str, Any]:
        """See `Reporter.begin`. All lines come again: older event files would show them twice."""
        for path in self._folder.glob("events.out.tfevents.*"):
            path.unlink()
        return {"folder": self._folder.name}

    def start(self, memory: dict[str, Any]) -> str:
        """See `Reporter.start`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        return str(self._folder)

    def send(self, rows: list[dict[str, Any]]) -> None:
        """See `Reporter.send`."""
        for row in rows:
            try:
                walltime = datetime.fromisoformat(str(row.get("recorded_at"))).timestamp()
            except ValueError:
                walltime = None
            for name, value in numbers_of(row).items():
                self._writer.add_scalar(name, value, row.get("step", 0), walltime=walltime)
        self._writer.flush()

    def finish(self) -> None:
        """See `Reporter.finish`."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
