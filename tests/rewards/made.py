"""What the tests of judges share: groups, and verdicts that a stub of a judge gives."""

from __future__ import annotations

import json
import re
from typing import Any

import art_ray
from art_ray.trajectories import TrajectoryGroup

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour of the sky."}]


def attempt(answer: str, **values: Any) -> art_ray.Trajectory:
    return art_ray.Trajectory([*QUESTION, {"role": "assistant", "content": answer}], **values)


def group_of(*answers: str, **values: Any) -> TrajectoryGroup:
    return TrajectoryGroup([attempt(answer) for answer in answers], **values)


def attempts_in(body: dict[str, Any]) -> dict[str, str]:
    """What a request shows the judge of each attempt, by id."""
    shown = body["messages"][1]["content"]
    return dict(re.findall(r'^<attempt id="(\d+)">\n(.*?)\n</attempt>$', shown, flags=re.DOTALL | re.MULTILINE))


def verdict(scores: dict[str, Any]) -> str:
    return json.dumps({id: {"explanation": f"because of {id}", "score": score} for id, score in scores.items()})


def rising(body: dict[str, Any]) -> str:
    """A judge that likes each attempt better than the one before it."""
    ids = list(attempts_in(body))
    return verdict({id: position / max(1, len(ids) - 1) for position, id in enumerate(ids)})
