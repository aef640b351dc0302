"""Arguments and options that commands share, as annotations of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BasePath", "Json", "Last", "Plot", "Png", "RunName", "Split", "Step"]

RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A model's folder, or project/name below the base path.", show_default=False),
]

BasePath = Annotated[
    Path, typer.Option("--base-path", envvar="ART_RAY_BASE_PATH", help="Folder below which models lie.")
]
"""Give it the default `Path(".art")`."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on the standard output.")]
"""Give it the default False; pass results to `output.print_json`."""

Last = Annotated[int, typer.Option("--last", min=0, help="Steps of the table, the newest ones; 0: all.")]

Plot = Annotated[bool, typer.Option("--plot", help="Draw it in the terminal, too (extra: plot).")]

Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw it into this PNG file (extra: plot).")]

Step = Annotated[int | None, typer.Option("--step", min=0, help="The step. By default the newest one.")]

Split = Annotated[str, typer.Option("--split", help="The part of the data: train, val, …")]
