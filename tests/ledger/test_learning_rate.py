import logging

import numpy as np
import pytest

from art_ray.ledger import History
from art_ray.ledger.learning_rate import learning_rate_multiplier, multiplier_of


@pytest.fixture
def recorded(tmp_path):
    """Returns the multiplier for spreads recorded as (step, spread) pairs."""

    def multiplier(*pairs):
        history = History(tmp_path / "history.jsonl")
        for step, spread in pairs:
            history.append({"train/reward_std_dev": spread, "step": step})
        return learning_rate_multiplier(history)

    return multiplier


def test_a_falling_spread_scales_down_along_the_fitted_line(recorded):
    # The line through (0, 0.5), (1, 0.4), (2, 0.3) ends at 0.3: 0.3 / 0.5.
    assert recorded((0, 0.5), (1, 0.4), (2, 0.3)) == pytest.approx(0.6)


def test_a_rising_spread_scales_up(recorded):
    assert recorded((0, 0.2), (1, 0.3)) == pytest.approx(1.5)


def test_a_line_that_falls_below_zero_never_turns_the_rate_negative(recorded, caplog):
    # Slope -0.16, intercept 0.39: the line is at -0.09 at step 3.
    with caplog.at_level(logging.WARNING):
        assert recorded((0, 0.5), (1, 0.1), (2, 0.0), (3, 0.0)) == 0.01
    assert "clamped to 0.01" in caplog.text


def test_a_steep_rise_is_clamped(recorded):
    assert recorded((0, 0.001), (1, 1.0)) == 10.0


def test_x_counts_from_the_first_recorded_step(recorded):
    assert recorded((100, 0.5), (101, 0.4), (102, 0.3)) == pytest.approx(0.6)


def test_gaps_between_steps_count(recorded):
    # a = -0.05 per step, b = 0.5; at step 4 the line is at 0.3.
    assert recorded((0, 0.5), (2, 0.4), (4, 0.3)) == pytest.approx(0.6)


def test_several_lines_of_one_step_are_one_point(recorded):
    assert recorded((0, 0.4), (0, 0.6), (1, 0.4), (2, 0.3)) == pytest.approx(0.6)


def test_without_a_trend_to_follow_the_rate_stays(recorded):
    assert recorded() == 1.0
    assert recorded((5, 0.3)) == 1.0, "one step"
    assert recorded((5, 0.1)) == 1.0, "still one step"
    assert recorded((6, None)) == 1.0, "a null is no point"


def test_a_fitted_start_at_or_below_zero_leaves_the_rate(recorded):
    assert recorded((0, 0.0), (1, 0.0)) == 1.0
    assert recorded((2, 0.0), (3, 0.5)) == 1.0


def test_the_line_is_numpys_least_squares(tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(50):
        steps = np.unique(rng.integers(0, 1000, 30))
        means = rng.uniform(0.1, 1.0, len(steps))
        a, b = np.polyfit(steps - steps[0], means, 1)
        from art_ray.ledger.history import StepMeans

        expected = float(np.clip((a * (steps[-1] - steps[0]) + b) / b, 0.01, 10)) if b > 0 else 1.0
        assert multiplier_of(StepMeans(steps, means)) == pytest.approx(expected, rel=1e-9)
