"""Which checkpoints stay: the latest and the best."""

from __future__ import annotations

import logging

from art_ray.errors import UnknownMetricError
from art_ray.ledger.history import History
from art_ray.types import nearest

__all__ = ["DEFAULT_METRIC", "steps_to_keep"]

logger = logging.getLogger(__name__)

DEFAULT_METRIC = "val/reward"


def steps_to_keep(history: History, metric: str, latest_step: int, default_metric: str = DEFAULT_METRIC) -> list[int]:
    """Returns the steps whose checkpoints must stay, ascending: the latest, and the best by the mean of `metric`.

    Where `metric` is the default and was never logged, the latest alone stays, and a log line says so.

    Raises:
        UnknownMetricError: `metric` was asked for by name and no line of the history has it. Nothing may be deleted.
    """
    best = history.best_step(metric)
    if best is not None:
        return sorted({latest_step, best})
    if metric != default_metric:
        known = history.metrics()
        if metric not in known:
            raise UnknownMetricError(
                f"{metric!r} is not in {history.path}{nearest(metric, known)}. "
                f"Known metrics: {', '.join(known) or 'none yet'}. No checkpoint was deleted."
            )
    logger.warning("%s has no finite value in %s: only the latest checkpoint (%d) is kept", metric, history.path,
                   latest_step)  # fmt: skip
    return [latest_step]
