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

    def begin(self) -> dict[str, Any]:
        """Decides on a new run, which will get every line, and returns what names it.

        It is on disk before the run is opened, and given to every later process: a run is never opened twice under two
        names, whenever a process dies.
        """
        ...

    def start(self, memory: dict[str, Any]) -> str:
        """Opens the run that `begin` decided on, or opens it again; returns where it can be seen."""
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
