"""The trajectories of a step as one HTML page: complete in itself, without scripts, and nothing in it is trusted.

Every text is cleaned and escaped, and a content policy keeps the browser from loading anything, were one ever not.
Images are shown where the message holds their bytes; one that lies elsewhere is named by its address.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from art_ray.cli.conversation import Part, Tally, Turn, conversations_of, shown, turns_of
from art_ray.cli.files import replaced
from art_ray.cli.output import clean, number
from art_ray.trajectories import RolloutFailure, Sampling, Trajectory, TrajectoryGroup, has_spread

__all__ = ["write_page"]

MOST_TOKENS = 200_000
"""Coloured one by one on a page, about 20 MB; what comes after them is plain text."""
_BOUNDS = (0.9, 0.6, 0.3, 0.1, 0.01)
"""Probabilities above which a token has the colours 0 to 4; below the last, 5."""
_EMBEDDED_IMAGE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 70em; margin: 1.5em auto; padding: 0 1em; color: #222;
  display: flex; flex-direction: column; }}
header {{ order: -1; }} /* its numbers are known, and written, last */
h1 {{ font-size: 1.3em; margin: 0 0 .3em; }}
details {{ margin: .3em 0; }}
summary {{ cursor: pointer; }}
.group {{ border: 1px solid #ccc; border-radius: 6px; padding: .4em .8em; }}
.group > summary {{ font-weight: 600; }}
.trajectory {{ border-left: 3px solid #9ab; padding-left: .8em; }}
.failure summary {{ color: #a00; }}
.message {{ margin: .5em 0; }}
.role {{ font-size: .85em; color: #456; }}
.answer .role {{ color: #060; }}
pre {{ margin: .1em 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace;
  background: #f7f7f7; padding: .3em .5em; border-radius: 4px; }}
.aside {{ color: #666; }}
.facts {{ color: #555; font-size: .9em; overflow-wrap: anywhere; }}
img {{ max-width: 100%; }}
.c0 {{ background: #eef7ee; }} .c1 {{ background: #fff7cc; }} .c2 {{ background: #ffe3a8; }}
.c3 {{ background: #ffc59a; }} .c4 {{ background: #ff9f92; }} .c5 {{ background: #f2788f; }}
</style></head><body>
"""


