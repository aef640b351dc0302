"""The command line `art-ray`: what is known of a run, from its files; and of a cluster, before and while it works.

`app` lists the commands, `options` the arguments that they share, `output` is the only place that prints. Command
modules are imported for `art-ray --help`: they hold signatures, and import what does the work when they are called.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that the process was started with, and exits with its status."""
    from art_ray.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows its number
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="art-ray")
