"""Log-probabilities in chunks against the same from whole logits."""

import pytest
import torch

from art_ray.training.logprobs import Head, chunked_logprobs


def whole(hidden, sources, temperatures, targets, head):
    logits = (hidden @ head.weight.T + (0 if head.bias is None else head.bias)) * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    logprobs = torch.log_softmax(logits[sources] / temperatures[:, None], -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


@pytest.mark.parametrize("head", ["plain", "bias", "scale", "softcap"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_chunks_give_values_gradients_and_entropies_of_whole_logits(head, chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=generator)
    output = {
        "plain": Head(weight),
        "bias": Head(weight, bias=torch.randn(50, generator=generator)),
        "scale": Head(weight, scale=0.3),
        "softcap": Head(weight, softcap=2.0, scale=0.5),
    }[head]
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    # A source with several targets, one with two temperatures, some with none.
    sources = torch.tensor([0, 0, 0, 2, 2, 5, 7, 8])
    temperatures = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1.3, 1.0, 0.7])
    targets = torch.tensor([3, 4, 4, 9, 9, 49, 0, 12])
    weights = torch.randn(8, generator=generator)

    expected, expected_entropies = whole(hidden, sources, temperatures, targets, output)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), hidden)
    found, entropies = chunked_logprobs(hidden, sources, temperatures, targets, output, chunk_tokens)
    (gradient,) = torch.autograd.grad((found * weights).sum(), hidden)

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=1e-5)


def test_logits_of_very_different_size_stay_finite():
    head = Head(torch.eye(4) * 1e4)
    found, entropies = chunked_logprobs(
        torch.eye(4), torch.arange(4), torch.ones(4), torch.tensor([0, 1, 0, 3]), head, 2
    )
    assert found.tolist() == [0.0, 0.0, -1e4, 0.0]
    assert torch.isfinite(entropies).all()
