"""The checkpoint directory: one committed step, found whole or not at all. Needs no torch.

`{checkpoints_dir}/{step:04d}/` holds::

    adapter_model.safetensors, adapter_config.json    the adapter, as PEFT writes and reads it
    optimizer.safetensors                             AdamW's moments and step counts
    random_state.json                                 the seed that all randomness follows from, with the counters
    manifest.json                                     written last: format, step, base model, metrics, every file's hash

Beside the steps lies the lock of the trainer that writes them (`lock.py`).

A directory is written under a temporary name, flushed to disk, and renamed into place: who sees the name sees all of
it. Nobody trusts a directory without a valid manifest, and nothing is unpickled. A directory of a newer format, by a
newer version of this package, is refused with a `CheckpointError` wherever it is met: never passed over, never deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pydantic

from art_ray.errors import ArtRayError, CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "FileEntry",
    "Manifest",
    "commit",
    "complete_steps",
    "copy_as_step",
    "delete_all_but",
    "newest_step",
    "other_steps",
    "read_manifest",
    "step_dir",
    "sweep",
    "verify",
]

FORMAT_VERSION = 1
"""Of the directory's layout; a newer one is refused."""
_MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"\d{4,}")
_TEMPORARY = ".writing-"


class FileEntry(pydantic.BaseModel):
    """One file of a checkpoint, as the manifest remembers it."""

    model_config = pydantic.ConfigDict(frozen=True)

    size_bytes: int
    sha256: str


class Manifest(pydantic.BaseModel):
    """What a checkpoint says about itself."""

    # Non-finite metrics as the strings "NaN" and "Infinity", which validation reads back; JSON has no such numbers.
    model_config = pydantic.ConfigDict(frozen=True, ser_json_inf_nan="strings")

    format_version: int
    step: int
    base_model: str
    files: dict[str, FileEntry]
    """Every file of the directory but the manifest, by its path inside it."""
    metrics: dict[str, float]
    """What the train call that made this step returned; empty at step 0."""
    config: dict[str, Any]
    """The train call's options and the trainer's settings, for people to read."""
    request_id: str | None = None
    """Of the train call that made this step, if it had one: the same call, repeated, is told from another."""


def step_dir(checkpoints_dir: Path, step: int) -> Path:
    """Returns where the checkpoint of `step` lies, or would."""
    return Path(checkpoints_dir) / f"{step:04d}"


def newest_step(checkpoints_dir: Path) -> int | None:
    """Returns the highest step with a complete checkpoint, or None.

    Complete means: a valid manifest, and every file that it lists present with its size. `verify` reads the hashes too.

    Raises:
        CheckpointError: a step above it is of a newer format.
    """
    return next((step for step in reversed(_named_steps(checkpoints_dir)) if _is_complete(checkpoints_dir, step)), None)


def complete_steps(checkpoints_dir: Path) -> list[int]:
    """Returns all steps with a complete checkpoint, ascending. See `newest_step`.

    Raises:
        CheckpointError: one of them is of a newer format.
    """
    return [step for step in _named_steps(checkpoints_dir) if _is_complete(checkpoints_dir, step)]


def other_steps(checkpoints_dir: Path, steps_to_keep: Collection[int]) -> list[int]:
    """Returns the steps that `delete_all_but` would delete, ascending: complete or not, and not in `steps_to_keep`.

    Raises:
        CheckpointError: one of them is of a newer format.
    """
    steps = [step for step in _named_steps(checkpoints_dir) if step not in steps_to_keep]
    for step in steps:
        _is_complete(checkpoints_dir, step)  # refuses a newer format
    return steps


def _named_steps(checkpoints_dir: Path) -> list[int]:
    """Returns the steps that have a directory of their name, ascending, whatever is in it."""
    try:
        names = os.listdir(checkpoints_dir)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = sorted(int(name) for name in names if _STEP_NAME.fullmatch(name))
    return [step for step in steps if step_dir(checkpoints_dir, step).is_dir()]


def _is_complete(checkpoints_dir: Path, step: int) -> bool:
    directory = step_dir(checkpoints_dir, step)
    try:
        values = _read_values(directory, step)
    except CheckpointError:
        return False
    _refuse_newer(directory, values)  # it may well be complete: nothing here can tell
    try:
        files = _validated(directory, step, values).files
        return all((directory / name).stat().st_size == entry.size_bytes for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def read_manifest(checkpoints_dir: Path, step: int) -> Manifest:
    """Returns the manifest of `step`.

    Raises:
        CheckpointError: there is none, it is torn, of another step, or of a newer format.
    """
    directory = step_dir(checkpoints_dir, step)
    values = _read_values(directory, step)
    _refuse_newer(directory, values)
    return _validated(directory, step, values)


def _read_values(directory: Path, step: int) -> Any:
    path = directory / _MANIFEST
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"no checkpoint of step {step}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"the manifest of step {step} is torn: {path}: {error}") from None


def _refuse_newer(directory: Path, values: Any) -> None:
    found = values.get("format_version") if isinstance(values, dict) else None
    if isinstance(found, int) and found > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory / _MANIFEST} has format {found}; this version reads formats up to {FORMAT_VERSION}: upgrade"
        )


