"""Which scenarios the steps of a run have consumed: read on a restart, so that none is skipped or repeated.

`{model's folder}/scenarios/{name}.jsonl` has a line for each of these, on disk before what it announces begins::

    {"step": 5, "trained": [8, 9]}    the scenarios whose groups the step that makes version 5 is trained on
    {"step": 4, "dropped": [7]}       groups of these were given up when version 4 was the newest: too old, or failed
    {"step": 4, "evaluated": true}    the evaluation of version 4 has ended

Which of the announced steps were taken, the checkpoints say: a line is true once the checkpoint of its step is
committed, so that consuming and learning are one commit. Of several lines for one step, the last one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from art_ray.ledger.history import History
from art_ray.ledger.paths import validate_part

__all__ = ["Consumed", "ConsumedScenarios"]


@dataclass(frozen=True)
class Consumed:
    """What was consumed up to a step."""

    first_unread: int = 0
    """The scenario after the last one of which a group was trained or given up."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Scenarios before it that were not trained, each with how many groups of it were given up."""
    evaluated: frozenset[int] = frozenset()
    """Versions whose evaluation has ended."""


class ConsumedScenarios:
    """The file of one sequence of scenarios. Creating it writes nothing.

    Raises:
        InvalidNameError: a name that cannot be part of a path.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._lines = History(folder / "scenarios" / f"{validate_part('name', name)}.jsonl")

    def begin(self, step: int, positions: Iterable[int]) -> None:
        """Notes which scenarios the step that makes version `step` is trained on; to be called before it is taken."""
        self._lines.append({"step": step, "trained": sorted(positions)})

    def drop(self, step: int, positions: Iterable[int]) -> None:
        """Notes scenarios whose groups were given up when `step` was the newest version."""
        self._lines.append({"step": step, "dropped": sorted(positions)})

    def evaluated(self, step: int) -> None:
        """Notes that the evaluation of version `step` has ended."""
        self._lines.append({"step": step, "evaluated": True})

    def at(self, step: int) -> Consumed:
        """Returns what was consumed by the steps up to `step`, which is the newest that is committed."""
        trained: dict[int, list[int]] = {}
        dropped: Counter[int] = Counter()
        evaluated = set()
        for row in self._lines.rows():
            if row["step"] <= step and "trained" in row:
                trained[row["step"]] = row["trained"]
            dropped.update(row.get("dropped", ()))
            if row.get("evaluated"):
                evaluated.add(row["step"])
        done = {position for positions in trained.values() for position in positions}
        first_unread = max(done | dropped.keys(), default=-1) + 1
        waiting = {position: dropped[position] for position in range(first_unread) if position not in done}
        return Consumed(first_unread, waiting, frozenset(evaluated))
