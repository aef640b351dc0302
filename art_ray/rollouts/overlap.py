"""What is sampled when, and trained when, while sampling and training overlap. Pure: no clock, no input or output.

Version v is what v steps made; the next step is taken from it. A group is as old as its oldest sampled token: trained
from version v, one that version u sampled is v - u steps off policy, and `max_steps_off_policy` is the most that it may
be. From that follow three rules:

- **Admission.** At most (max_steps_off_policy + 1) * groups_per_step groups are under way: sampled, waiting to be
  trained, or being trained. So many, and no more, can be trained before they are too old.
- **Oldest first.** A step takes the oldest finished groups. It waits for no others: a scenario that takes long holds up
  nobody, and its group may come too late.
- **Never late twice.** The scenario of a group that came too late is sampled again before any other, its group is
  trained before any other, and steps wait for it. Nothing is starved, and what was slow by chance costs no waiting.

Where groups that are too old are trained all the same, nothing is sampled twice and no step waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Attempt", "FinishedAttempt", "Overlap"]


@dataclass(frozen=True)
class Attempt:
    """One group to be sampled."""

    position: int
    """Of its scenario among all scenarios, counted from 0."""
    number: int
    """How many groups of this scenario were given up before, most often for coming too late; 0 for the first."""
    version: int
    """The version that was served when it was started."""

    @property
    def key(self) -> str:
        """What no other attempt of the run has."""
        return f"{self.position}.{self.number}" if self.number else str(self.position)


@dataclass(frozen=True)
class FinishedAttempt:
    """One group that was sampled."""

    attempt: Attempt
    oldest_version: int
    """That sampled any of its tokens."""


class Overlap:
    """Decides which groups are sampled and which are trained. Whoever drives it does so, and says what happened.

    Args:
        groups_per_step: groups that a step takes; the last one may find fewer.
        max_steps_off_policy: how many versions a group may be behind; 0: sampling and training take turns.
        version: to start from.
        last_version: to end at; None: when there are no scenarios left.
        first_unread: the first scenario that was never sampled for a step that was taken.
        waiting: scenarios before that one which are still to be trained, each with how often it was too late.
        drops_stale: whether groups that are too old are sampled again; if not, they are trained.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_steps_off_policy: int,
        version: int = 0,
        last_version: int | None = None,
        first_unread: int = 0,
        waiting: Mapping[int, int] | None = None,
        drops_stale: bool = True,
    ) -> None:
        self.version = version
        """The newest version."""
        self._groups_per_step = groups_per_step
        self._max_behind = max_steps_off_policy
        self._last_version = last_version
        self._drops_stale = drops_stale
        self._queue = dict(waiting or {})
        """Scenarios to be sampled before any that is new, each with the number of its next attempt."""
        self._first_unread = first_unread
        self._has_run_out = False
        self._sampling: set[Attempt] = set()
        self._ready: list[FinishedAttempt] = []
        self._training = 0
        """Groups of the step that is being taken; 0 while there is none."""

    @property
    def is_over(self) -> bool:
        """Whether the last version is reached, or nothing is left to be trained."""
        if self._last_version is not None and self.version >= self._last_version:
            return True
        return self._has_run_out and not (self._queue or self._sampling or self._ready or self._training)

    @property
    def num_sampling(self) -> int:
        """Groups that were started and are not finished."""
        return len(self._sampling)

    def start(self) -> Attempt | None:
        """Returns the next group to be sampled, which counts as started; None: no more for now."""
        if not self._has_room or not (self._queue or not self._has_run_out):
            return None
        if self._queue:
            position = min(self._queue)
            number = self._queue.pop(position)
        else:
            position, number = self._first_unread, 0
            self._first_unread += 1
        attempt = Attempt(position, number, self.version)
        self._sampling.add(attempt)
        return attempt

    def ran_out(self, attempt: Attempt) -> None:
        """Takes back an attempt whose scenario does not exist: those before it were all."""
        self._sampling.discard(attempt)
        self._has_run_out = True

    def finish(self, attempt: Attempt, oldest_version: int | None) -> None:
        """Notes that a group was sampled. Where none of its tokens names a version, the one at its start counts."""
        self._sampling.remove(attempt)
        oldest = attempt.version if oldest_version is None else oldest_version
        self._ready.append(FinishedAttempt(attempt, oldest))

    def take_stale(self) -> list[FinishedAttempt]:
        """Takes away the finished groups that no step may train any more; their scenarios are sampled again, first."""
        stale = [group for group in self._ready if self._is_too_late(group)]
        for group in stale:
            self._ready.remove(group)
            self._queue[group.attempt.position] = group.attempt.number + 1
        return stale

    def begin_step(self) -> list[FinishedAttempt] | None:
        """Returns the groups that the next step trains, in the order of their scenarios; None: it has to wait.

        The step counts as begun; `end_step` must follow.
        """
        if self._training or self.is_over:
            return None
        num_wanted = self._groups_per_step
        if self._has_run_out:
            num_wanted = min(num_wanted, len(self._ready) + len(self._sampling) + len(self._queue))
        ready = [group for group in self._ready if not self._is_too_late(group)]
        if len(ready) < num_wanted:
            return None
        ready.sort(key=lambda group: (not group.attempt.number, group.oldest_version, group.attempt.position))
        chosen, others = ready[:num_wanted], ready[num_wanted:]
        if self._has_to_wait(others):
            return None
        self._ready = [group for group in self._ready if group not in chosen]
        self._training = len(chosen)
        return sorted(chosen, key=lambda group: group.attempt.position)

    def end_step(self) -> None:
        """Notes that the step was taken: there is a new version."""
        self._training = 0
        self.version += 1

    def staleness(self, group: FinishedAttempt) -> int:
        """Returns by how many versions a group is behind the newest."""
        return max(0, self.version - group.oldest_version)

    def is_stale(self, group: FinishedAttempt) -> bool:
        """Returns whether a group is further behind the newest version than it may be."""
        return self.staleness(group) > self._max_behind

    @property
    def _next(self) -> int:
        """The version from which the next step will be taken."""
        return self.version + bool(self._training)

    @property
    def _has_room(self) -> bool:
        waiting = len(self._ready) + len(self._sampling)
        # A step counts with all groups it may have, so that a smaller one lets no group in that has no step to go to.
        room = (self._max_behind + (not self._training)) * self._groups_per_step
        if self._last_version is not None:
            room = min(room, (self._last_version - self._next) * self._groups_per_step)
        return waiting < room

    def _is_too_late(self, group: FinishedAttempt) -> bool:
        return self._drops_stale and self._last_chance(group.oldest_version) < self._next

    def _last_chance(self, oldest_version: int) -> int:
        """Returns the last version from which a group may be trained."""
        return oldest_version + self._max_behind

    def _has_to_wait(self, others: Iterable[FinishedAttempt]) -> bool:
        """Returns whether this step, taken without `others`, would make a group late whose scenario was late before.

        Steps to come have room for so many groups each. Those that must not be late fit in if, for each version, no
        more of them have their last chance there than the steps up to it have room for.
        """
        if not self._drops_stale:
            return False
        due = [(self._last_chance(group.oldest_version), False) for group in others if group.attempt.number]
        due += [(self._last_chance(attempt.version), True) for attempt in self._sampling if attempt.number]
        is_sampled = False
        for count, (last, sampling) in enumerate(sorted(due), start=1):
            is_sampled |= sampling  # for what is finished, waiting would not help
            if is_sampled and count > (last - self.version) * self._groups_per_step:
                return True
        return False
