"""Log-probabilities of chosen tokens without the [tokens, vocabulary] matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Head", "chunked_logprobs"]


@dataclass(frozen=True)
class Head:
    """The output layer, never trained: logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap)."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    softcap: float | None = None
    """None: no cap."""

    def logits(self, hidden: Tensor, temperatures: Tensor) -> Tensor:
        """Returns the logits of `hidden` [N, H], divided by `temperatures` [N], as float32 [N, V]."""
        if self.softcap is None and self.bias is None:
            # A pass over [N, H] in place of one over [N, V].
            factors = self.scale / temperatures[:, None]
            return torch.nn.functional.linear((hidden * factors).to(hidden.dtype), self.weight).float()
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float() * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits / temperatures[:, None]

    def backward(self, grad: Tensor, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Returns the gradient of `hidden` [N, H] from that of what `logits` returned [N, V]."""
        if self.softcap is not None:
            grad = grad * (1 - (logits * temperatures[:, None] / self.softcap) ** 2)
        return self.scaled(grad.to(self.weight.dtype) @ self.weight, temperatures)

    def scaled(self, grad_hidden: Tensor, temperatures: Tensor) -> Tensor:
        """Returns `grad_hidden` [N, H] times the head's scale and over the temperatures [N]."""
        return grad_hidden.float() * (self.scale / temperatures[:, None])


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps one log-sum-exp per row, and the last chunk's probabilities; backward computes the other chunks'
    logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H]
        temperatures: Tensor,  # [N]
        rows: Tensor,  # [K], rising
        tokens: Tensor,  # [K]
        head: Head,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        bounds = _bounds(rows, len(hidden), chunk_tokens)
        logprobs = hidden.new_empty(len(rows), dtype=torch.float32)
        log_normalizers = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = hidden.new_empty(len(hidden), dtype=torch.float32)
        for start, end, first, last in bounds:
            logits = head.logits(hidden[start:end], temperatures[start:end])
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest)
            powers = torch.exp(logits)
            total = powers.sum(-1)
            normalizer = total.log()
            picked = logits[rows[first:last] - start, tokens[first:last]]
            logprobs[first:last] = picked - normalizer[rows[first:last] - start]
            log_normalizers[start:end] = normalizer + largest[:, 0]
            # H = log Z - sum p * logit, with logits that count from the largest
            entropies[start:end] = normalizer - torch.einsum("nv,nv->n", powers, logits) / total
        # Backward begins next, while no other chunk exists: keeping these costs no memory at its peak.
        ctx.last = powers.div_(total[:, None]) if head.softcap is None else None
        ctx.save_for_backward(hidden, temperatures, rows, tokens, log_normalizers)
        ctx.head, ctx.bounds = head, bounds
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, temperatures, rows, tokens, log_normalizers = ctx.saved_tensors
        grad_logprobs: Tensor = grads[0]
        grad_hidden = torch.empty_like(hidden)
        # Each row's log-normalizer enters the log-probability of every target of the row.
        row_grads = grad_logprobs.new_zeros(len(hidden)).index_add_(0, rows, grad_logprobs)
        head: Head = ctx.head
        for start, end, first, last in reversed(ctx.bounds):
            inside = rows[first:last] - start
            # d logprob / d logit = 1[target] - p
            if head.softcap is None:
                # The two terms apart: the first is a few rows of the weights, and the second needs no pass over
                # [N, V] to be weighted.
                probabilities, ctx.last = ctx.last, None
                if probabilities is None:
                    logits = head.logits(hidden[start:end], temperatures[start:end])
                    probabilities = logits.sub_(log_normalizers[start:end, None]).exp_()
                grad = (probabilities.to(head.weight.dtype) @ head.weight).float() * -row_grads[start:end, None]
                del probabilities
                grad.index_add_(0, inside, head.weight[tokens[first:last]].float() * grad_logprobs[first:last, None])
                grad_hidden[start:end] = head.scaled(grad, temperatures[start:end])
            else:
                logits = head.logits(hidden[start:end], temperatures[start:end])
                weighted = (logits - log_normalizers[start:end, None]).exp_().mul_(-row_grads[start:end, None])
                weighted.index_put_((inside, tokens[first:last]), grad_logprobs[first:last], accumulate=True)
                grad_hidden[start:end] = head.backward(weighted, logits, temperatures[start:end])
        return grad_hidden, None, None, None, None, None


def _bounds(rows: Tensor, num_rows: int, chunk_tokens: int) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first target, end target) of each chunk."""
    starts = list(range(0, num_rows, chunk_tokens))
    edges = torch.tensor([*starts, num_rows], device=rows.device, dtype=rows.dtype)
    cuts = torch.searchsorted(rows, edges).tolist()
    return [(start, min(start + chunk_tokens, num_rows), cuts[i], cuts[i + 1]) for i, start in enumerate(starts)]


def chunked_logprobs(
    hidden: Tensor, sources: Tensor, temperatures: Tensor, targets: Tensor, head: Head, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(logits / temperature)[target] for K targets, and the mean entropy seen by each.

    Logits exist for `chunk_tokens` positions at a time, in the forward and again in the backward pass. Targets that
    share a source and a temperature share its logits.

    Args:
        hidden: [T, H], output of the last layer.
        sources: int64 [K], rising: the row of `hidden` that predicts each target.
        temperatures: float32 [K], divisors of the logits.
        targets: int64 [K], tokens.
        head: the output layer.
        chunk_tokens: how many positions at a time.

    Returns:
        float32 [K] log-probabilities, with a gradient to `hidden`; float32 [K] entropies, without.
    """
    if len(sources) == 0:
        return hidden.sum(dtype=torch.float32) * temperatures, temperatures.clone()
    changes = torch.ones_like(sources, dtype=torch.bool)
    changes[1:] = (sources[1:] != sources[:-1]) | (temperatures[1:] != temperatures[:-1])
    rows = torch.cumsum(changes, 0) - 1  # [K], into the unique (source, temperature) pairs
    logprobs, entropies = _ChunkedLogprobs.apply(
        hidden[sources[changes]], temperatures[changes], rows, targets, head, chunk_tokens
    )
    return logprobs, entropies[rows]
