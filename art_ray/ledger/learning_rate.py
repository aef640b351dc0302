"""The learning rate that follows the trend of the rewards' spread."""

from __future__ import annotations

import logging

import numpy as np

from art_ray.ledger.history import History, StepMeans

__all__ = ["METRIC", "learning_rate_multiplier", "multiplier_of"]

logger = logging.getLogger(__name__)

METRIC = "train/reward_std_dev"
LOWEST, HIGHEST = 0.01, 10.0


def learning_rate_multiplier(history: History) -> float:
    """Returns the factor for the next step's learning rate, from the spread recorded at each step so far."""
    return multiplier_of(history.step_means(METRIC))


def multiplier_of(spread: StepMeans) -> float:
    """Returns m = (a x_last + b) / b, with a x + b the least-squares line through the spread of each step.

    x is the step minus the first recorded step, so that b is the fitted spread at the start of the run. m is 1 with
    fewer than 2 steps or b <= 0, and is kept within [0.01, 10]: a line that falls below zero must not turn the
    learning rate negative. A clamp is logged.
    """
    if len(spread.steps) < 2:
        return 1.0
    x = (spread.steps - spread.steps[0]).astype(np.float64)
    centred = x - x.mean()
    slope = float(centred @ (spread.means - spread.means.mean()) / (centred @ centred))
    intercept = float(spread.means.mean() - slope * x.mean())
    if intercept <= 0:
        return 1.0
    multiplier = (slope * float(x[-1]) + intercept) / intercept
    clamped = min(max(multiplier, LOWEST), HIGHEST)
    if clamped != multiplier:
        logger.warning(
            "learning-rate multiplier %.4g clamped to %g: %s fell or rose too steeply over %d steps",
            multiplier, clamped, METRIC, len(spread.steps),
        )  # fmt: skip
    return clamped
