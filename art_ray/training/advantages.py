"""From rewards to advantages, and what becomes of every rollout of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from art_ray.training.samples import Answers, Refusal, TrainingSample, samples_of
from art_ray.trajectories import Trajectory, TrajectoryGroup, has_spread, mean_and_deviation
from art_ray.types import Outcome

__all__ = ["StepSamples", "advantages", "collect", "collect_supervised", "spread"]

_EPSILON = 1e-6
"""Added to the spread before dividing by it."""


def spread(rewards: Sequence[float]) -> float:
    """Returns the population standard deviation, or 0.0 where it is residue of floating point."""
    return mean_and_deviation(rewards)[1] if has_spread(rewards) else 0.0


def advantages(rewards: Sequence[float], scale: bool = True) -> list[float] | None:
    """Returns (r - mean) / (spread + 1e-6) for each reward of a group, or None where there is no spread.

    GRPO's advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); without `scale` only the mean is subtracted
    (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783).
    """
    if not has_spread(rewards):
        return None
    mean, deviation = mean_and_deviation(rewards)
    centred = [reward - mean for reward in rewards]
    return [value / (deviation + _EPSILON) for value in centred] if scale else centred


@dataclass(frozen=True)
class StepSamples:
    """What a step trains on, and what became of every rollout that was submitted."""

    samples: list[TrainingSample]
    outcomes: dict[Outcome, int]
    """How many rollouts ended as each; they sum to the number submitted."""
    reasons: dict[str, int]
    """Why rollouts were refused, in words, with counts."""
    num_groups_submitted: int
    num_groups_trainable: int
    num_trajectories: int
    """Trajectories that are trained."""
    reward_spread: float
    """Mean spread of rewards over the trainable groups; 0.0 without any."""


def collect(
    groups: Sequence[TrajectoryGroup], max_tokens: int, *, scale_rewards: bool, render: Answers | None = None
) -> StepSamples:
    """Returns the sequences of a step with their advantages.

    Failed and unscored rollouts leave before the statistics. A scored rollout that cannot be trained (no token ids,
    restricted sampling, too long) still counts in its group's mean: its reward is as true as the others'.

    Args:
        groups: any number, of any size.
        max_tokens: the longest sequence that fits.
        scale_rewards: whether advantages are divided by the spread.
        render: see `samples_of`.
    """
    outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
    reasons: Counter[str] = Counter()
    samples: list[TrainingSample] = []
    spreads: list[float] = []
    num_trajectories = 0
    for group in groups:
        outcomes[Outcome.FAILED] += len(group.exceptions)
        scored = [trajectory for trajectory in group if trajectory.is_scored]
        outcomes[Outcome.NOT_SCORED] += len(group) - len(scored)
        values = advantages([trajectory.reward for trajectory in scored], scale_rewards)
        num_trainable = 0
        for position, trajectory in enumerate(scored):
            found = samples_of(trajectory, max_tokens, render)
            if isinstance(found, Refusal):
                outcomes[found.outcome] += 1
                reasons[f"{found.outcome}: {found.reason}"] += 1
            elif values is None:
                outcomes[Outcome.NO_SPREAD] += 1
            else:
                outcomes[Outcome.TRAINED] += 1
                samples += [sample.with_advantage(values[position], num_trajectories) for sample in found]
                num_trajectories += 1
                num_trainable += 1
        if num_trainable:
            spreads.append(spread([trajectory.reward for trajectory in scored]))
    return StepSamples(
        samples=samples,
        outcomes=dict(outcomes),
        reasons=dict(reasons),
        num_groups_submitted=len(groups),
        num_groups_trainable=len(spreads),
        num_trajectories=num_trajectories,
        reward_spread=mean_and_deviation(spreads)[0],
    )


def collect_supervised(trajectories: Sequence[Trajectory], max_tokens: int, render: Answers) -> StepSamples:
    """Returns the sequences of trajectories whose answers are to be imitated, whatever their rewards."""
    outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
    reasons: Counter[str] = Counter()
    samples: list[TrainingSample] = []
    for number, trajectory in enumerate(trajectories):
        found = samples_of(trajectory, max_tokens, render, is_sampling_exact=False)
        if isinstance(found, Refusal):
            outcomes[found.outcome] += 1
            reasons[f"{found.outcome}: {found.reason}"] += 1
        else:
            outcomes[Outcome.TRAINED] += 1
            samples += [sample.with_advantage(1.0, number) for sample in found]
    return StepSamples(
        samples=samples,
        outcomes=dict(outcomes),
        reasons=dict(reasons),
        num_groups_submitted=0,
        num_groups_trainable=0,
        num_trajectories=outcomes[Outcome.TRAINED],
        reward_spread=0.0,
    )
