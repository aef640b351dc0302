"""Where the files of a model lie, and which names may become parts of those paths."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from art_ray.errors import InvalidNameError

__all__ = ["model_dir", "parquet_name", "step_files", "validate_part"]

MAX_PART_BYTES = 200
"""Below the 255 bytes of common file systems, with room for the suffixes that temporary files carry."""


def validate_part(kind: str, value: object) -> str:
    """Returns `value` if it can be one part of a path.

    Args:
        kind: what the value is, for the message: "project", "name" or "split".
        value: the text to look at.

    Raises:
        InvalidNameError: not a text, empty, a separator in it, a leading dot (`..` among them), a control or
            unencodable character, or longer than a file name may be.
    """
    if not isinstance(value, str):
        raise InvalidNameError(f"{kind} must be a text, got {type(value).__name__}: {value!r:.80}")
    problem = _problem(value)
    if problem:
        raise InvalidNameError(
            f"{kind} {value[:80]!r} {problem}. It becomes a folder of that name: use letters, digits, '-' and '_'."
        )
    return value


def _problem(value: str) -> str | None:
    if not value.strip():
        return "is empty"
    if "/" in value or "\\" in value or os.sep in value:
        return "contains a path separator"
    if value.startswith("."):
        return "starts with a dot"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in value):
        return "contains a control character or one that no file name can hold"
    if len(value.encode()) > MAX_PART_BYTES:
        return f"is longer than {MAX_PART_BYTES} bytes"
    return None


def model_dir(base_path: str | os.PathLike[str], project: str, name: str) -> Path:
    """Returns the folder of a model, `{base_path}/{project}/models/{name}`, without creating it.

    Raises:
        InvalidNameError: a project or name that cannot be part of a path.
    """
    return Path(base_path).expanduser() / validate_part("project", project) / "models" / validate_part("name", name)


def parquet_name(step: int, copy: int = 0) -> str:
    """Returns the name of the trajectories of `step`: first `0007.parquet`, then `0007.001.parquet` and so on."""
    return f"{step:04d}.{copy:03d}.parquet" if copy else f"{step:04d}.parquet"


def step_files(folder: Path, step: int) -> list[Path]:
    """Returns the parquet files of one step that are in `folder`, in the order in which they were logged."""
    pattern = re.compile(rf"{step:04d}(?:\.(\d{{3,}}))?\.parquet")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(match[1] or 0), folder / match[0]) for match in map(pattern.fullmatch, names) if match]
    return [path for _, path in sorted(found)]
