"""Whether a loaded version really is what answers: a fixed prompt's log-probabilities must move when the weights did.

The adapter's files are checked by hash, and each version has a name of its own. What is left is an engine that takes
an adapter and does not apply it, or not all of it. So each version is compared with the base model and with the version
before. How far the answer must move follows from how far the weights moved, compared with the engine's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from art_ray.errors import ServingError
from art_ray.serving.adapter import AdapterVersion, lora_pairs, lora_scale

__all__ = ["Canary", "check_canary", "probe"]

_TYPICAL_WEIGHT = 0.02
"""Root mean square of a transformer's weights, for comparison with an adapter's effect; the magnitude is enough."""

_ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative spacing of the numbers of each type."""


@dataclass(frozen=True)
class Canary:
    """What one version answered."""

    logprobs: list[float]
    """Natural log-probabilities of a fixed prompt's tokens."""
    effects: dict[str, np.ndarray]
    """Per adapted module, `scale * B A x` for a fixed x of unit variance. [out]; empty for the base model."""

    def change_from(self, other: Canary) -> float:
        """Returns the largest difference of log-probabilities."""
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))

    def weights_moved_from(self, other: Canary) -> float:
        """Returns how far the weights moved, relative to typical ones; the largest over the modules."""
        moved = 0.0
        for name in self.effects.keys() | other.effects.keys():
            mine, its = self.effects.get(name), other.effects.get(name)
            difference = mine if its is None else -its if mine is None else mine - its
            assert difference is not None
            moved = max(moved, float(np.sqrt(np.mean(np.square(difference)))))
        return moved


def check_canary(step: int, canary: Canary, base: Canary, previous: Canary | None, dtype: str) -> None:
    """Raises `ServingError` where the answer did not move although the weights did by more than rounding hides.

    Args:
        step: the version that answered.
        canary: its answer.
        base: the answer of the base model.
        previous: the answer of the version that was current before, if there was one.
        dtype: type of the engine's arithmetic.
    """
    if not all(np.isfinite(canary.logprobs)):
        raise ServingError(f"version {step} answers with log-probabilities that are no finite numbers")
    for other, name in ((base, "the base model"), (previous, "the version before")):
        if other is None:
            continue
        if canary.weights_moved_from(other) > _ROUNDING[dtype] and canary.logprobs == other.logprobs:
            raise ServingError(
                f"version {step} was loaded, but a fixed prompt has exactly the log-probabilities of {name}, "
                "although the weights differ: the engine does not apply this adapter"
            )


def probe(adapter: AdapterVersion) -> dict[str, np.ndarray]:
    """Returns `Canary.effects` of an adapter."""
    scale, effects = lora_scale(adapter.config), {}
    for module, (a, b) in lora_pairs(adapter).items():
        a, b = a.float().numpy(), b.float().numpy()
        x = np.random.default_rng(0).standard_normal(a.shape[1], dtype=np.float32)
        # The output of a weight of typical size is about `typical * sqrt(in)` for such an x.
        effects[module] = scale * (b @ (a @ x)) / (_TYPICAL_WEIGHT * np.sqrt(a.shape[1]))
    return effects
