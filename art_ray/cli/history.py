"""`art-ray history`: the metrics of one run, over its steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_ray.cli import output
from art_ray.cli.options import BasePath, Json, Last, Plot, Png, RunName

if TYPE_CHECKING:
    from art_ray.cli.run import Run


def history(
    run: RunName,
    metric: Annotated[list[str], typer.Option("--metric", help="A metric to show step by step; may be repeated.")] = [],  # noqa: B006 (typer makes a new list)
    last: Last = 20,
    plot: Plot = False,
    png: Png = None,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Show the metrics of a run.

    Without --metric: which there are. With it: those, step by step. A step's value is the mean over the lines that
    have one. JSON has every step, whatever --last says.

    Example: art-ray history readme/first

    Example: art-ray history readme/first --metric train/reward --metric val/reward --plot
    """
    from art_ray.cli.run import find_run
    from art_ray.errors import ConfigError

    found = find_run(run, base_path)
    output.refuse_drawing_in_json(plot, as_json)
    if metric:
        _show_metrics(found, list(dict.fromkeys(metric)), last, plot, png, as_json)
    elif plot or png is not None:
        raise ConfigError("--plot and --png draw metrics: name them, as in --metric train/reward")
    else:
        _show_overview(found, as_json)


def _show_overview(run: Run, as_json: bool) -> None:
    summaries = dict(sorted(run.history.summaries().items()))
    if as_json:
        metrics = {
            name: {
                "lines": found.count,
                "last_step": found.last_step,
                "last": found.last,
                "low": found.low,
                "high": found.high,
            }
            for name, found in summaries.items()
        }
        output.print_json({**run.about, "metrics": metrics, "skipped_lines": run.history.num_skipped})
        return
    if not summaries:
        output.say(f"{run.label} has no history yet")
        return
    rows = [
        (name, found.count, "–" if found.last_step is None else found.last_step,
         *map(output.number, (found.last, found.low, found.high)))
        for name, found in summaries.items()
    ]  # fmt: skip
    output.table(("metric", "lines", "last step", "last", "lowest", "highest"), rows)


def _show_metrics(run: Run, metrics: list[str], last: int, plot: bool, png: Path | None, as_json: bool) -> None:
    from art_ray.cli.plots import Curve, draw, write_png

    found = {metric: run.step_means(metric) for metric in metrics}
    curves = [Curve(metric, means) for metric, means in found.items()]
    drawing = draw(run.label, curves) if plot else ""
    if png is not None:
        write_png(png, run.label, curves)
    if as_json:
        series = {
            metric: {"steps": means.steps.tolist(), "values": means.means.tolist()} for metric, means in found.items()
        }
        output.print_json({**run.about, "metrics": series, "skipped_lines": run.history.num_skipped})
        return
    output.step_table(metrics, list(found.values()), last)
    output.raw(drawing)
    if png is not None:
        output.say(f"drawn into {png}")
