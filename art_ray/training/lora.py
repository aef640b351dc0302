"""PEFT's LoRA layers with their product added in place: the same numbers with fewer passes over memory.

PEFT computes `result + lora_B(lora_A(x)) * scaling`: three passes over an output-sized tensor forward and two backward,
and casts of whole activations where the adapter is float32 and the model bfloat16. A LoRA variant is PEFT's own place
for another forward pass; parameters, saving and loading stay PEFT's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fuse"]


class _AddLora(torch.autograd.Function):
    """result += scaling * (x @ A.T) @ B.T, in the dtype of `result`; gradients of A and B in their own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        # x [..., I], result [..., O], a [r, I], b [O, r]
        x_flat, result_flat = x.reshape(-1, x.shape[-1]), result.view(-1, result.shape[-1])
        low = x_flat @ a.to(x.dtype).T  # [N, r]
        result_flat.addmm_(low, b.to(x.dtype).T, alpha=scaling)
        ctx.mark_dirty(result)
        ctx.save_for_backward(x_flat, low, a, b)
        ctx.scaling, ctx.shape = scaling, x.shape
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad: Tensor = grads[0]
        x, low, a, b = ctx.saved_tensors
        grad_flat = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad_flat @ b.to(grad.dtype)).mul_(ctx.scaling)  # [N, r]
        grad_a = (grad_low.T @ x).to(a.dtype)
        # Not grad.T @ low, the same product: with so few columns it takes 3 to 7 times as long on a CPU.
        grad_b = (low.T @ grad_flat).to(b.dtype).mul_(ctx.scaling).T
        grad_x = (grad_low @ a.to(grad.dtype)).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return grad_x, grad, grad_a, grad_b, None


class _InPlace:
    """A LoRA variant as PEFT calls it."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **unused: Any) -> Tensor:
        del unused
        if result._is_view():
            # As that of a layer with a bias: autograd would take the gradient of a changed view for that of its base.
            result = result.clone()
        a, b = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        output: Tensor = _AddLora.apply(x, result, a, b, module.scaling[active_adapter])
        return output


def fuse(model: torch.nn.Module, adapter_name: str = "default") -> int:
    """Lets every plain LoRA linear layer of a PEFT model add its product in place; returns how many do.

    Layers with dropout, a bias, or another variant stay as they are.
    """
    from peft.tuners.lora import Linear

    count = 0
    for module in model.modules():
        if (
            isinstance(module, Linear)
            and isinstance(module.base_layer, torch.nn.Linear)
            and adapter_name not in module.lora_variant
            and isinstance(module.lora_dropout[adapter_name], torch.nn.Identity)
            and module.lora_B[adapter_name].bias is None
        ):
            module.lora_variant[adapter_name] = _InPlace
            module.cast_input_dtype_enabled = False
            count += 1
    return count