def _validated(directory: Path, step: int, values: Any) -> Manifest:
    path = directory / _MANIFEST
    try:
        manifest = Manifest.model_validate(values)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"the manifest of step {step} is invalid: {path}: {error}") from None
    if manifest.step != step:
        raise CheckpointError(f"{path} is the manifest of step {manifest.step}: was the directory renamed?")
    return manifest


def verify(checkpoints_dir: Path, step: int) -> Manifest:
    """Returns the manifest of `step` after reading every file against its hash.

    Raises:
        CheckpointError: a file is absent, or its size or hash is another; the message names it.
    """
    manifest = read_manifest(checkpoints_dir, step)
    for name, entry in manifest.files.items():
        path = step_dir(checkpoints_dir, step) / name
        try:
            found = _entry(path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {step}: {path}: {error.strerror}. Move {path.parent} away to go on from the step before it"
            ) from None
        if found != entry:
            raise CheckpointError(
                f"checkpoint {step}: {path} was altered: its manifest says {entry.size_bytes} bytes with sha256 "
                f"{entry.sha256}, found {found.size_bytes} bytes with {found.sha256}. Move {path.parent} away to go on "
                "from the step before it"
            )
    return manifest


def commit(
    checkpoints_dir: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    base_model: str,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    request_id: str | None = None,
) -> Manifest:
    """Makes the checkpoint of `step` from the files that `write` puts into the directory that it is given.

    A complete checkpoint of that step stays as it is, and its manifest is returned, whose `request_id` may be another.
    An incomplete directory of that name (from another program: this function leaves none) is replaced.

    Raises:
        CheckpointError: the disk is full, read-only, …, or `write` failed; nothing is left under the step's name. Or
            what lies there is of a newer format; it is left alone.
    """
    target = step_dir(checkpoints_dir, step)
    if _is_complete(checkpoints_dir, step):
        return read_manifest(checkpoints_dir, step)
    temporary: Path | None = None
    try:
        Path(checkpoints_dir).mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{step:04d}-", dir=checkpoints_dir))
        os.chmod(temporary, 0o755)
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            step=step,
            base_model=base_model,
            files={path.relative_to(temporary).as_posix(): _entry(path) for path in files},
            metrics=dict(metrics),
            config=dict(config),
            request_id=request_id,
        )
        (temporary / _MANIFEST).write_text(manifest.model_dump_json(indent=1))
        for path in [*files, temporary / _MANIFEST, temporary]:
            _flush(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        _flush(Path(checkpoints_dir))
    except ArtRayError:
        raise
    except Exception as error:  # not every library reports a full disk as an OSError: safetensors has its own
        raise CheckpointError(
            f"checkpoint {step} could not be written to {target}: {type(error).__name__}: {error}"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def copy_as_step(
    checkpoints_dir: Path,
    step: int,
    new_step: int,
    *,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    request_id: str | None = None,
) -> Manifest:
    """Commits the files of `step` again as `new_step`, with metrics of its own: a step that learned nothing.

    Raises:
        CheckpointError: `step` has no complete checkpoint, or the copy cannot be written.
    """
    manifest = read_manifest(checkpoints_dir, step)
    source = step_dir(checkpoints_dir, step)

    def write(directory: Path) -> None:
        for name in manifest.files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, directory / name)

    return commit(
        checkpoints_dir,
        new_step,
        write,
        base_model=manifest.base_model,
        metrics=metrics,
        config=config,
        request_id=request_id,
    )


def delete_all_but(checkpoints_dir: Path, steps_to_keep: Collection[int]) -> list[int]:
    """Deletes every checkpoint whose step is not in `steps_to_keep`, complete or not; returns the deleted steps.

    A directory loses its name before its files, so that
    an interrupted deletion leaves no torn checkpoint.

    Raises:
        CheckpointError: one of them is of a newer format; nothing is deleted.
    """
    directory = Path(checkpoints_dir)
    doomed = other_steps(directory, steps_to_keep)
    for path in directory.glob(f"{_TEMPORARY}deleted-*"):
        shutil.rmtree(path, ignore_errors=True)
    for step in doomed:
        path = step_dir(directory, step)
        nameless = directory / f"{_TEMPORARY}deleted-{path.name}-{os.getpid()}"
        os.rename(path, nameless)
        shutil.rmtree(nameless, ignore_errors=True)
    return doomed


def sweep(checkpoints_dir: Path) -> None:
    """Deletes what writers that were killed left under temporary names. For the trainer that holds the lock."""
    for path in Path(checkpoints_dir).glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(size_bytes=path.stat().st_size, sha256=digest)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
