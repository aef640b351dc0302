"""`art-ray export-adapter` and `art-ray delete-checkpoints`: what is done to checkpoints when nothing runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_ray.cli import output
from art_ray.cli.options import BasePath, Json, RunName

if TYPE_CHECKING:
    from art_ray.cli.run import Run


def export_adapter(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make. It must not be there yet.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The checkpoint's step. By default the newest complete one.")
    ] = None,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Copy a checkpoint's adapter into a folder for PEFT.

    Every byte is compared with the checkpoint's manifest. The folder appears whole or not at all.

    Example: art-ray export-adapter readme/first adapter --step 3
    """
    from art_ray.cli.adapter import export
    from art_ray.cli.run import find_run, ranges
    from art_ray.errors import ConfigError
    from art_ray.training.checkpoint import complete_steps

    found = find_run(run, base_path)
    steps = complete_steps(found.checkpoints_dir)
    if not steps or (step is not None and step not in steps):
        asked = "" if step is None else f" of step {step}"
        there = f"There are: {ranges(steps, step)}." if steps else "It has none at all."
        raise ConfigError(f"{found.label} has no complete checkpoint{asked}. {there}")
    step = steps[-1] if step is None else step
    manifest = export(found.checkpoints_dir, step, out)
    if as_json:
        output.print_json({**found.about, "step": step, "base_model": manifest.base_model, "out": str(out)})
    else:
        output.say(f"the adapter of {found.label} at step {step} is in {out}; its base model: {manifest.base_model}")


def delete_checkpoints(
    run: RunName,
    metric: Annotated[
        str, typer.Option("--metric", help="The best step by the mean of this metric stays.")
    ] = "val/reward",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Delete checkpoints, all but the latest and the best.

    It is the rule of model.delete_checkpoints. Nothing is started. While a job trains the run nothing is deleted
    either: which versions it serves, only the job itself knows (and its model.delete_checkpoints respects).

    Example: art-ray delete-checkpoints readme/first --metric train/reward --dry-run
    """
    from art_ray.cli.run import find_run
    from art_ray.errors import CheckpointError
    from art_ray.training.checkpoint import delete_all_but
    from art_ray.training.lock import WriterLock, current_writer

    found = find_run(run, base_path)
    writer = current_writer(found.checkpoints_dir)
    if dry_run:
        plan = _plan(found, metric)
    elif writer is not None:
        raise CheckpointError(
            f"{writer} trains {found.label} at this moment, and may serve any of its checkpoints: nothing was deleted. "
            "Call model.delete_checkpoints() there, or wait for its end; --dry-run says what would be deleted"
        )
    elif (plan := _plan(found, metric)).delete:
        with WriterLock(found.checkpoints_dir):  # no job begins to train it meanwhile
            plan = _plan(found, metric)  # one may have, and ended
            delete_all_but(found.checkpoints_dir, plan.keep)
    if as_json:
        output.print_json({**found.about, **asdict(plan), "metric": metric, "dry_run": dry_run, "trained_by": writer})
        return
    deleted = "would delete" if dry_run else "deleted"
    output.say(f"{deleted} {_listed(plan.delete)} ({plan.size_bytes / 1e6:.1f} MB), keeps {_listed(plan.keep)}")
    if writer is not None:
        output.say(f"{writer} trains it at this moment: what it serves would stay, too", "yellow")


@dataclass(frozen=True)
class _Plan:
    keep: list[int]
    """Steps that stay; of those that have a checkpoint."""
    delete: list[int]
    size_bytes: int
    """Of all files of the steps in `delete`."""


def _plan(run: Run, metric: str) -> _Plan:
    """Returns what `model.delete_checkpoints` would keep and delete.

    Raises:
        UnknownMetricError: the metric is not the default and was never logged.
    """
    from art_ray.ledger.checkpoints import steps_to_keep
    from art_ray.training import checkpoint

    directory = run.checkpoints_dir
    latest = checkpoint.newest_step(directory)
    if latest is None:
        return _Plan([], [], 0)
    keep = steps_to_keep(run.history, metric, latest)
    delete = checkpoint.other_steps(directory, keep)
    files = [path for step in delete for path in checkpoint.step_dir(directory, step).rglob("*") if path.is_file()]
    return _Plan(
        [step for step in keep if checkpoint.step_dir(directory, step).is_dir()],
        delete,
        sum(path.stat().st_size for path in files),
    )


def _listed(steps: list[int]) -> str:
    from art_ray.cli.run import ranges

    return f"step{'s' * (len(steps) > 1)} {ranges(steps)}" if steps else "nothing"
