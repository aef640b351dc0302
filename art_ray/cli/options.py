"""Arguments and options that commands share, as annotations of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BasePath", "Json", "RunName"]

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
