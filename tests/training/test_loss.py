"""Each loss against its formula, written out again for single numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from art_ray.training.loss import LossInput, policy_gradient_loss
from art_ray.types import TrainConfig


def run(new, old, advantages, sequences=None, reference=None, **options):
    """(sums, gradient of each log-probability)"""
    logprobs = torch.tensor(new, requires_grad=True)
    sums = policy_gradient_loss(
        LossInput(
            logprobs,
            torch.tensor(old),
            torch.tensor(advantages),
            torch.tensor(sequences or [0] * len(new)),
            max(sequences or [0]) + 1,
            None if reference is None else torch.tensor(reference),
        ),
        TrainConfig(**options),
    )
    sums.loss.backward()
    return dataclasses.replace(sums, loss=sums.loss.detach()), logprobs.grad.tolist()


def test_cispo_weighs_the_score_by_the_clipped_ratio_and_keeps_a_gradient_outside_the_clip():
    ratio = math.exp(0.3)
    sums, gradient = run([-1.0, -1.0], [-1.3, -9.0], [2.0, 2.0])
    assert float(sums.loss) == pytest.approx(ratio * 2 * 1 + 5 * 2 * 1)
    assert gradient == pytest.approx([-ratio * 2, -5 * 2])
    assert int(sums.num_clipped) == 1


def test_ppo_takes_the_smaller_objective_and_is_silent_where_that_is_clipped():
    inside, outside = math.exp(0.1), math.exp(1.0)
    sums, gradient = run([-1.0, -1.0, -1.0], [-1.1, -2.0, -2.0], [1.0, 1.0, -1.0], loss="ppo")
    assert float(sums.loss) == pytest.approx(-(inside + 1.2 - outside), rel=1e-6)
    assert gradient == pytest.approx([-inside, 0.0, outside])


def test_clip_bounds_are_those_of_the_config():
    sums, _ = run([-1.0, -1.0], [-1.4, -0.6], [1.0, 1.0], loss="ppo", epsilon=0.5, epsilon_high=0.1)
    assert float(sums.loss) == pytest.approx(-(1.1 + math.exp(-0.4)), rel=1e-6)
    assert int(sums.num_clipped) == 1


def test_a_sequence_ratio_is_the_geometric_mean_and_each_sequence_weighs_one():
    sums, gradient = run(
        [-1.0, -1.0, -1.0],
        [-1.2, -1.4, -1.1],
        [1.0, 1.0, 3.0],
        [0, 0, 1],
        importance_sampling_level="sequence",
        loss="ppo",
        epsilon=1.0,
        epsilon_high=1.0,
    )
    first, second = math.exp(0.3), math.exp(0.1)
    assert float(sums.loss) == pytest.approx(-(first + 3 * second), rel=1e-6)
    assert gradient == pytest.approx([-first / 2, -first / 2, -3 * second])


def test_an_unknown_sampler_log_probability_means_ratio_one():
    sums, gradient = run([-2.0], [math.nan], [1.0])
    assert float(sums.loss) == pytest.approx(2.0)
    assert gradient == pytest.approx([-1.0])
    assert sums.log_ratios.tolist() == [0.0]


def test_truncated_importance_sampling_bounds_the_weight_of_a_token():
    _, gradient = run([-1.0, -1.0], [-1.1, -3.0], [1.0, 1.0], epsilon_high=0.0, truncated_importance_sampling=2.0)
    assert gradient == pytest.approx([-math.exp(0.1), -2.0])


def test_beta_adds_the_k3_estimate_of_the_kl_to_the_base_model():
    sums, gradient = run([-1.0], [-1.0], [0.0], reference=[-1.5], beta=0.1)
    expected = math.exp(-0.5) - 1 + 0.5
    assert float(sums.kl_div) == pytest.approx(expected, rel=1e-5)
    assert float(sums.loss) == pytest.approx(0.1 * expected, rel=1e-5)
    assert gradient == pytest.approx([0.1 * (1 - math.exp(-0.5))], rel=1e-5)
