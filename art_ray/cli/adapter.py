"""An adapter as a plain folder: the files of a checkpoint that PEFT reads, compared with the manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from art_ray.errors import CheckpointError, ConfigError
from art_ray.ledger.files import sync_dir, sync_file
from art_ray.training.checkpoint import Manifest, read_manifest, step_dir

__all__ = ["export"]

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def export(checkpoints_dir: Path, step: int, out: Path) -> Manifest:
    """Copies the adapter of a complete checkpoint into the new folder `out`; returns the checkpoint's manifest.

    The folder is filled under another name and renamed, which fails where anything was put in its place by then.

    Raises:
        ConfigError: `out` is there already, or the folder above it is not.
        CheckpointError: a file is not in the checkpoint, or is not what the manifest says; `out` is not made.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already, and nothing is overwritten: name a folder that is not")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out} cannot be made: there is no folder {out.parent}")
    manifest = read_manifest(checkpoints_dir, step)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        os.chmod(beside, 0o755)
        for name in _FILES:
            _copy(step_dir(checkpoints_dir, step) / name, beside / name, manifest)
        sync_dir(beside)
        os.rename(beside, out)
        sync_dir(out.absolute().parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def _copy(source: Path, target: Path, manifest: Manifest) -> None:
    """Copies one file, and reads the copy against the manifest."""
    if source.name not in manifest.files:
        raise CheckpointError(f"checkpoint {manifest.step} has no {source.name}; it has {', '.join(manifest.files)}")
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.files[source.name].sha256:
        raise CheckpointError(
            f"{source} is not what its manifest says: sha256 {digest}, expected {manifest.files[source.name].sha256}. "
            "Nothing was exported: choose another step"
        )
    sync_file(target)
