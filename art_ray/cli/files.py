"""Files that a command makes: whole, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from art_ray.errors import ConfigError
from art_ray.ledger.files import sync_file, temporary

__all__ = ["replaced"]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives the path of an empty file, which takes the place of `path` after the block, unless the block raises.

    Raises:
        ConfigError: there is no folder for it, or a folder stands in its place.
    """
    if not path.parent.is_dir() or path.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ConfigError(f"{path} {problem}")
    with temporary(path.parent) as beside:
        yield beside
        sync_file(beside)
        os.replace(beside, path)
