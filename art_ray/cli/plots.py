"""Curves of metrics: drawn in the terminal by plotext, or into a PNG by matplotlib. Both are in the extra `plot`."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from art_ray.cli.files import replaced
from art_ray.cli.output import clean
from art_ray.errors import ConfigError
from art_ray.ledger.history import StepMeans

__all__ = ["Curve", "draw", "write_png"]

_MOST_POINTS = 2000
"""Of one curve: more than a picture has columns. A million points take plotext minutes."""
_MARKERS = ("braille", "*", "o", "+", "x", "#", "%", "@")
"""Curves must be told apart without colours, too."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    label: str
    means: StepMeans


def draw(title: str, curves: Sequence[Curve]) -> str:
    """Returns a drawing as wide as the terminal, in colours where the standard output is one.

    Raises:
        ConfigError: plotext is not installed.
    """
    plotext = _imported("plotext", "--plot")
    width, height = shutil.get_terminal_size((100, 24))
    figure = plotext.figure
    with contextlib.redirect_stderr(io.StringIO()):  # plotext prints its remarks there
        figure.clear()
        figure.theme("simple")
        figure.plot_size(width, min(height - 4, 24))
        figure.title(clean(title))
        for position, curve in enumerate(curves):
            steps, means = _thinned(curve.means)
            marker = _MARKERS[position % len(_MARKERS)]
            signal = figure.signal(steps.tolist(), means.tolist(), marker=marker)
            figure.draw(
                signal.lines().label(clean(curve.label)) if len(steps) > 1 else signal.label(clean(curve.label))
            )
        if ends := [step for curve in curves for step in curve.means.steps[[0, -1][: len(curve.means.steps)]].tolist()]:
            ticks = np.linspace(min(ends), max(ends), 7).round().astype(np.int64)
            figure.ruler("x").ticks(np.unique(ticks).tolist())
        built = figure.build()
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text: str = built.string() if coloured else plotext.uncolorize(built)
    return text


def write_png(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Draws curves into the PNG file `path`, whole or not at all.

    Raises:
        ConfigError: matplotlib is not installed, or there is no folder for the file.
    """
    _imported("matplotlib", "--png")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        steps, means = _thinned(curve.means)
        axes.plot(steps, means, marker="." if len(steps) <= 100 else None, linewidth=1.5)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    # Names are texts, whatever is in them: a "$" would begin a formula.
    axes.set_title(clean(title), parse_math=False)
    legend = axes.legend(axes.lines, [f" {clean(curve.label)}" for curve in curves])  # "_…" would be left out
    for text in legend.get_texts():
        text.set_parse_math(False)
    with replaced(path) as beside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a character that the font lacks is drawn as a box
        figure.savefig(beside, format="png")


def _thinned(means: StepMeans) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and means, of many neighbours only their averages."""
    size = -(-len(means.steps) // _MOST_POINTS)
    if size <= 1:
        return means.steps, means.means
    starts = np.arange(0, len(means.steps), size)
    counts = np.diff(np.append(starts, len(means.steps)))
    return np.add.reduceat(means.steps, starts) / counts, np.add.reduceat(means.means, starts) / counts


def _imported(package: str, option: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"{option} needs {package}, which is not installed: pip install 'art-ray[plot]'") from None
