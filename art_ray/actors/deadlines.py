"""How long the driver waits for each kind of answer."""

from __future__ import annotations

import pydantic

from art_ray.types import FrozenConfig

__all__ = ["Deadlines"]


class Deadlines(FrozenConfig):
    """How long the driver waits for each kind of answer, in seconds, before it gives up with an error."""

    check_s: float = pydantic.Field(default=180.0, gt=0)
    """For an actor to be placed, and the base model to be looked at."""
    start_s: float = pydantic.Field(default=1800.0, gt=0)
    """For the trainer to load its weights, and an engine to answer for the first time."""
    standstill_s: float = pydantic.Field(default=900.0, gt=0)
    """For a train call that reports no progress."""
    publish_s: float = pydantic.Field(default=600.0, gt=0)
    """For a replica to load a version."""
    ledger_s: float = pydantic.Field(default=600.0, gt=0)
    """For a log call, and for the groups it refers to."""
    stop_s: float = pydantic.Field(default=30.0, gt=0)
    """For an actor to end by itself, before it is ended."""
