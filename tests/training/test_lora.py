"""The adapter added in place against PEFT's own forward pass."""

import pytest
import torch

from art_ray.training.lora import fuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_in_place_gives_the_values_and_gradients_of_peft(dtype):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.GELU(), torch.nn.Linear(20, 8, bias=False)).to(dtype)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["0", "2"], init_lora_weights=False))
    x = torch.randn(2, 5, 12, dtype=dtype)

    def run():
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        output = model(inputs).float()
        (output**2).sum().backward()
        return output.detach(), inputs.grad, *[p.grad for p in model.parameters() if p.requires_grad]

    expected = run()
    assert fuse(model) == 2
    found = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        apart = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert apart < (1e-5 if dtype == torch.float32 else 0.03)
