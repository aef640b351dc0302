"""The losses: what is summed over the trained tokens of a step, and divided once by the step's total.

Every function takes one packed row's targets as flat tensors [K] and returns sums. The division by the number of
trained tokens (or sequences) of the whole step is the caller's, so that it does not matter how a step was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art_ray.types import TrainConfig

__all__ = ["LossInput", "LossSums", "cispo", "policy_gradient_loss", "ppo", "sequence_ratio", "supervised_loss"]

_DEFAULT_CLIP = {"cispo": (1.0, 4.0), "ppo": (0.2, 0.2)}


@dataclass(frozen=True)
class LossInput:
    """The targets of one row. float32 [K] but for `sequences`."""

    logprobs: Tensor
    """Of each sampled token under the policy being trained; the only tensor with a gradient."""
    sampler_logprobs: Tensor
    """Of the same tokens under the policy that sampled them; NaN: unknown, the ratio is 1."""
    advantages: Tensor
    sequences: Tensor
    """int64 [K], which sequence of the row each belongs to."""
    num_sequences: int
    reference_logprobs: Tensor | None = None
    """Of the same tokens under the base model; None without `beta`."""


@dataclass(frozen=True)
class LossSums:
    """Sums over one row."""

    loss: Tensor
    """Scalar with a gradient: policy loss plus beta times KL."""
    policy_loss: Tensor
    kl_div: Tensor | None
    num_clipped: Tensor
    """Tokens whose ratio lay outside the clip range."""
    log_ratios: Tensor
    """[K], trainer minus sampler, detached; 0 where unknown."""


def cispo(ratios: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns -clip(ratio, low, high) * advantage * logprob per token, the clipped ratio without a gradient, as [K].

    CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5): clipping bounds a token's weight and never silences it.
    """
    return -ratios.detach().clamp(low, high) * advantages * logprobs


def ppo(ratios: Tensor, logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns -min(ratio * advantage, clip(ratio, low, high) * advantage) per token, as [K].

    PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7). `logprobs` is not needed: the ratio carries the gradient.
    """
    return -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)


_SURROGATES = {"cispo": cispo, "ppo": ppo}


def sequence_mean(values: Tensor, inputs: LossInput) -> Tensor:
    """Returns the mean of `values` [K] over the tokens of each sequence, for each token of it, as [K]."""
    counts = torch.bincount(inputs.sequences, minlength=inputs.num_sequences).clamp(min=1)
    sums = values.new_zeros(inputs.num_sequences).index_add(0, inputs.sequences, values)
    return (sums / counts)[inputs.sequences]


def sequence_ratio(log_ratios: Tensor, inputs: LossInput) -> Tensor:
    """Returns the geometric mean of the ratios of each sequence, for each token of it, as [K].

    GSPO-token (Zheng et al. 2025, arXiv:2507.18071, equation 14): the value is the sequence's, the gradient reaches
    each token through that token alone, so that both surrogates apply unchanged.
    """
    mean = sequence_mean(log_ratios.detach(), inputs)
    return torch.exp(mean + log_ratios - log_ratios.detach())


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Returns exp(d) - 1 - d with d = reference - policy, per token, as [K].

    An unbiased, non-negative estimate of the KL divergence from policy to reference: "k3" of
    Schulman, "Approximating KL divergence" (2020), as GRPO uses it (arXiv:2402.03300, equation 4).
    """
    difference = reference_logprobs - logprobs
    return torch.expm1(difference) - difference


def policy_gradient_loss(inputs: LossInput, config: TrainConfig) -> LossSums:
    """Returns the sums of one row under the options of `config`.

    Token ratios: each token weighs 1, the denominator is the number of tokens. Sequence ratios: each token weighs
    1 / length of its sequence, the denominator is the number of sequences.
    """
    known = ~torch.isnan(inputs.sampler_logprobs)
    sampler_logprobs = torch.where(known, inputs.sampler_logprobs, inputs.logprobs.detach())
    log_ratios = inputs.logprobs - sampler_logprobs
    by_sequence = config.importance_sampling_level == "sequence"
    ratios = sequence_ratio(log_ratios, inputs) if by_sequence else torch.exp(log_ratios)

    default_low, default_high = _DEFAULT_CLIP[config.loss]
    low = 1.0 - (default_low if config.epsilon is None else config.epsilon)
    high = 1.0 + (default_high if config.epsilon_high is None else config.epsilon_high)
    losses = _SURROGATES[config.loss](ratios, inputs.logprobs, inputs.advantages, low, high)

    if config.truncated_importance_sampling is not None:
        # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training": the sampler's and
        # the trainer's kernels differ, and min(trainer / sampler, C) corrects the expectation.
        losses = losses * torch.exp(log_ratios.detach()).clamp(max=config.truncated_importance_sampling)

    weights = _weights(inputs) if by_sequence else torch.ones_like(losses)
    policy_loss = (losses * weights).sum()
    loss, kl_div = policy_loss, None
    if inputs.reference_logprobs is not None:
        kl_div = (kl_to_reference(inputs.logprobs, inputs.reference_logprobs) * weights).sum()
        loss = policy_loss + config.beta * kl_div
    clipped = (ratios.detach() < low) | (ratios.detach() > high)
    return LossSums(
        loss=loss,
        policy_loss=policy_loss.detach(),
        kl_div=None if kl_div is None else kl_div.detach(),
        num_clipped=clipped.sum(),
        log_ratios=log_ratios.detach(),
    )


def _weights(inputs: LossInput) -> Tensor:
    counts = torch.bincount(inputs.sequences, minlength=inputs.num_sequences).clamp(min=1)
    return (1.0 / counts)[inputs.sequences]


def supervised_loss(inputs: LossInput) -> LossSums:
    """Returns the sums of the negative log-likelihood of the targets: supervised fine-tuning."""
    loss = -inputs.logprobs.sum()
    zeros = torch.zeros_like(inputs.logprobs.detach())
    return LossSums(loss=loss, policy_loss=loss.detach(), kl_div=None, num_clipped=zeros.sum(), log_ratios=zeros)
