"""Adds an adapter into the base model's weights and writes the sum as a checkpoint that the engine can load in place.

W' = W + scale * B A, computed in float32 and rounded once, to the type of the engine's weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art_ray.errors import ConfigError, ServingError
from art_ray.serving.adapter import AdapterVersion, lora_pairs, lora_scale

__all__ = ["BaseWeights"]

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

    def write_merged(self, adapter: AdapterVersion, directory: Path, dtype: str) -> None:
        """Writes a checkpoint of base weights plus `adapter` to `directory`, its tensors as `dtype`.

        Raises:
            ServingError: the adapter does not fit the base model; names the tensor.
        """
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        deltas = self._deltas(adapter)
        directory.mkdir(parents=True, mode=0o700)
        for entry in self._folder.iterdir():
            if entry.suffix not in (".safetensors", ".bin", ".gguf") and entry.name != _INDEX:
                (directory / entry.name).symlink_to(entry.resolve())
        target = getattr(torch, dtype)
        for file in sorted(set(self._file_of.values())):
            tensors: dict[str, Any] = {}
            with safe_open(self._folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    tensor = opened.get_tensor(name)
                    if name in deltas:
                        tensor = _sum(adapter, name, tensor, deltas.pop(name))
                    tensors[name] = tensor.to(target).contiguous() if tensor.is_floating_point() else tensor
            save_file(tensors, directory / file, metadata={"format": "pt"})
        if (self._folder / _INDEX).exists():
            (directory / _INDEX).symlink_to((self._folder / _INDEX).resolve())

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
            name = f"{module.removeprefix('base_model.model.')}.weight"
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


def _sum(adapter: AdapterVersion, name: str, weight: Any, delta: Any) -> Any:
    scale, a, b, transposed = delta
    product = b.float() @ a.float()
    product = product.T if transposed else product
    if product.shape != weight.shape:
        raise ServingError(
            f"version {adapter.step} has an adapter of shape {tuple(product.shape)} for {name!r}, "
            f"which the base model has as {tuple(weight.shape)}: it was made for another base model"
        )
    return weight.float() + scale * product
