"""`art-ray show`: the trajectories of one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_ray.cli import output
from art_ray.cli.options import BasePath, Json, RunName, Split, Step

if TYPE_CHECKING:
    from art_ray.cli.conversation import Turn
    from art_ray.trajectories import Trajectory, TrajectoryGroup

_CUT_LINES, _CUT_CHARACTERS = 8, 600


def show(
    run: RunName,
    step: Step = None,
    split: Split = "train",
    group: Annotated[int | None, typer.Option("--group", min=0, help="Only this group, counted from 0.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Trajectories to print in the terminal, the first ones; 0: all.")
    ] = 20,
    full: Annotated[bool, typer.Option("--full", help="Print long texts whole.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write all to this file instead: one page, complete.")
    ] = None,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Show the trajectories and rewards of a step.

    They are printed, or written as one page with --html. Where a step was logged several times, its files follow
    each other, and groups are counted through.

    Example: art-ray show readme/first --step 2

    Example: art-ray show readme/first --step 2 --html step2.html
    """
    from art_ray.cli.conversation import Tally, group_as_json, numbered
    from art_ray.cli.page import write_page
    from art_ray.cli.run import find_run, groups_in
    from art_ray.errors import ConfigError

    found = find_run(run, base_path)
    step, files = found.files(split, step)
    tally = Tally()

    def groups() -> Iterator[tuple[int, TrajectoryGroup]]:
        for index, item in numbered(groups_in(files), group):
            tally.add(item)
            yield index, item
        if group is not None and not tally.groups:
            raise ConfigError(f"{found.label} has no group {group} at step {step} of split {split!r}")

    title = f"{found.label}, {split} step {step}"
    if html is not None:
        write_page(html, title, groups(), tally)
    if as_json:
        listed = [group_as_json(*item) for item in groups()] if html is None else None
        about = {**found.about, "split": split, "step": step, "files": list(map(str, files))}
        output.print_json({**about, "summary": tally.as_json(), "groups": listed, "html": html and str(html)})
        return
    if html is None:
        _print_groups(groups(), limit, full)
    output.say(f"{title}: {tally}", "bold")
    if html is not None:
        output.say(f"written to {html}")


def _print_groups(groups: Iterator[tuple[int, TrajectoryGroup]], limit: int, full: bool) -> None:
    """Prints the first `limit` trajectories, and looks at the others, so that they are counted."""
    printed = left = 0
    for index, group in groups:
        if limit and printed >= limit:
            left += len(group)
            continue
        _print_group(index, group)
        for position, trajectory in enumerate(group):
            if limit and printed >= limit:
                left += 1
                continue
            _print_trajectory(f"{index}.{position}", trajectory, full)
            printed += 1
    if left:
        output.say(f"{left} more trajectories: --limit 0 prints all, --group N those of one group", "dim")


def _print_group(index: int, group: TrajectoryGroup) -> None:
    from art_ray.cli.conversation import shown
    from art_ray.trajectories import has_spread

    rewards = [trajectory.reward for trajectory in group if trajectory.is_scored]
    note = "" if has_spread(rewards) or len(rewards) < 2 else "  (all equal: nothing to prefer)"
    output.say(
        f"group {index}  rewards {', '.join(map(output.number, (t.reward for t in group))) or 'none'}{note}", "bold"
    )
    for name, value in (("metadata", group.metadata), ("metrics", group.metrics)):
        if value:
            output.say(f"{name} {shown(value)}", "dim", indent=2)
    for line in group.logs:
        output.say(f"log {line}", "dim", indent=2)
    for failure in group.exceptions:
        output.say(f"failed: {failure.type}: {failure.message}", "red", indent=2)


def _print_trajectory(name: str, trajectory: Trajectory, full: bool) -> None:
    from art_ray.cli.conversation import conversations_of, shown, turns_of

    reward = output.number(trajectory.reward) if trajectory.is_scored else "not scored"
    output.say(f"trajectory {name}  reward {reward}", "cyan", indent=2)
    for title, value in (("metrics", trajectory.metrics), ("metadata", trajectory.metadata)):
        if value:
            output.say(f"{title} {shown(value)}", "dim", indent=4)
    for title, history in conversations_of(trajectory):
        if title:
            output.say(title, "cyan", indent=4)
        for turn in turns_of(history.messages_and_choices):
            print_turn(turn, full)
    for line in trajectory.logs:
        output.say(f"log {line}", "dim", indent=4)


def print_turn(turn: Turn, full: bool) -> None:
    """Prints one message, long texts cut unless `full`."""
    said = f" (result of {turn.responds_to})" if turn.responds_to else ""
    output.say(f"{turn.role}{said}{_sampled(turn)}", "green" if turn.is_answer else "blue", indent=4)
    if turn.reasoning:
        output.say(_cut(f"(reasoning) {turn.reasoning}", full), "dim", indent=6)
    for part in turn.parts:
        text = part.text if part.kind == "text" else f"[{part.kind}] {part.text}"
        output.say(_cut(text, full), indent=6)
    for call in turn.calls:
        output.say(_cut(f"calls {call.name}({call.arguments}){f'  as {call.id}' if call.id else ''}", full), indent=6)


def _sampled(turn: Turn) -> str:
    if not turn.is_answer:
        return ""
    if turn.sampling is None:
        return "  (tokens unknown)"
    versions = sorted(set(turn.sampling.policy_versions))
    said = f"{len(turn.sampling.token_ids)} tokens, version {', '.join(map(str, versions)) or '–'}"
    return f"  ({said}, {turn.finish_reason or 'unfinished'})"


def _cut(text: str, full: bool) -> str:
    lines = text.splitlines()
    short = "\n".join(lines[:_CUT_LINES])[:_CUT_CHARACTERS]
    return text if full or len(short) >= len(text.rstrip()) else f"{short} … (--full shows all {len(text)} characters)"
