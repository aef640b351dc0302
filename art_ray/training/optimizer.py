"""AdamW over the adapter, with clipping, warm-up, and a state that is saved as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from art_ray.errors import CheckpointError, NonFiniteError
from art_ray.training.config import TrainerConfig
from art_ray.types import TrainConfig

__all__ = ["Optimizer", "Update"]

_MAX_NON_FINITE_IN_A_ROW = 3


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Euclidean, before clipping; non-finite where the update was skipped."""
    learning_rate: float
    """The one applied, after warm-up."""
    skipped: bool


class Optimizer:
    """AdamW. The same on every rank: the gradients that reach it are already summed."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], config: TrainerConfig) -> None:
        self._parameters = dict(parameters)
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.num_steps = 0
        """Optimizer steps since the run began, skipped ones included."""
        self.num_non_finite_in_a_row = 0

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Returns every parameter's gradient, in a definite order; zeros where this rank had none."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def step(self, loss: float, config: TrainConfig) -> Update:
        """Clips the gradients and takes one step, or skips it where loss or gradients are not finite.

        Raises:
            NonFiniteError: the third time in a row.
        """
        norm = torch.nn.utils.get_total_norm(self.gradients())
        learning_rate = config.learning_rate * min(1.0, (self.num_steps + 1) / max(1, config.warmup_steps))
        self.num_steps += 1
        if not (torch.isfinite(norm) and torch.isfinite(torch.tensor(loss))):
            self.num_non_finite_in_a_row += 1
            if self.num_non_finite_in_a_row >= _MAX_NON_FINITE_IN_A_ROW:
                raise NonFiniteError(
                    f"loss {loss} and gradient norm {float(norm)}: not finite {self.num_non_finite_in_a_row} times "
                    f"in a row, at learning rate {learning_rate}. Lower it, or go back to an older checkpoint"
                )
            return Update(float(norm), learning_rate, skipped=True)
        self.num_non_finite_in_a_row = 0
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), config.max_grad_norm, norm)
        for settings in self._adamw.param_groups:
            settings["lr"] = learning_rate
        self._adamw.step()
        return Update(float(norm), learning_rate, skipped=False)

    def state(self) -> dict[str, Tensor]:
        """Returns all of AdamW's tensors by name, on the CPU; empty before the first step."""
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor], num_steps: int, num_non_finite_in_a_row: int) -> None:
        """Takes over a state that `state` returned.

        Raises:
            CheckpointError: it belongs to other parameters.
        """
        self._adamw.state.clear()
        for name, value in state.items():
            parameter_name, key = name.rsplit(".", 1)
            parameter = self._parameters.get(parameter_name)
            if parameter is None or (key != "step" and value.shape != parameter.shape):
                raise CheckpointError(
                    f"the optimizer state holds {name} of shape {tuple(value.shape)}, which the "
                    "adapter does not have: were the LoRA settings changed?"
                )
            self._adamw.state[parameter][key] = value.clone().to(parameter.device)
        self.num_steps = num_steps
        self.num_non_finite_in_a_row = num_non_finite_in_a_row
