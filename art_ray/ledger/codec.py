"""Values as JSON, without loss: what JSON has no word for is tagged, and what cannot come back equal is refused."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import PurePath, PurePosixPath
from typing import Any
from uuid import UUID

import pydantic_core

from art_ray.trajectories import as_number

__all__ = [
    "decoded",
    "encoded",
    "finite_json_text",
    "flat_json_text",
    "is_encodable_text",
    "json_text",
    "readable",
    "shown",
]

TAG = "$t"
MAX_DEPTH = 100
"""Nesting beyond this is refused: readers of JSON give up at a few hundred levels, and a cycle never ends."""
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""Two surrogates, which JSON's escapes would join to one character. (One alone survives them.)"""
_SIMPLE = {str, int, float, bool}
_SURELY_READABLE = 3000
_ENCODER = json.JSONEncoder(allow_nan=False)
MAX_INT_BITS = 10_000
"""Longer integers are tagged: Python refuses to read them as decimal digits."""

# Types that JSON has no word for and that have one canonical text. The name on the left is in the files: keep it.
_BY_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "uuid": (UUID, str, UUID),
    "path": (PurePath, lambda value: value.as_posix(), PurePosixPath),
}
_BY_LIST: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
}


class _RefusedError(Exception):
    """A value that has no encoding; collects the way to it while it rises."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.way: list[object] = []


def encoded(value: Any, where: str) -> Any:
    """Returns `value` as plain JSON types; `decoded` gives back an equal value.

    numpy and torch scalars become the number they hold, arrays and tensors nested lists.

    Raises:
        TypeError: a value of a type that could not be read back, or nesting without end; `where` and the message say
            which it is.
    """
    try:
        return _encoded(value, 0)
    except _RefusedError as refused:
        way = "".join(f"[{step!r:.40}]" for step in reversed(refused.way[-5:]))
        raise TypeError(f"{where}{way} {refused.reason}") from None


def _encoded(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is bool or value is None:
        return value
    if kind is str:
        return value if value.isascii() or not _PAIR.search(value) else {TAG: "utf32", "v": _utf32(value)}
    if kind is int:
        return value if value.bit_length() <= MAX_INT_BITS else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if depth > MAX_DEPTH:
        raise _RefusedError(f"is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if kind is list:
        return [_encoded(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return _encoded_dict(value, depth)
    return _encoded_other(value, depth)


def _utf32(text: str) -> str:
    return base64.b64encode(text.encode("utf-32-le", "surrogatepass")).decode()


def _encoded_dict(value: dict[Any, Any], depth: int) -> Any:
    has_text_keys = TAG not in value and all(type(key) is str and not _PAIR.search(key) for key in value)
    pairs = []
    for key, item in value.items():
        try:
            pairs.append([key if has_text_keys else _encoded(key, depth + 1), _encoded(item, depth + 1)])
        except _RefusedError as refused:
            refused.way.append(key)
            raise
    return dict(pairs) if has_text_keys else {TAG: "dict", "v": pairs}


def _encoded_other(value: Any, depth: int) -> Any:
    for tag, (types, _) in _BY_LIST.items():
        if isinstance(value, types):
            return {TAG: tag, "v": [_encoded(item, depth + 1) for item in value]}
    for tag, (kind, to_text, _) in _BY_TEXT.items():
        if isinstance(value, kind):
            return {TAG: tag, "v": to_text(value)}
    # Subclasses of plain types (enumerations, numpy.float64) are equal to the plain value.
    if isinstance(value, str):
        return _encoded(str.__str__(value), depth + 1)
    for plain in (int, float, list):
        if isinstance(value, plain):
            return _encoded(plain(value), depth + 1)  # type: ignore[arg-type]
    try:
        number = as_number(value)
        if number is not value:
            return _encoded(number, depth + 1)
        if callable(getattr(value, "tolist", None)):
            return _encoded(value.tolist(), depth + 1)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor without data, for one
        raise _RefusedError(f"is a {type(value).__qualname__} that gives no numbers: {error}") from None
    raise _RefusedError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which could not be read back: "
        "log text, numbers, lists and dicts of them (a pydantic model: its .model_dump())"
    )


def decoded(value: Any) -> Any:
    """Returns the value that `encoded` was given."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(TAG)
    if tag is None:
        return {key: decoded(item) for key, item in value.items()}
    content = value["v"]
    if tag == "dict":
        return {decoded(key): decoded(item) for key, item in content}
    if tag == "float":
        return float(content)
    if tag == "utf32":
        return base64.b64decode(content).decode("utf-32-le", "surrogatepass")
    if tag == "int":
        return int(content, 16)
    if tag in _BY_LIST:
        return _BY_LIST[tag][1](decoded(item) for item in content)
    return _BY_TEXT[tag][2](content)


def readable(value: Any) -> Any:
    """Returns an encoded value as any JSON reader would like to see it; differs from `value` where a tag is in it."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(TAG)
    if tag is None:
        return {key: readable(item) for key, item in value.items()}
    if tag == "dict":
        return {str(readable(key)): readable(item) for key, item in value["v"]}
    if tag == "float":
        return None
    if tag == "utf32":
        return base64.b64decode(value["v"]).decode("utf-32-le", "replace")
    return readable(value["v"])


def json_text(value: Any) -> str:
    """Returns JSON in ASCII, which holds any text, lone surrogates included."""
    return _ENCODER.encode(value)


def flat_json_text(value: dict[Any, Any]) -> str | None:
    """Returns a dict of texts and simple values as JSON; None where that takes a closer look (`encoded`).

    Ten times faster than `json_text(encoded(…))`, for what is on every row.
    """
    if set(map(type, value)) != {str} or not (kinds := set(map(type, value.values()))) <= _SIMPLE:
        return None
    if float in kinds and not all(math.isfinite(item) for item in value.values() if type(item) is float):
        return None
    return _fast_json_text(value)


def finite_json_text(value: dict[str, float]) -> str | None:
    """The same for a dict of numbers; None where one of them is not finite, too."""
    try:
        is_finite = math.isfinite(sum(value.values()))
    except OverflowError:  # integers near the largest double
        return None
    return _fast_json_text(value) if is_finite else None


def _fast_json_text(value: dict[str, Any]) -> str | None:
    try:
        text = pydantic_core.to_json(value).decode()
    except ValueError:  # a lone surrogate
        return None
    # Where the text is long, an integer in it may have more digits than Python reads again.
    return text if len(text) < _SURELY_READABLE or int not in set(map(type, value.values())) else None


def shown(value: object) -> str:
    """Returns type and beginning of a value, for a message; whatever its own `__repr__` does."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<its __repr__ raised {type(error).__name__}>"
    return f"{type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"


def is_encodable_text(text: str) -> bool:
    """Returns whether `text` can be stored as UTF-8; a lone surrogate cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
