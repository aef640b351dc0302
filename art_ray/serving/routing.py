"""Which replica answers a request. Pure: no input or output.

The least loaded one; a trajectory stays where its prefix cache is, unless that replica has clearly more to do.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Rotation"]

_REMEMBERED = 100_000
"""Trajectories whose replica is remembered; the ones used longest ago are forgotten above it."""


class Rotation:
    """The replicas that may be asked, and how many requests each is answering.

    Args:
        capacity: requests that one replica answers at a time; further ones wait in front.
        tolerance: requests by which a trajectory's replica may be ahead of the least loaded one before it is moved.
    """

    def __init__(self, capacity: int, tolerance: int = 4) -> None:
        self._capacity, self._tolerance = capacity, tolerance
        self._in_flight: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        """Requests that replicas out of rotation still owe."""
        self._answered_by: OrderedDict[str, str] = OrderedDict()
        """The replica that answered last, by trajectory."""

    def __contains__(self, replica: str) -> bool:
        return replica in self._in_flight

    @property
    def replicas(self) -> dict[str, int]:
        """Requests in flight by replica in rotation."""
        return dict(self._in_flight)

    def add(self, replica: str) -> None:
        """Takes a replica into rotation."""
        self._in_flight.setdefault(replica, self._leaving.pop(replica, 0))

    def remove(self, replica: str) -> None:
        """Takes a replica out of rotation; no effect where it is not in it."""
        if (owed := self._in_flight.pop(replica, 0)) > 0:
            self._leaving[replica] = owed

    def choose(self, trajectory: str | None = None) -> str | None:
        """Returns the replica to ask; None where all that are in rotation have as much to do as they can take."""
        if not self._in_flight:
            return None
        least = min(self._in_flight.values())
        known = self._answered_by.get(trajectory) if trajectory is not None else None
        if known in self._in_flight and self._in_flight[known] < min(self._capacity, least + self._tolerance + 1):
            return known
        if least >= self._capacity:
            return None
        return next(replica for replica, load in self._in_flight.items() if load == least)

    def begin(self, replica: str, trajectory: str | None = None) -> None:
        """Counts one more request on `replica`, which is in rotation."""
        # Behind the others of its load from now on, so that equals take turns.
        self._in_flight[replica] = self._in_flight.pop(replica) + 1
        if trajectory is not None:
            self._answered_by[trajectory] = replica
            self._answered_by.move_to_end(trajectory)
            if len(self._answered_by) > _REMEMBERED:
                self._answered_by.popitem(last=False)

    def end(self, replica: str) -> None:
        """Counts one request less on `replica`, in rotation or out of it."""
        counts = self._in_flight if replica in self._in_flight else self._leaving
        counts[replica] -= 1
        if counts is self._leaving and counts[replica] == 0:
            del counts[replica]

    def forget(self, trajectory: str) -> None:
        """Forgets where a trajectory was answered."""
        self._answered_by.pop(trajectory, None)
