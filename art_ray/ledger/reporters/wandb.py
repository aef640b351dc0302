"""Weights & Biases, as a view of the history."""

from __future__ import annotations

import logging
import netrc
import os
import re
import uuid
from typing import Any
from urllib.parse import urlparse

from art_ray.ledger.reporters.base import Subject, numbers_of

__all__ = ["WandbReporter", "has_key"]

logger = logging.getLogger(__name__)


def has_key() -> bool:
    """Returns whether wandb will find a key: in the environment, or where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbReporter:
    """One wandb run for one model, resumed by its id.

    Without a key the run is an offline one, which `wandb sync` uploads later. wandb's own step, which must increase, is
    left alone: a late evaluation would be dropped. `training_step` is the x axis instead.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._run: Any = None
        self._splits: set[str] = set()

    def begin(self) -> dict[str, Any]:
        """See `Reporter.begin`."""
        return {"run_id": uuid.uuid4().hex[:12]}

    def start(self, memory: dict[str, Any]) -> str:
        """See `Reporter.start`."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        self._run = wandb.init(
            project=re.sub(r"[/\\#?%:]", "-", self._subject.project),
            name=self._subject.name,
            id=memory["run_id"],
            resume="allow",
            mode=mode,
            dir=self._subject.folder,
            config=self._subject.about,
            reinit="create_new",  # whatever run the user's script has open stays open
            settings=wandb.Settings(console="off", silent=True),
        )
        self._splits.clear()
        self._run.define_metric("training_step")
        if mode == "online":
            return str(self._run.url)
        where = os.path.dirname(self._run.dir)
        if mode == "offline":
            why = "WANDB_MODE says so" if os.environ.get("WANDB_MODE") else "there is no key"
            logger.warning("the wandb run is offline (%s), in %s: upload it with `wandb sync`", why, where)
        return where

    def send(self, rows: list[dict[str, Any]]) -> None:
        """See `Reporter.send`."""
        for row in rows:
            numbers = numbers_of(row)
            for split in {key.partition("/")[0] for key in numbers if "/" in key} - self._splits:
                self._run.define_metric(f"{split}/*", step_metric="training_step")
                self._splits.add(split)
            self._run.log({"training_step": row.get("step", 0), **numbers})

    def finish(self) -> None:
        """See `Reporter.finish`. Ends wandb's service process, too, unless other runs of this process use it."""
        import wandb
        from wandb.sdk import wandb_setup

        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
        if wandb_setup.singleton().most_recent_active_run is None:
            wandb.teardown()
