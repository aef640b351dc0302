"""One policy version as it travels: from the trainer, through the object store, to every replica."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_ray.errors import ServingError

__all__ = ["ADAPTER_FILES", "AdapterVersion", "LoadedVersion", "digest", "lora_pairs", "lora_scale"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What PEFT writes for an adapter; both are needed."""


# trainer ──AdapterVersion──> replica
@dataclass(frozen=True)
class AdapterVersion:
    """A LoRA adapter as PEFT saved it, the step that made it, and a hash that whoever loads it checks."""

    step: int
    """The training step that made it; 0 is the untrained policy."""
    files: dict[str, bytes] = field(repr=False)
    """Contents by file name, `ADAPTER_FILES` exactly."""
    sha256: str
    """Hex digest over names and contents, as `digest` computes it."""

    @classmethod
    def from_directory(cls, step: int, path: str | Path) -> AdapterVersion:
        """Reads the adapter that PEFT saved under `path`.

        Raises:
            ServingError: a file is missing; names it.
        """
        files = {}
        for name in ADAPTER_FILES:
            try:
                files[name] = (Path(path) / name).read_bytes()
            except OSError as error:
                raise ServingError(f"version {step} cannot be read from {path}: {error}") from error
        return cls(step=step, files=files, sha256=digest(files))

    def check(self) -> None:
        """Raises `ServingError` unless the files are the ones that `sha256` was computed over."""
        if sorted(self.files) != sorted(ADAPTER_FILES):
            raise ServingError(f"version {self.step} must consist of {ADAPTER_FILES}, got {sorted(self.files)}")
        found = digest(self.files)
        if found != self.sha256:
            raise ServingError(
                f"version {self.step} was altered on its way: its hash is {found}, expected {self.sha256}"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The adapter's configuration, as PEFT wrote it."""
        config: dict[str, Any] = json.loads(self.files["adapter_config.json"])
        return config

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(len(content) for content in self.files.values())


# replica ──LoadedVersion──> whoever published
@dataclass(frozen=True)
class LoadedVersion:
    """A replica's answer to a published version: it is loaded, its hash was checked, and it is the current one."""

    step: int
    sha256: str
    """Hash of what was loaded, computed by the replica from the files it wrote."""
    seconds: float
    """From the call to the answer."""
    canary_change: float
    """Largest change of the canary prompt's log-probabilities from the version before; 0.0 where nothing changed."""


def lora_scale(config: dict[str, Any]) -> float:
    """Returns the factor before B A: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
    rank: int = config["r"]
    return float(config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank))


def lora_pairs(adapter: AdapterVersion) -> dict[str, tuple[Any, Any]]:
    """Returns (A [r, in], B [out, r]) as torch tensors, by the name of the adapted module.

    Raises:
        ServingError: the file is no adapter.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(adapter.files["adapter_model.safetensors"])
    except SafetensorError as error:
        raise ServingError(f"version {adapter.step}: adapter_model.safetensors cannot be read: {error}") from error
    pairs = {}
    for name in tensors:
        if ".lora_A." in name:
            partner = name.replace(".lora_A.", ".lora_B.")
            if partner not in tensors:
                raise ServingError(f"version {adapter.step}: {name} has no lora_B beside it")
            pairs[name.split(".lora_A.")[0]] = (tensors[name], tensors[partner])
    if not pairs:
        raise ServingError(f"version {adapter.step} adapts no module: its file holds {sorted(tensors)[:5]}")
    return pairs


def digest(files: dict[str, bytes]) -> str:
    """Returns the SHA-256 over names, lengths and contents, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(files):
        sha.update(f"{name}\0{len(files[name])}\0".encode())
        sha.update(files[name])
    return sha.hexdigest()
