"""One optimizer step: forward and backward over the rows of this rank, one sum over all ranks, one update."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from art_ray.training.loss import LossInput, policy_gradient_loss, supervised_loss
from art_ray.training.optimizer import Optimizer, Update
from art_ray.training.packing import PackedRow, TrainingBatch, deal
from art_ray.training.policy import Policy
from art_ray.training.ranks import Ranks
from art_ray.types import TrainConfig

__all__ = ["Progress", "StepResult", "train_step"]

Progress = Callable[[Mapping[str, Any]], None]
"""Called after each row with row, num_rows, num_tokens and seconds of this rank."""


@dataclass
class StepResult:
    """Sums over all rows of all ranks, already divided by the step's denominator where that applies."""

    update: Update
    loss: float
    policy_loss: float
    kl_div: float | None
    entropy: float
    """Mean over the trained tokens, nats."""
    num_clipped: int
    log_ratios: Tensor = field(repr=False)
    """float32 [K], trainer minus sampler, of all ranks."""


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: TrainingBatch,
    config: TrainConfig,
    ranks: Ranks,
    progress: Progress | None = None,
    *,
    is_supervised: bool = False,
) -> StepResult:
    """Takes one optimizer step on `batch`, of which this rank computes its share of the rows.

    With `is_supervised` the loss is the negative log-likelihood, and advantages and sampler play no part.

    Loss and gradient are sums over targets divided by one number of the whole step, so that neither packing nor
    ranks change them.
    """
    by_sequence = not is_supervised and config.importance_sampling_level == "sequence"
    denominator = batch.num_sequences if by_sequence else batch.num_trained_tokens
    rows = deal(batch.rows, ranks.world_size)[ranks.rank]
    sums = torch.zeros(5, dtype=torch.float64)  # loss, policy loss, KL, entropy, clipped
    log_ratios: list[Tensor] = []
    optimizer.zero_grad()
    started = time.monotonic()
    for index, row in enumerate(rows):
        row_sums, row_log_ratios = _forward_backward(policy, row, config, denominator, is_supervised)
        sums += row_sums
        log_ratios.append(row_log_ratios)
        if progress is not None:
            progress(
                {
                    "row": index + 1,
                    "num_rows": len(rows),
                    "num_tokens": len(row),
                    "seconds": time.monotonic() - started,
                }
            )
    ranks.sum(optimizer.gradients())
    ranks.sum([sums])
    loss, policy_loss, kl_div, entropy, num_clipped = sums.tolist()
    return StepResult(
        update=optimizer.step(loss, config),
        loss=loss,
        policy_loss=policy_loss,
        kl_div=kl_div if config.beta > 0 and not is_supervised else None,
        entropy=entropy / batch.num_trained_tokens,
        num_clipped=int(num_clipped),
        log_ratios=torch.cat([part for parts in ranks.gathered(log_ratios) for part in parts]),
    )


def _forward_backward(
    policy: Policy, row: PackedRow, config: TrainConfig, denominator: int, is_supervised: bool
) -> tuple[Tensor, Tensor]:
    """Adds one row to the gradients; returns its sums (loss, policy loss, KL, entropy, clipped) and log ratios [K]."""
    reference = policy.reference_logprobs(row) if config.beta > 0 and not is_supervised else None
    logprobs, entropies = policy.logprobs(row)
    device = logprobs.device
    inputs = LossInput(
        logprobs=logprobs,
        sampler_logprobs=torch.from_numpy(row.logprobs).to(device),
        advantages=torch.from_numpy(row.advantages).to(device),
        sequences=torch.from_numpy(row.sequences).to(device),
        num_sequences=row.num_sequences,
        reference_logprobs=reference,
    )
    found = supervised_loss(inputs) if is_supervised else policy_gradient_loss(inputs, config)
    (found.loss / denominator).backward()
    sums = torch.stack(
        [
            found.loss.detach() / denominator,
            found.policy_loss / denominator,
            (found.kl_div if found.kl_div is not None else torch.zeros_like(found.policy_loss)) / denominator,
            entropies.sum(),
            found.num_clipped.float(),
        ]
    )
    return sums.double().cpu(), found.log_ratios.cpu()
