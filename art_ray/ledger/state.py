"""What a model's next process needs to resume: `state.json`, changed under a lock and replaced whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from art_ray.ledger.files import explained, locked, make_dirs, write_atomically

__all__ = ["State"]

logger = logging.getLogger(__name__)


class State:
    """The `state.json` in a model's folder. Any number of processes may read and change it.

    Keys: `requests`, the latest log requests that wrote no parquet file; `reporters`, by name, what each needs to
    resume (`run_id` of wandb; `sent_bytes`, the part of the history that has been sent).
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"

    def read(self) -> dict[str, Any]:
        """Returns the current content; empty where there is none, or none that can be read."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            logger.warning("%s is not readable as JSON and is replaced", self.path)
            return {}
        return content if isinstance(content, dict) else {}

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """Gives the current content, and writes what the block made of it; nothing if the block raises.

        Raises:
            LedgerWriteError: it could not be written; the old content is unharmed.
        """
        with explained(f"writing {self.path}"):
            make_dirs(self.path.parent)
            with locked(self.path.parent, ".state.lock"):
                content = self.read()
                yield content
                write_atomically(self.path, json.dumps(content, indent=1).encode())
