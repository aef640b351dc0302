"""`art-ray compare`: one metric of several runs, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_ray.cli import output
from art_ray.cli.options import BasePath, Json, Last, Plot, Png

if TYPE_CHECKING:
    from art_ray.cli.run import Run

_DEFAULTS = ("val/reward", "train/reward")


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Models' folders, or project/name below the base path; two or more."),
    ],
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="What to compare. By default val/reward, or train/reward where one lacks that."),
    ] = None,
    last: Last = 20,
    plot: Plot = False,
    png: Png = None,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Show one metric of several runs side by side.

    A step's value is the mean over the lines that have one; the best is the highest. JSON has every step.

    Example: art-ray compare readme/first readme/second --metric val/reward --plot
    """
    from art_ray.cli.plots import Curve, draw, write_png
    from art_ray.cli.run import find_run
    from art_ray.errors import ConfigError

    if len(runs) < 2:
        raise ConfigError(f"compare takes two runs or more, got {len(runs)}: `art-ray history` shows one")
    output.refuse_drawing_in_json(plot, as_json)
    found = [find_run(name, base_path) for name in runs]
    metric = metric or _shared(found)
    means = [run.step_means(metric) for run in found]
    labels = [run.label for run in found]
    if len(set(labels)) < len(labels):  # one name below two base paths
        labels = [str(run.folder) for run in found]
    curves = [Curve(label, values) for label, values in zip(labels, means, strict=True)]
    drawing = draw(metric, curves) if plot else ""
    if png is not None:
        write_png(png, metric, curves)
    best = [values.best_step() for values in means]
    if as_json:
        rows = [
            {
                **run.about,
                "best_step": step,
                "steps": values.steps.tolist(),
                "values": values.means.tolist(),
                "skipped_lines": run.history.num_skipped,
            }
            for run, step, values in zip(found, best, means, strict=True)
        ]
        output.print_json({"metric": metric, "runs": rows})
        return
    output.say(metric, "bold")
    output.step_table(labels, means, last)
    for label, step, values in zip(labels, best, means, strict=True):
        if step is not None:
            output.say(f"best of {label}: {output.number(values.means[values.steps == step][0])} at step {step}")
    output.raw(drawing)
    if png is not None:
        output.say(f"drawn into {png}")


def _shared(runs: list[Run]) -> str:
    """Returns the first of the default metrics that every run has."""
    from art_ray.errors import UnknownMetricError

    for metric in _DEFAULTS:
        if all(len(run.history.step_means(metric).steps) for run in runs):
            return metric
    common = sorted(set.intersection(*(set(run.history.metrics()) for run in runs)))
    raise UnknownMetricError(
        f"the runs have neither {' nor '.join(_DEFAULTS)} in common: name a --metric. "
        f"They share: {', '.join(common) or 'none'}."
    )
