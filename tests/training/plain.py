"""The plainest computation of a step: one sequence at a time, the model's own forward pass, whole logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from art_ray.training.packing import TrainingBatch
from art_ray.training.policy import Policy, _own_attention
from art_ray.training.samples import TrainingSample


def plain(policy: Policy, samples: Sequence[TrainingSample]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of each sequence's trained tokens, and the gradient of their sums weighted by advantage."""
    policy.model.zero_grad()
    causal_lm = policy.model.get_base_model()
    found = []
    with _own_attention(causal_lm):
        for item in samples:
            tokens, temperatures, trained = (
                torch.from_numpy(array).to(policy.device) for array in (item.tokens, item.temperatures, item.trained)
            )
            logits = causal_lm(input_ids=tokens[None], use_cache=False).logits[0].float()
            logits = logits[:-1] / temperatures[1:, None]
            chosen = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
            found.append(chosen[trained[1:]])
            (found[-1] * item.advantage).sum().backward()
    return [part.detach() for part in found], gradients(policy)


def packed(policy: Policy, batch: TrainingBatch) -> tuple[dict[float, Tensor], list[Tensor]]:
    """The same from packed rows; log-probabilities by advantage, which is to be different for every sequence."""
    policy.model.zero_grad()
    found = {}
    for row in batch.rows:
        logprobs, _ = policy.logprobs(row)
        (logprobs * torch.from_numpy(row.advantages).to(policy.device)).sum().backward()
        for sequence in np.unique(row.sequences):
            chosen = row.sequences == sequence
            found[float(row.advantages[chosen][0])] = logprobs.detach()[torch.from_numpy(chosen).to(policy.device)]
    return found, gradients(policy)


def gradients(policy: Policy) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in policy.adapter.values()]


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    one, other = (torch.cat([x.reshape(-1) for x in tensors]).double() for tensors in (ours, theirs))
    return float((one - other).norm() / other.norm())
