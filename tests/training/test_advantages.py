"""From rewards to advantages and outcomes."""

from __future__ import annotations

import math

import pytest

from art_ray.training.advantages import advantages, collect, spread
from art_ray.trajectories import TrajectoryGroup
from art_ray.types import Outcome
from tests.training.made import trajectory


def test_the_advantage_is_centred_and_divided_by_the_population_deviation():
    assert advantages([0.0, 1.0]) == pytest.approx([-0.5 / 0.500001, 0.5 / 0.500001])
    assert advantages([0.0, 1.0, 5.0], scale=False) == pytest.approx([-2.0, -1.0, 3.0])


def test_three_rewards_of_a_tenth_have_no_advantage_though_their_mean_is_not_a_tenth():
    assert sum([0.1, 0.1, 0.1]) / 3 != 0.1
    assert advantages([0.1, 0.1, 0.1]) is None
    assert advantages([1e12 + 0.1, 1e12 + 0.1001]) is None


def test_a_small_spread_of_large_rewards_is_not_lost():
    assert spread([1e6, 1e6 + 1]) == pytest.approx(0.5)


def test_rewards_whose_squares_overflow_have_the_advantages_of_small_ones():
    assert advantages([1e200, -1e200]) == pytest.approx([1, -1])
    assert advantages([1.7e308, 1.7e308, 0.0]) == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])
    assert spread([1e200, -1e200]) == pytest.approx(1e200)


def test_seven_against_one_stays_within_what_a_group_of_eight_can_have():
    values = advantages([1.0] * 7 + [0.0])
    assert values is not None
    assert max(map(abs, values)) < math.sqrt(7) + 1e-3


def test_every_rollout_ends_as_exactly_one_outcome():
    mixed = TrajectoryGroup(
        [
            trajectory([1, 2], [3], 1.0),
            trajectory([1, 2], [4], 0.0),
            trajectory([1, 2], [5], math.nan),
            trajectory([1, 2], [6], 0.5, temperature=0.0),
            trajectory([1, 2], list(range(3, 60)), 0.5),
            ValueError("x"),
        ]
    )
    equal = TrajectoryGroup([trajectory([1], [2], 0.1), trajectory([1], [3], 0.1)])
    alone = TrajectoryGroup([trajectory([1], [2], 0.1)])
    found = collect([mixed, equal, alone, TrajectoryGroup([])], 50, scale_rewards=True)
    counts = {outcome: count for outcome, count in found.outcomes.items() if count}
    assert counts == {
        Outcome.TRAINED: 2,
        Outcome.NOT_SCORED: 1,
        Outcome.RESTRICTED_SAMPLING: 1,
        Outcome.TOO_LONG: 1,
        Outcome.FAILED: 1,
        Outcome.NO_SPREAD: 3,
    }
    assert sum(found.outcomes.values()) == 9
    assert (found.num_groups_submitted, found.num_groups_trainable, found.num_trajectories) == (4, 1, 2)


def test_one_failed_or_unscored_sibling_does_not_cost_the_group():
    group = TrajectoryGroup(
        [trajectory([1], [2], 0.0), trajectory([1], [3], 1.0), trajectory([1], [4], math.nan), RuntimeError("late")]
    )
    found = collect([group], 50, scale_rewards=False)
    assert [sample.advantage for sample in found.samples] == [-0.5, 0.5]


def test_a_scored_rollout_that_cannot_be_trained_still_counts_in_the_mean():
    group = TrajectoryGroup(
        [trajectory([1], [2], 0.0), trajectory([1], [3], 1.0), trajectory([1], [4], 5.0, temperature=0.0)]
    )
    found = collect([group], 50, scale_rewards=False)
    assert [sample.advantage for sample in found.samples] == [-2.0, -1.0]
