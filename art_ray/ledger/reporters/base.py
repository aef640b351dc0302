"""What a reporter is: someone who shows the lines of the history elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Reporter", "Subject", "numbers_of"]


@dataclass(frozen=True)
class Subject:
    """Whose history is reported."""

    folder: Path
    """The model's folder; a reporter's own files go below it."""
    project: str
    name: str
    about: dict[str, Any]
    """What is known about the model, without secrets, as JSON types."""


class Reporter(Protocol):
    """Shows rows of the history. All calls come from one thread, which may wait as long as the reporter likes."""

    def start(self, memory: dict[str, Any]) -> str:
        """Opens the run that `memory` names, or a new one where it is empty; returns where it can be seen.

        What is put into `memory` is on disk before the first row is sent, and given to the next process.
        """
        ...

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Takes lines of the history, in order. A line may come again after a crash."""
        ...

    def finish(self) -> None:
        """Returns when everything that was sent has arrived, and leaves no process or thread behind."""
        ...


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics of a line that are numbers."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, (int, float)) and key not in ("step", "recorded_at")
    }
