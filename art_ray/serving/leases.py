"""Which policy versions a replica holds, which one is current, and who still needs which. Pure: no clock of its own.

A version is a step. It is loaded, may become current, is used by requests (counted) and by named holders (a
trajectory, an evaluation), and may be unloaded when it is neither current nor used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from art_ray.errors import ServingError, VersionNotServedError

__all__ = ["VersionTable"]


@dataclass
class _Held:
    """One loaded version and its users."""

    sha256: str
    requests: int = 0
    """Requests that are being answered by it now."""
    holders: dict[str, float] = field(default_factory=dict)
    """Named holders, each with the clock reading at which its lease ends."""


class VersionTable:
    """The versions of one policy that one replica holds.

    Args:
        name: the policy's name; `name` alone means the current version, `name@step` a certain one.
        clock: seconds, rising; a test gives its own.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.current: int | None = None
        """The version that answers requests for the bare name; None until one was made current."""
        self._clock = clock
        self._held: dict[int, _Held] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def steps(self) -> list[int]:
        """The versions held, oldest first."""
        return sorted(self._held)

    def served_name(self, step: int) -> str:
        """Returns the name under which `step` is asked for and answers."""
        return f"{self.name}@{step}"

    def sha256(self, step: int) -> str:
        """Returns the hash of a loaded version."""
        return self._held[step].sha256

    def add(self, step: int, sha256: str) -> None:
        """Notes that `step` is loaded. Again with the same hash: no effect.

        Raises:
            ServingError: the same step with other contents; a version never changes.
        """
        if step in self._held and self._held[step].sha256 != sha256:
            raise ServingError(
                f"{self.served_name(step)} is loaded with hash {self._held[step].sha256[:12]}…; "
                f"another adapter ({sha256[:12]}…) under the same step is refused: a version never changes"
            )
        self._held.setdefault(step, _Held(sha256))

    def make_current(self, step: int) -> None:
        """Lets `step`, which is loaded, answer requests for the bare name from now on."""
        if step not in self._held:
            raise VersionNotServedError(self._refusal(self.served_name(step)))
        self.current = step

    def resolve(self, model: object, holder: str | None = None) -> int:
        """Returns the version that answers a request for `model`.

        A holder's bare-name requests stay with the version that it leased, as long as the lease lasts.

        Raises:
            VersionNotServedError: a name that is neither the policy's nor one of its loaded versions; lists those.
        """
        if isinstance(model, str):
            if model == self.name and self.current is not None:
                return self._leased_by(holder) if holder is not None else self.current
            match = re.fullmatch(re.escape(self.name) + r"@(0|[1-9]\d{0,17})", model, re.ASCII)
            if match and int(match[1]) in self._held:
                return int(match[1])
        raise VersionNotServedError(self._refusal(model))

    def begin(self, step: int) -> None:
        """Counts one more request on `step`."""
        self._held[step].requests += 1

    def end(self, step: int) -> None:
        """Counts one request less on `step`."""
        held = self._held[step]
        if held.requests == 0:
            raise ValueError(f"version {step} has no request to end")
        held.requests -= 1

    def pin(self, step: int, holder: str, ttl_s: float) -> None:
        """Leases `step` to `holder` for `ttl_s` seconds from now; again: from now on anew."""
        if step not in self._held:
            raise VersionNotServedError(self._refusal(self.served_name(step)))
        self._held[step].holders[holder] = self._clock() + ttl_s

    def unpin(self, holder: str) -> None:
        """Ends every lease of `holder`; no effect where there is none."""
        for held in self._held.values():
            held.holders.pop(holder, None)

    def removable(self) -> list[int]:
        """Returns the versions that nobody needs: not current, no request, no lease that lasts."""
        return [step for step in self.steps if step != self.current and not self._users(step)]

    def remove(self, step: int) -> None:
        """Notes that `step` is unloaded.

        Raises:
            ServingError: it is current or in use.
        """
        if step == self.current or self._users(step):
            raise ServingError(f"{self.served_name(step)} is in use and stays loaded")
        self._held.pop(step, None)

    def clear(self) -> None:
        """Notes that nothing is held any more: the weights are being changed in place.

        Raises:
            ServingError: a request is being answered.
        """
        if self.requests:
            raise ServingError(f"{self.requests} requests are being answered; the weights stay")
        self._held.clear()
        self.current = None

    @property
    def requests(self) -> int:
        """Requests that are being answered now, on all versions."""
        return sum(held.requests for held in self._held.values())

    def status(self) -> dict[str, Any]:
        """Returns the table as plain values."""
        return {
            "name": self.name,
            "current": self.current,
            "versions": {
                step: {"sha256": held.sha256, "requests": held.requests, "holders": sorted(self._holders(step))}
                for step, held in sorted(self._held.items())
            },
        }

    def _leased_by(self, holder: str) -> int:
        assert self.current is not None
        leased = [step for step in self._held if holder in self._holders(step)]
        return max(leased, default=self.current)

    def _holders(self, step: int) -> list[str]:
        holders, now = self._held[step].holders, self._clock()
        for holder in [holder for holder, until in holders.items() if until <= now]:
            del holders[holder]
        return list(holders)

    def _users(self, step: int) -> int:
        return self._held[step].requests + len(self._holders(step))

    def _refusal(self, model: object) -> str:
        asked = f"{model!r:.120}" if model is not None else "no model"
        if self.current is None:
            return (
                f"{asked} was asked for, and {self.name!r} holds no version yet: "
                "a started engine serves nothing before its first version is loaded"
            )
        versions = ", ".join(self.served_name(step) for step in self.steps)
        return (
            f"{asked} is not served here; held: {versions} "
            f"(and {self.name!r}, which means {self.served_name(self.current)})"
        )
