"""`art-ray runs`: all models below a base path."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_ray.cli import output
from art_ray.cli.options import Json

if TYPE_CHECKING:
    from art_ray.cli.run import Run

_REWARDS = ("val/reward", "train/reward")


def runs(
    base_path: Annotated[
        Path, typer.Argument(metavar="BASE_PATH", envvar="ART_RAY_BASE_PATH", help="Folder below which models lie.")
    ] = Path(".art"),
    as_json: Json = False,
) -> None:
    """List runs with their steps, rewards and checkpoints.

    Rewards are means per step: of split val where it was logged, otherwise of train.

    Example: art-ray runs /shared/runs
    """
    from art_ray.cli.run import runs_below
    from art_ray.errors import ConfigError

    found = runs_below(base_path)
    if not found and not base_path.expanduser().is_dir():
        raise ConfigError(f"no folder {base_path}: runs lie below the base_path of their models, '.art' by default")
    rows = sorted(map(_row, found), key=lambda row: row["last_activity"] or "", reverse=True)
    if as_json:
        output.print_json({"base_path": str(base_path), "runs": rows})
    elif not rows:
        output.say(f"no runs below {base_path}")
    else:
        columns = ("run", "step", "reward of", "last", "best", "at step", "checkpoints", "last activity")
        output.table(columns, map(_cells, rows), left=1)


def _row(run: Run) -> dict[str, Any]:
    from art_ray.errors import CheckpointError
    from art_ray.training.checkpoint import complete_steps

    problem = None
    try:
        checkpoints = complete_steps(run.checkpoints_dir)
    except CheckpointError as error:  # of a newer format: no reason to show nothing of all the others
        checkpoints, problem = [], str(error)
    steps = [*checkpoints, *(step for split in run.splits() for step in run.steps(split)[-1:])]
    if isinstance(step := run.last_row().get("step"), int):
        steps.append(step)
    activity = run.last_activity()
    return {
        **run.about,
        "step": max(steps, default=None),
        **_rewards(run),
        "checkpoints": checkpoints,
        "last_activity": None if activity is None else activity.isoformat(),
        "problem": problem,
    }


def _rewards(run: Run) -> dict[str, Any]:
    for metric in _REWARDS:
        found = run.history.step_means(metric)
        if len(found.steps):
            best = found.best_step()
            return {
                "reward_metric": metric,
                "last_reward": float(found.means[-1]),
                "best_reward": float(found.means[found.steps == best][0]),
                "best_step": best,
            }
    return {"reward_metric": None, "last_reward": None, "best_reward": None, "best_step": None}


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    checkpoints = row["checkpoints"]
    return (
        row["run"],
        "–" if row["step"] is None else row["step"],
        row["reward_metric"] or "–",
        output.number(row["last_reward"]),
        output.number(row["best_reward"]),
        "–" if row["best_step"] is None else row["best_step"],
        "newer format"
        if row["problem"]
        else f"{len(checkpoints)}, newest {checkpoints[-1]}"
        if checkpoints
        else "none",
        "–" if row["last_activity"] is None else _ago(datetime.fromisoformat(row["last_activity"])),
    )


def _ago(at: datetime) -> str:
    seconds = (datetime.now(UTC) - at).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
