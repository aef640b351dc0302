"""Adds an adapter into the base model's weights while the engine loads them in place.

W' = W + scale * B A, computed in float32 and rounded once, to the type of the engine's weights. No second copy of the
weights is ever written: each tensor is read, added to, and handed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_ray.errors import ConfigError, ServingError
from art_ray.serving.adapter import AdapterVersion, lora_pairs, lora_scale

__all__ = ["BaseWeights", "MergingWorker"]

_INDEX = "model.safetensors.index.json"
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication")


class BaseWeights:
    """The untrained weights on disk, to which each version's adapter is added.

    Args:
        folder: a checkpoint folder with safetensors files.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = self._tensor_names()

    def check(self, adapter: AdapterVersion) -> None:
        """Raises `ServingError` where the adapter's shapes are not those of the base model's weights.

        An engine that is given an adapter for a smaller model fills up with zeros and says nothing. Modules that the
        checkpoint knows by another name than the adapter are not compared.
        """
        from safetensors import safe_open

        transposed = bool(adapter.config.get("fan_in_fan_out"))
        wanted = {
            _weight_name(module): (b.shape[0], a.shape[1])[:: -1 if transposed else 1]
            for module, (a, b) in lora_pairs(adapter).items()
        }
        for file in sorted({self._file_of[name] for name in wanted if name in self._file_of}):
            with safe_open(self._folder / file, framework="pt") as opened:
                for name, shape in wanted.items():
                    if self._file_of.get(name) == file:
                        _check_shape(adapter, name, tuple(opened.get_slice(name).get_shape()), shape)

    def merged(self, adapter: AdapterVersion) -> Iterator[tuple[str, Any]]:
        """Yields name and tensor of each weight that a version may change: all layers, as their parts are loaded
        together, but embeddings, output and last norm only where they are adapted.

        Raises:
            ServingError: the adapter does not fit the base model; names the tensor.
        """
        from safetensors import safe_open

        self.check(adapter)
        deltas = self._deltas(adapter)
        wanted = [name for name in self._file_of if name in deltas or any(part.isdigit() for part in name.split("."))]
        for file in sorted({self._file_of[name] for name in wanted}):
            with safe_open(self._folder / file, framework="pt") as opened:
                for name in wanted:
                    if self._file_of[name] == file:
                        tensor = opened.get_tensor(name)
                        yield name, _sum(tensor, deltas[name]) if name in deltas else tensor

    def check_mergeable(self, adapter: AdapterVersion) -> None:
        """Raises `ServingError` where `adapter` cannot be added to the base model; names what is in the way."""
        self.check(adapter)
        self._deltas(adapter)

    def _deltas(self, adapter: AdapterVersion) -> dict[str, Any]:
        """Returns (scale, A, B) by the name of the base weight."""
        config = adapter.config
        for option in _REFUSED:
            if config.get(option):
                raise ServingError(
                    f"version {adapter.step}: an adapter with {option}={config[option]!r} cannot be merged; "
                    "serve it with ServingConfig(weights='adapter')"
                )
        scale, transposed = lora_scale(config), bool(config.get("fan_in_fan_out"))
        deltas = {}
        for module, (a, b) in lora_pairs(adapter).items():
            name = _weight_name(module)
            if name not in self._file_of:
                raise ServingError(
                    f"version {adapter.step} adapts {module}, but the base model in {self._folder} has no weight "
                    f"{name!r}; serve it with ServingConfig(weights='adapter')"
                )
            deltas[name] = (scale, a, b, transposed)
        return deltas

    def _tensor_names(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        from safetensors import safe_open

        if (self._folder / _INDEX).is_file():
            names: dict[str, str] = json.loads((self._folder / _INDEX).read_text())["weight_map"]
            return names
        found = {}
        for path in self._folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), path.name))
        if not found:
            raise ConfigError(
                f"weights='merged' needs a base model in safetensors files, and {self._folder} has none; "
                "use ServingConfig(weights='adapter')"
            )
        return found


class MergingWorker:
    """What each of the engine's workers can do beside vLLM's own: vLLM mixes this class into them."""

    model_runner: Any

    def load_merged(self, base_folder: str, step: int, adapter_folder: str, sha256: str) -> None:
        """Puts the base weights plus an adapter that lies in a folder in place of the weights."""
        adapter = AdapterVersion.from_directory(step, adapter_folder)
        if adapter.sha256 != sha256:
            raise ServingError(f"version {step} was altered while it was written to shared memory")
        self.model_runner.reload_weights(weights_iterator=BaseWeights(Path(base_folder)).merged(adapter))


def _sum(weight: Any, delta: Any) -> Any:
    scale, a, b, transposed = delta
    product = b.float() @ a.float()
    return weight.float() + scale * (product.T if transposed else product)


def _weight_name(module: str) -> str:
    return f"{module.removeprefix('base_model.model.')}.weight"


def _check_shape(adapter: AdapterVersion, name: str, base: tuple[int, ...], adapted: tuple[int, ...]) -> None:
    if base != adapted:
        raise ServingError(
            f"version {adapter.step} has an adapter of shape {adapted} for {name!r}, "
            f"which the base model has as {base}: it was made for another base model"
        )
