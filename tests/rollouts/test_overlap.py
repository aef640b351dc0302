"""The decisions alone, and whole runs of them in a simulated world where groups and steps take any time."""

import heapq
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_ray.rollouts.overlap import Attempt, FinishedAttempt, Overlap


@dataclass
class World:
    """Drives an `Overlap` to its end: groups take as long as `durations` says, steps `step_s`, in simulated time."""

    overlap: Overlap
    durations: list[float]
    """Of each scenario's first, second, … group in turn: `durations[(7 * position + number) % len(durations)]`."""
    step_s: float
    num_scenarios: int = 10**9
    max_steps: int = 10**9
    now: float = 0.0
    version_of_tokens: dict[Attempt, int] = field(default_factory=dict)
    steps: list[list[FinishedAttempt]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    started: list[Attempt] = field(default_factory=list)
    stale: list[FinishedAttempt] = field(default_factory=list)
    most_under_way: int = 0

    def run(self) -> "World":
        running: list[tuple[float, int, Attempt]] = []
        step_ends: float | None = None
        training = 0
        while not self.overlap.is_over and len(self.steps) < self.max_steps:
            while True:
                self.stale += self.overlap.take_stale()
                while (attempt := self.overlap.start()) is not None:
                    if attempt.position >= self.num_scenarios:
                        self.overlap.ran_out(attempt)
                        continue
                    self.started.append(attempt)
                    heapq.heappush(running, (self.now + self.duration(attempt), len(self.started), attempt))
                ready = len(self.started) - len(running) - len(self.stale) - sum(map(len, self.steps))
                self.most_under_way = max(self.most_under_way, len(running) + ready + training)
                if step_ends is not None or (batch := self.overlap.begin_step()) is None:
                    break
                self.steps.append(batch)
                self.staleness += [self.overlap.staleness(group) for group in batch]
                training, step_ends = len(batch), self.now + self.step_s
            if self.overlap.is_over:
                break
            assert running or step_ends is not None, "nothing runs, and nothing will ever happen"
            if step_ends is not None and (not running or step_ends <= running[0][0]):
                self.now, step_ends, training = step_ends, None, 0
                self.overlap.end_step()
            else:
                self.now, _, attempt = heapq.heappop(running)
                self.overlap.finish(attempt, attempt.version)
        return self

    def duration(self, attempt: Attempt) -> float:
        return self.durations[(7 * attempt.position + attempt.number) % len(self.durations)]

    @property
    def trained(self) -> list[int]:
        return [group.attempt.position for batch in self.steps for group in batch]


worlds = {
    "durations": st.lists(st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0, 10.0, 50.0]), min_size=1, max_size=30),
    "step_s": st.sampled_from([0.01, 1.0, 5.0]),
    "groups_per_step": st.integers(1, 5),
    "behind": st.integers(0, 4),
    "num_steps": st.integers(1, 25),
}


@settings(max_examples=400, deadline=None)
@given(**worlds)
def test_whatever_takes_how_long_nothing_too_old_is_trained_and_every_scenario_once(
    durations, step_s, groups_per_step, behind, num_steps
):
    overlap = Overlap(groups_per_step=groups_per_step, max_steps_off_policy=behind, last_version=num_steps)
    world = World(overlap, durations, step_s).run()
    assert overlap.version == len(world.steps) == num_steps
    assert all(len(batch) == groups_per_step for batch in world.steps)
    assert max(world.staleness) <= behind
    assert sorted(world.trained) == list(range(num_steps * groups_per_step))
    assert len(world.started) == len(world.trained) + len(world.stale), "nothing is sampled that no step will need"
    assert world.most_under_way <= (behind + 1) * groups_per_step


@settings(max_examples=400, deadline=None)
@given(**worlds)
def test_no_scenario_is_too_late_twice(durations, step_s, groups_per_step, behind, num_steps):
    overlap = Overlap(groups_per_step=groups_per_step, max_steps_off_policy=behind, last_version=num_steps)
    world = World(overlap, durations, step_s).run()
    assert max(Counter(group.attempt.position for group in world.stale).values(), default=0) <= 1


@settings(max_examples=200, deadline=None)
@given(**worlds)
def test_where_stale_groups_are_trained_none_is_sampled_twice(durations, step_s, groups_per_step, behind, num_steps):
    overlap = Overlap(
        groups_per_step=groups_per_step, max_steps_off_policy=behind, last_version=num_steps, drops_stale=False
    )
    world = World(overlap, durations, step_s).run()
    assert sorted(world.trained) == list(range(num_steps * groups_per_step))
    assert len(world.started) == len(world.trained)
    assert not world.stale


