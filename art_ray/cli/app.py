"""The application: its commands, and what an error looks like to whoever called.

Exit status: 0 done; 1 it failed; 2 it was called wrongly (an unknown run, metric, step or option).
"""

from __future__ import annotations

import errno
import logging
from typing import Any

import typer
from typer.core import TyperGroup

from art_ray.cli import checkpoints, compare, history, output, replay, runs, show
from art_ray.errors import ArtRayError, ConfigError, UnknownMetricError

__all__ = ["app"]

_CALLED_WRONGLY = (ConfigError, UnknownMetricError)


class _Commands(TyperGroup):
    """Tells errors, and the package's log lines, on the standard error stream: the other one is for results."""

    def invoke(self, ctx: Any) -> Any:
        package = logging.getLogger("art_ray")
        package.addHandler(lines := output.LogLines())
        try:
            return super().invoke(ctx)
        except ArtRayError as error:
            output.error(str(error))
            raise typer.Exit(2 if isinstance(error, _CALLED_WRONGLY) else 1) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read the output has seen enough
                raise
            output.error(str(error))
            raise typer.Exit(1) from None
        finally:
            package.removeHandler(lines)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"max_content_width": 110},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _art_ray() -> None:
    """Look at runs of art_ray, and at the cluster that they need.

    Example: art-ray runs .art
    """


for command in (
    runs.runs,
    history.history,
    show.show,
    compare.compare,
    replay.replay,
    checkpoints.export_adapter,
    checkpoints.delete_checkpoints,
):
    app.command()(command)
