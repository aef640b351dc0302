"""What a judge answered: read, checked, and where it cannot be used, what is wrong with it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["UnusableVerdict", "Verdict", "read_verdict"]

MAX_PROBLEMS = 10
"""Of more, the judge is told the number alone."""
MAX_STARTS = 1000
"""How many "{" that begin no JSON are passed over: an answer of nothing else must not keep the event loop."""


@dataclass(frozen=True)
class Verdict:
    """A judge's word on one attempt."""

    score: float
    """From 0 to 1."""
    explanation: str


class UnusableVerdict(Exception):  # noqa: N818
    """An answer that gives no scores; says what is wrong with it, in words that the judge can act on."""


def read_verdict(text: str, ids: Sequence[str]) -> dict[str, Verdict]:
    """Returns the verdict on each of `ids` from a judge's answer: the last JSON object in it that names one of them.

    Raises:
        UnusableVerdict: there is none, an id is missing, unknown or given twice, or a score is no number from 0 to 1.

    Example:
        >>> read_verdict('{"1": {"explanation": "It is polite.", "score": 0.75}}', ["1"])
        {'1': Verdict(score=0.75, explanation='It is polite.')}
    """
    naming = [value for value in _objects(text) if any(id in value for id in ids)]
    if not naming:
        raise UnusableVerdict("it holds no complete JSON object whose keys are the ids of the attempts")
    given = naming[-1]
    problems = [f"id {id!r} is not one of the attempts" for id in given if id not in ids]
    problems += [f"id {id!r} is missing" for id in ids if id not in given]
    problems += [f"id {id!r}: {problem}" for id in ids if id in given and (problem := _problem(given[id]))]
    if problems:
        further = [f"and {len(problems) - MAX_PROBLEMS} more of the kind"] if len(problems) > MAX_PROBLEMS else []
        raise UnusableVerdict("; ".join(problems[:MAX_PROBLEMS] + further))
    return {id: Verdict(float(given[id]["score"]), str(given[id].get("explanation") or "")) for id in ids}


def _problem(entry: Any) -> str | None:
    """Returns what is wrong with an attempt's entry, or None."""
    if not isinstance(entry, dict) or "score" not in entry:
        return f"an object with a score is expected, not {_shown(entry)}"
    score = entry["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        return f"the score {_shown(score)} is no number"
    if not (math.isfinite(score) and 0 <= score <= 1):
        return f"the score {_shown(score)} is not from 0 to 1"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in a text, outermost ones where these are whole, whatever stands around them."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repetition, parse_constant=_no_number)
    start, num_passed_over = text.find("{"), 0
    while start >= 0 and num_passed_over < MAX_STARTS:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end, num_passed_over = start + 1, num_passed_over + 1
        else:
            yield value
        start = text.find("{", end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UnusableVerdict(f"{', '.join(map(repr, repeated))} is given more than once")
    return dict(pairs)


def _no_number(name: str) -> NoReturn:
    raise UnusableVerdict(f"{name} is no number of JSON")