@settings(max_examples=200, deadline=None)
@given(num_scenarios=st.integers(0, 40), **worlds)
def test_scenarios_that_run_out_are_all_trained_and_the_last_step_may_be_smaller(
    durations, step_s, groups_per_step, behind, num_steps, num_scenarios
):
    overlap = Overlap(groups_per_step=groups_per_step, max_steps_off_policy=behind)
    world = World(overlap, durations, step_s, num_scenarios).run()
    assert sorted(world.trained) == list(range(num_scenarios))
    assert [len(batch) for batch in world.steps[:-1]] == [groups_per_step] * (len(world.steps) - 1)
    assert overlap.version == -(-num_scenarios // groups_per_step)


@settings(max_examples=200, deadline=None)
@given(stopped_after=st.integers(0, 25), **worlds)
def test_a_run_that_starts_again_trains_every_scenario_once(
    durations, step_s, groups_per_step, behind, num_steps, stopped_after
):
    kind = {"groups_per_step": groups_per_step, "max_steps_off_policy": behind, "last_version": num_steps}
    first = World(Overlap(**kind), durations, step_s, max_steps=min(stopped_after, num_steps)).run()
    done = set(first.trained)
    first_unread = max(done, default=-1) + 1
    late = Counter(group.attempt.position for group in first.stale)
    waiting = {position: late[position] for position in range(first_unread) if position not in done}
    overlap = Overlap(**kind, version=len(first.steps), first_unread=first_unread, waiting=waiting)
    second = World(overlap, durations, step_s).run()
    assert sorted(first.trained + second.trained) == list(range(num_steps * groups_per_step))
    assert overlap.version == num_steps


def test_without_overlap_each_step_takes_the_next_scenarios_in_order_and_waits_for_all():
    world = World(Overlap(groups_per_step=3, max_steps_off_policy=0, last_version=4), [3.0, 0.1, 9.0, 1.0], 1.0).run()
    assert [[group.attempt.position for group in batch] for batch in world.steps] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]
    ]  # fmt: skip
    assert [attempt.version for attempt in world.started] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert not world.stale
    assert set(world.staleness) == {0}


def test_one_step_off_policy_makes_steps_last_as_long_as_the_longer_of_sampling_and_training():
    def seconds(behind: int) -> float:
        overlap = Overlap(groups_per_step=4, max_steps_off_policy=behind, last_version=100)
        return World(overlap, [1.0], 1.0).run().now

    assert seconds(0) == pytest.approx(200)
    assert seconds(1) == pytest.approx(101)


def test_a_scenario_that_is_always_slow_is_trained_and_holds_up_only_its_second_attempt():
    slow = 5
    durations = [1.0] * 149
    for number in range(2):
        durations[(7 * slow + number) % len(durations)] = 30.0
    overlap = Overlap(groups_per_step=2, max_steps_off_policy=1, last_version=20)
    world = World(overlap, durations, 1.0).run()
    assert [group.attempt for group in world.stale] == [Attempt(slow, 0, 1)]
    [attempt] = [g.attempt for batch in world.steps for g in batch if g.attempt.position == slow]
    assert attempt.number == 1


def test_what_was_too_late_is_sampled_before_anything_new():
    overlap = Overlap(groups_per_step=1, max_steps_off_policy=1)
    first, second = overlap.start(), overlap.start()
    assert overlap.start() is None, "one for this step, one for the next"
    overlap.finish(second, 0)
    assert overlap.begin_step() == [FinishedAttempt(second, 0)]
    overlap.end_step()
    third = overlap.start()
    assert third == Attempt(2, 0, version=1)
    overlap.finish(third, 1)
    assert overlap.begin_step() == [FinishedAttempt(third, 1)]
    overlap.end_step()
    overlap.finish(first, 0)
    assert overlap.begin_step() is None, "what is two versions behind is not trained"
    assert [group.attempt for group in overlap.take_stale()] == [first]
    assert overlap.start() == Attempt(0, 1, version=2)


def test_a_group_is_as_old_as_its_oldest_token_not_as_its_start():
    overlap = Overlap(groups_per_step=1, max_steps_off_policy=1, version=5)
    attempt = overlap.start()
    overlap.finish(attempt, 3)  # found again, from before a restart
    assert overlap.take_stale() == [FinishedAttempt(attempt, 3)]
    again = overlap.start()
    assert (again.position, again.number, again.key) == (0, 1, "0.1")
    overlap.finish(again, None)
    [group] = overlap.begin_step()
    assert group.oldest_version == 5, "no token names a version: the one at its start"


def test_what_was_late_before_is_trained_before_what_was_not():
    overlap = Overlap(groups_per_step=1, max_steps_off_policy=2, version=4, first_unread=2, waiting={0: 1, 1: 1})
    late, also_late, new = overlap.start(), overlap.start(), overlap.start()
    assert [late.position, also_late.position, new.position] == [0, 1, 2]
    overlap.finish(new, 2)  # its last chance is now
    overlap.finish(also_late, 3)
    overlap.finish(late, 3)  # these have one more step, which has room for one
    assert overlap.begin_step() == [FinishedAttempt(late, 3)]
    assert overlap.take_stale() == [FinishedAttempt(new, 2)], "known while the step before it is being taken"
    overlap.end_step()
    assert overlap.begin_step() == [FinishedAttempt(also_late, 3)]
