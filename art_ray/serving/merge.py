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

    def write_merged(self, adapter: AdapterVersion, directory: Path, dtype: str) -> None:
        """Writes a checkpoint of base weights plus `adapter` to `directory`, its tensors as `dtype`.

        Raises:
            ServingError: the adapter does not fit the base model; names the tensor.
        """
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file

        self.check(adapter)
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
                        tensor = _sum(tensor, deltas.pop(name))
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
