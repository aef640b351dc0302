"""All that commands print: text that no terminal obeys, tables, and JSON.

What runs hold was written by models and by whoever talks to them. It is cleaned here, where it is printed, so that
no command can forget to.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from art_ray.errors import ConfigError

if TYPE_CHECKING:
    from art_ray.ledger.history import StepMeans

__all__ = [
    "LogLines",
    "clean",
    "error",
    "number",
    "print_json",
    "raw",
    "refuse_drawing_in_json",
    "say",
    "step_table",
    "table",
]

_WIDTH_OF_PIPES = 160
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # what reorders or breaks a line
    "\ud800-\udfff\ufeff]"  # what cannot be written
)


def clean(text: object) -> str:
    """Returns `text` with every character that a terminal would obey, or could not show, as its escape."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def number(value: float | None) -> str:
    """Returns a number for people: four digits, and a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def say(text: object = "", style: str = "", *, indent: int = 0) -> None:
    """Prints text on lines of its own, in a style of rich where the output is a terminal."""
    from rich.padding import Padding
    from rich.text import Text

    line = Text(clean(text), style)
    console = _console()
    if indent and console.is_terminal:
        console.print(Padding(line, (0, 0, 0, indent)))
    else:  # who reads a pipe wants lines as they are
        line = Text(" " * indent + clean(text).replace("\n", "\n" + " " * indent), style)
        console.print(line, soft_wrap=not console.is_terminal)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> None:
    """Prints a table; its first `left` columns hold texts, the others numbers, which end at the same place."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for position, name in enumerate(columns):
        grid.add_column(Text(clean(name)), justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    _console().print(grid)


def step_table(names: Sequence[str], columns: Sequence[StepMeans], last: int) -> None:
    """Prints values by step: a row for each step that any column has, the newest `last` of them (0: all)."""
    import numpy

    steps = numpy.unique(numpy.concatenate([column.steps for column in columns]))
    shown = steps[-last:].tolist()  # of 0: all
    by_step = [
        dict(zip(column.steps[-last:].tolist(), column.means[-last:].tolist(), strict=True)) for column in columns
    ]
    rows = ((step, *(number(values.get(step)) for values in by_step)) for step in shown)
    table(("step", *names), rows, left=0)
    if len(shown) < len(steps):
        say(f"{len(steps) - len(shown)} earlier steps: --last 0 shows all", "dim")


def refuse_drawing_in_json(plot: bool, as_json: bool) -> None:
    """Raises `ConfigError` where a drawing would be mixed with JSON."""
    if plot and as_json:
        raise ConfigError("--plot draws on the standard output, which --json keeps for JSON: leave one out (or --png)")


def raw(text: str) -> None:
    """Prints text that we made ourselves, escape sequences included: a drawing, JSON."""
    sys.stdout.write(text)
    sys.stdout.flush()  # a reader that went away is noticed here, and not when the process ends


def print_json(value: Mapping[str, Any]) -> None:
    """Prints `value` as the only thing on the standard output; what is no finite number becomes null."""
    raw(json.dumps(_finite(value), allow_nan=False, indent=1) + "\n")


def error(text: object) -> None:
    """Prints why there is no result, on the standard error stream."""
    sys.stderr.write(f"error: {clean(text)}\n")


class LogLines(logging.Handler):
    """Prints the package's own warnings on the standard error stream."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one."""
        sys.stderr.write(f"{record.levelname.lower()}: {clean(record.getMessage())}\n")


def _console() -> Any:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    return (
        console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDTH_OF_PIPES)
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
