"""What may be told of a model: its fields as JSON, without secrets. It goes to `model.json` and to reporters."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from art_ray.ledger.codec import MAX_DEPTH, encoded, readable, shown

__all__ = ["about"]

logger = logging.getLogger(__name__)

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A part of a name: `openAIKey`, `openai-key` and `OPENAI_KEY` each end with the part "key"."""
_SECRET_WORD = re.compile("secret|passw(or)?d|passphrase|passcode|credential|authoriz|bearer")
"""Wherever one of these stands in a name, the value is a secret."""
_SECRET_PARTS = frozenset(["key", "keys", "token", "pwd", "auth", "oauth", "creds", "jwt", "cookie", "cookies"])
_JOINED = re.compile("(access|api|auth|client|hf|openai|private|refresh|session|wandb)(key|token)s?")
"""With one of these as a part it is, too, unless it is a number: `eos_token_id=2` is none."""
_HOLDERS = frozenset(["access", "api", "auth", "refresh", "session"])
"""Beside one of these, even "tokens" are secrets; alone they are counted, as in `max_tokens`."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)(\S*)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9a-f:.%]+\]|[^@:/?#\[]*)(:\d*)?(?=[/?#]|$)", re.IGNORECASE)
_NOTHING = object()


def about(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` as JSON types, without secrets.

    A secret is what a name says is one (`aws_secret_access_key`, `accessToken`, `Authorization`, `hf-token`), and in
    any URL the user's part and all behind the path. Entries that have no form in JSON are left out, and one line says
    which.
    """
    left_out: list[str] = []
    found = {}
    for name, value in fields.items():
        if not _is_secret(name, value):  # first, so that no message shows a secret
            kept = _as_json(value, name, left_out, ())
            if kept is not _NOTHING:
                found[name] = _open(kept)
    if left_out:
        more = f" (and {len(left_out) - 3} more)" if len(left_out) > 3 else ""
        logger.warning("model.json leaves out what it cannot hold: %s%s", "; ".join(left_out[:3]), more)
    return found


def _as_json(value: Any, where: str, left_out: list[str], around: tuple[int, ...]) -> Any:
    """Returns `value` as JSON types; adds what has no such form to `left_out`. `around`: what it lies in, by id."""
    try:
        return readable(encoded(value, where))
    except TypeError as error:
        if not isinstance(value, (dict, list, tuple)) or id(value) in around or len(around) > MAX_DEPTH:
            left_out.append(str(error))
            return _NOTHING
    around = (*around, id(value))
    if not isinstance(value, dict):
        items = [_as_json(item, f"{where}[{i}]", left_out, around) for i, item in enumerate(value)]
        return [item for item in items if item is not _NOTHING]
    kept = {}
    for key, item in value.items():
        if not isinstance(key, (str, int, float)):
            left_out.append(f"{where}: an entry whose key is a {shown(key)}")
        elif not _is_secret(str(key), item):
            kept[str(key)] = _as_json(item, f"{where}[{key!r:.40}]", left_out, around)
    return {key: item for key, item in kept.items() if item is not _NOTHING}


def _open(value: Any) -> Any:
    """Returns JSON types without what is secret in them."""
    if isinstance(value, dict):
        return {key: _open(item) for key, item in value.items() if not _is_secret(key, item)}
    if isinstance(value, list):
        return [_open(item) for item in value]
    return _URL.sub(lambda url: url[1] + _open_url(url[2]), value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    parts = [part.lower() for part in _PART.findall(name)]
    if _SECRET_WORD.search("".join(parts)):
        return True
    if value is None or isinstance(value, (bool, int, float)):
        return False
    return (
        not _SECRET_PARTS.isdisjoint(parts)
        or parts[-1:] == ["pass"]
        or any(map(_JOINED.fullmatch, parts))
        or ("tokens" in parts and not _HOLDERS.isdisjoint(parts))
    )


def _open_url(rest: str) -> str:
    """Returns what follows `https://` without user, password, query and fragment."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        rest = authority.rpartition("@")[2] + rest[len(authority) :]
    elif not _HOST.match(rest):
        rest = rest.rpartition("@")[2]  # a password that contains "/", "?" or "#" as it is
    return re.split("[?#]", rest, maxsplit=1)[0]