def write_page(path: Path, title: str, groups: Iterator[tuple[int, TrajectoryGroup]], tally: Tally) -> None:
    """Writes groups, which are numbered, as the page `path`, whole or not at all, one group in memory at a time.

    Args:
        path: the file; one that is there is replaced.
        title: its heading.
        groups: consumed once.
        tally: what is in the groups, once they are consumed.

    Raises:
        ConfigError: there is no folder for the file.
    """
    with replaced(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.write(_HEAD.format(title=_escaped(title)))
        page = _Page(file)
        for index, group in groups:
            page.add_group(index, group)
        page.add_header(title, tally)
        file.write("</body></html>\n")


class _Page:
    """Writes the parts of a page as they come."""

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._tokens_left = MOST_TOKENS

    def add_header(self, title: str, tally: Tally) -> None:
        legend = " ".join(
            f'<span class="c{i}">{text}</span>'
            for i, text in enumerate(["≥ 0.9", *(f"≥ {bound}" for bound in _BOUNDS[1:]), f"&lt; {_BOUNDS[-1]}"])
        )
        self._write(
            f"<header><h1>{_escaped(title)}</h1><p>{tally}.</p>"
            f"<p>Sampled tokens by their probability: {legend}. A token's tooltip has its id, log-probability and "
            "policy version.</p></header>\n"
        )

    def add_group(self, index: int, group: TrajectoryGroup) -> None:
        rewards = [trajectory.reward for trajectory in group if trajectory.is_scored]
        shown_rewards = ", ".join(number(trajectory.reward) for trajectory in group) or "none"
        note = "" if has_spread(rewards) or len(rewards) < 2 else " (all equal: nothing to prefer)"
        self._write(f'<details class="group" open><summary>group {index}: rewards {shown_rewards}{note}</summary>\n')
        self._facts({"metadata": group.metadata, "metrics": group.metrics}, group.logs)
        for position, trajectory in enumerate(group):
            self._trajectory(f"{index}.{position}", trajectory)
        for failure in group.exceptions:
            self._failure(failure)
        self._write("</details>\n")

    def _failure(self, failure: RolloutFailure) -> None:
        self._write(
            f'<details class="failure"><summary>failed: {_escaped(failure.type)}: {_escaped(failure.message)}</summary>'
            f"<pre>{_escaped(failure.traceback)}</pre></details>\n"
        )

    def _trajectory(self, name: str, trajectory: Trajectory) -> None:
        reward = f"reward {number(trajectory.reward)}" if trajectory.is_scored else "not scored"
        self._write(f'<details class="trajectory"><summary>trajectory {name}: {reward}</summary>\n')
        facts = {"metrics": trajectory.metrics, "metadata": trajectory.metadata, "tools": trajectory.tools}
        self._facts(facts, trajectory.logs)
        for title, history in conversations_of(trajectory):
            if title:
                self._write(f"<p><b>{_escaped(title)}</b></p>\n")
                self._facts({"tools": history.tools}, [])
            for turn in turns_of(history.messages_and_choices):
                self._turn(turn)
        self._write("</details>\n")

    def _facts(self, values: Mapping[str, object], logs: list[str]) -> None:
        lines = [f"{name} {shown(value)}" for name, value in values.items() if value]
        for line in [*lines, *(f"log {line}" for line in logs)]:
            self._write(f'<div class="facts">{_escaped(line)}</div>\n')

    def _turn(self, turn: Turn) -> None:
        said = f" (result of {turn.responds_to})" if turn.responds_to else ""
        self._write(f'<div class="message{" answer" if turn.is_answer else ""}">')
        self._write(f'<div class="role">{_escaped(turn.role + said)}{_escaped(_sampled(turn))}</div>')
        tokens = self._tokens(turn)
        if turn.reasoning and turn.reasoning not in tokens:
            self._write(f'<pre class="aside">{_escaped(turn.reasoning)}</pre>')
        for part in turn.parts:
            if part.text not in tokens:
                self._part(part)
        for call in turn.calls:
            self._write(
                f"<pre>calls <b>{_escaped(call.name)}</b>({_escaped(call.arguments)}) {_escaped(call.id)}</pre>"
            )
        self._write("</div>\n")

    def _part(self, part: Part) -> None:
        if part.kind == "image_url" and _EMBEDDED_IMAGE.fullmatch(part.text):
            self._write(f'<img alt="" src="{_escaped(part.text)}">')
        elif part.kind == "text":
            self._write(f"<pre>{_escaped(part.text)}</pre>")
        else:
            self._write(f'<pre><span class="aside">[{_escaped(part.kind)}]</span> {_escaped(part.text)}</pre>')

    def _tokens(self, turn: Turn) -> str:
        """Writes the sampled tokens in colours; returns their text, which need not be written again."""
        sampling, texts = turn.sampling, turn.token_texts
        if sampling is None or not texts or len(texts) > self._tokens_left:
            return ""
        self._tokens_left -= len(texts)
        self._write("<pre>")
        for position, text in enumerate(texts):
            self._write(_token(text, sampling, position))
        self._write("</pre>")
        return "".join(texts)


def _token(text: str, sampling: Sampling, position: int) -> str:
    logprob = sampling.logprobs[position]
    probability = math.exp(min(logprob, 0.0))
    colour = next((i for i, bound in enumerate(_BOUNDS) if probability >= bound), len(_BOUNDS))
    about = f"id {sampling.token_ids[position]}, log p {logprob:.3f}, version {sampling.policy_versions[position]}"
    return f'<span class="c{colour}" title="{about}">{_escaped(text)}</span>'


def _sampled(turn: Turn) -> str:
    if not turn.is_answer:
        return ""
    if turn.sampling is None:
        return ", tokens unknown"
    sampling = turn.sampling
    versions = ", ".join(map(str, sorted(set(sampling.policy_versions)))) or "–"
    restrictions = f", {shown(sampling.restrictions)}" if sampling.restrictions else ""
    return (
        f", {len(sampling.token_ids)} tokens of version {versions}, "
        f"temperature {sampling.temperature:g}{restrictions}, "
        f"log p {sum(sampling.logprobs):.3f}, {turn.finish_reason or 'unfinished'}"
    )


def _escaped(text: object) -> str:
    return html.escape(clean(text), quote=True)
