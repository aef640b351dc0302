from __future__ import annotations

import pytest

from art_ray.serving.health import Health, State


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(max_losses=2, stable_s=60, longest_wait_s=4, clock=clock)


def ready(health: Health) -> None:
    health.started()
    health.loaded()


def test_a_replica_is_ready_only_after_a_completed_load(health: Health):
    with pytest.raises(ValueError, match="starting cannot become ready"):
        health.loaded()
    health.started()
    assert health.state is State.LOADING
    health.loaded()
    assert health.state is State.READY


def test_a_lost_replica_has_to_load_again_before_it_is_ready(health: Health):
    ready(health)
    health.lost("killed")
    with pytest.raises(ValueError, match="lost cannot become ready"):
        health.loaded()
    health.starting()
    with pytest.raises(ValueError, match="starting cannot become ready"):
        health.loaded()
    ready(health)
    assert health.restarts == 1


def test_each_loss_in_a_row_is_waited_for_longer_until_it_is_given_up(health: Health):
    waits = []
    ready(health)
    for _ in range(2):
        waits.append(health.lost("killed"))
        health.starting()
        ready(health)
    assert waits == [1.0, 2.0]
    assert health.lost("killed again") is None
    assert (health.state, health.reason) == (State.FAILED, "killed again")


def test_a_replica_that_was_stable_begins_anew(health: Health, clock: Clock):
    for _ in range(5):
        ready(health)
        clock.now += 60
        assert health.lost("killed") == 1.0
        health.starting()


def test_what_never_came_up_or_would_end_the_same_way_is_not_tried_again(health: Health):
    assert health.lost("no such model") is None
    other = Health()
    ready(other)
    assert other.lost("a wrong argument", for_good=True) is None
