"""What one replica is doing, and whether it may be asked. Pure: no input or output, and the clock is given.

::

    STARTING ──started──> LOADING ──loaded──> READY
        ^                    │                  │
        └──── after a wait ──┴──────lost────────┘──> LOST ──too often in a row──> FAILED

A replica is asked only while it is READY, and the only way there leads through a completed load of the current version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

__all__ = ["Health", "State"]


class State(StrEnum):
    """Where a replica stands."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"


class Health:
    """The state of one replica.

    Args:
        max_losses: how often in a row it may be lost before it is given up. A replica that stayed ready for
            `stable_s` seconds begins anew.
        stable_s: see there.
        longest_wait_s: the wait before a new start doubles with each loss in a row, from one second to this.
        clock: seconds, rising; a test gives its own.
    """

    def __init__(
        self,
        *,
        max_losses: int = 5,
        stable_s: float = 60.0,
        longest_wait_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_losses, self._stable_s, self._longest_wait_s = max_losses, stable_s, longest_wait_s
        self._clock = clock
        self._losses = 0
        self._was_ready = False
        self.state = State.STARTING
        self.since = clock()
        """When it came into this state."""
        self.restarts = 0
        self.reason: str | None = None
        """Why it was lost last."""

    def started(self) -> None:
        """It answers, and holds no version yet."""
        self._enter(State.LOADING, allowed=(State.STARTING,))

    def loaded(self) -> None:
        """It completed a load of the current version."""
        self._enter(State.READY, allowed=(State.LOADING,))
        self._was_ready = True

    def lost(self, reason: str, *, for_good: bool = False) -> float | None:
        """It died, stands still, or could not start or load.

        Returns:
            The seconds to wait before it is started again; None where it is given up: it was lost too often in a row,
            never came up at all, or `for_good` says that the next start would end like this one.
        """
        if self.state is State.READY and self._clock() - self.since >= self._stable_s:
            self._losses = 0
        self._losses += 1
        self.reason = reason
        if for_good or not self._was_ready or self._losses > self._max_losses:
            self._enter(State.FAILED)
            return None
        self._enter(State.LOST)
        return float(min(2.0 ** (self._losses - 1), self._longest_wait_s))

    def starting(self) -> None:
        """It is being started again."""
        self._enter(State.STARTING, allowed=(State.LOST,))
        self.restarts += 1

    def _enter(self, state: State, allowed: tuple[State, ...] = tuple(State)) -> None:
        if self.state not in allowed:
            raise ValueError(f"a replica that is {self.state} cannot become {state}")
        self.state, self.since = state, self._clock()
