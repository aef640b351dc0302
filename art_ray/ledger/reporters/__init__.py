"""Reporters: views of the history elsewhere. The ledger's files are the truth; a reporter can fail without harm."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

from art_ray.errors import ConfigError, LedgerError
from art_ray.ledger.paths import model_dir
from art_ray.ledger.reporters.base import Reporter, Subject
from art_ray.ledger.reporters.feed import Feed
from art_ray.ledger.reporters.tensorboard import TensorboardReporter
from art_ray.ledger.reporters.wandb import WandbReporter
from art_ray.types import nearest

__all__ = ["Reporting", "Subject", "checked_reporters", "replay"]

_REPORTERS: dict[str, tuple[Callable[[Subject], Reporter], tuple[str, ...]]] = {
    "tensorboard": (TensorboardReporter, ("torch", "tensorboard")),
    "wandb": (WandbReporter, ("wandb",)),
}
"""By name: how one is made, and the packages it needs."""


def checked_reporters(report_metrics: list[str] | None) -> list[str]:
    """Returns the reporters that `report_metrics` means. None means wandb if its key is in the environment.

    Raises:
        ConfigError: a name that does not exist, or a reporter whose package is not installed.
    """
    if report_metrics is None:
        return ["wandb"] if os.environ.get("WANDB_API_KEY") else []
    known = sorted(_REPORTERS)
    for name in report_metrics:
        if name not in _REPORTERS:
            raise ConfigError(
                f"report_metrics names {name!r}{nearest(str(name), known)}. Known reporters: {', '.join(known)}."
            )
        missing = [package for package in _REPORTERS[name][1] if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(f"the reporter {name!r} needs {', '.join(missing)}: install it, or leave {name!r} out")
    return list(dict.fromkeys(report_metrics))


class Reporting:
    """The reporters of one ledger. Nothing is opened before the first line is logged."""

    def __init__(self, names: list[str], subject: Subject) -> None:
        self._feeds = [Feed(name, _REPORTERS[name][0](subject), subject) for name in names]

    def history_grew(self) -> None:
        """Tells every reporter that there is more to send. Returns at once."""
        for feed in self._feeds:
            feed.wake()

    def close(self, timeout_s: float) -> None:
        """Gives all reporters together `timeout_s` seconds to send what is left."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.close(max(0.0, deadline - time.monotonic()))


def replay(model: Any, reporter: str, timeout_s: float = 30.0) -> str:
    """Rebuilds a run from `history.jsonl` alone, and returns where it can be seen.

    The run is a new one, and is the model's from now on: later lines go there.

    Args:
        model: a model (or anything with its `base_path`, `project` and `name`).
        reporter: "wandb" or "tensorboard".
        timeout_s: how long to wait for another process that reports this model.

    Raises:
        ConfigError: no such reporter.
        LedgerError: another process reports this model; close it first.
    """
    [name] = checked_reporters([reporter])
    folder = model_dir(model.base_path, model.project, model.name)
    subject = Subject(folder, model.project, model.name, {})
    try:
        return Feed(name, _REPORTERS[name][0](subject), subject).replay(timeout_s)
    except TimeoutError:
        raise LedgerError(f"another process reports {folder} to {name}: close its model first") from None
