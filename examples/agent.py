"""What the examples of agents share: options, a model, and the loop of rollouts and steps."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import curve
import small_model

import art_ray
from art_ray.ledger import read_trajectory_groups_parquet

Scenario = TypeVar("Scenario")
Rollout = Callable[[art_ray.TrainableModel, Scenario], Awaitable[art_ray.Trajectory]]

ROLES = ("user", "assistant")
TOOL_TEMPLATE = Path(__file__).with_name("tools.jinja")
TOOL_ENGINE_ARGS = {
    "chat_template": str(TOOL_TEMPLATE),
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
"""For a model whose own chat template knows no tools; one that was trained with tools needs its parser alone."""


def options(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns the options that all examples have; `defaults` replace some of their values."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="train until this step")
    parser.add_argument("--groups", type=int, default=4, help="scenarios per step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per scenario")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-path", default=".art", help="where everything is written")
    parser.add_argument("--base-model", help="a folder or a hub id (default: SmolLM2-135M-Instruct, from PyPI)")
    parser.set_defaults(**defaults)
    return parser


def model_of(
    chosen: argparse.Namespace, project: str, engine_args: dict[str, Any] | None = None
) -> art_ray.TrainableModel:
    """Returns the model that learns."""
    # A policy that is yet to learn how calls are written writes many that are none: vLLM logs a traceback for each.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    return art_ray.TrainableModel(
        name=f"seed-{chosen.seed}",
        project=project,
        base_model=chosen.base_model or str(small_model.prepare()),
        base_path=chosen.base_path,
        _internal_config={"engine_args": engine_args} if engine_args else None,
    )


def opening(system: str, examples: Sequence[tuple[str, str]]) -> art_ray.Messages:
    """Returns the messages of a conversation's beginning: what the task is, and examples of questions and answers."""
    turns = [{"role": role, "content": text} for pair in examples for role, text in zip(ROLES, pair, strict=True)]
    return [{"role": "system", "content": system}, *turns]


async def train(
    model: art_ray.TrainableModel, rollout: Rollout[Scenario], scenarios: Sequence[Scenario], chosen: argparse.Namespace
) -> None:
    """Trains until `chosen.steps` steps are done; then shows the best rollout of the last step, and the curve."""
    done = await model.get_step()
    if done:
        print(f"going on from step {done} of {chosen.steps}")
    for batch in art_ray.iterate_dataset(
        scenarios, groups_per_step=chosen.groups, num_epochs=10_000, initial_step=done, use_tqdm=False
    ):
        if batch.step >= chosen.steps:
            break
        begun = time.monotonic()
        groups = await art_ray.gather_trajectory_groups(
            (
                art_ray.TrajectoryGroup(rollout(model, scenario) for _ in range(chosen.group_size))
                for scenario in batch.items
            ),
            pbar_desc=f"step {batch.step + 1}",
            max_exceptions=0.1,
        )
        rollout_s = time.monotonic() - begun
        result = await model.train(groups, config=art_ray.TrainConfig(learning_rate=chosen.learning_rate))
        report(model, result, rollout_s)
    show_best(model, await model.get_step() - 1)
    curve.show(model)


def report(model: art_ray.TrainableModel, result: art_ray.TrainResult, rollout_s: float) -> None:
    """Prints one line: what the step learned from, as the history has it, and where its seconds went."""
    import polars

    logged = (
        model.history().filter(polars.col("step") == result.step - 1).drop_nulls("train/reward").row(-1, named=True)
    )
    known = ("loss", "policy_loss", "entropy", "grad_norm", "learning_rate", "seconds", "duration", "exception_rate")
    own = {
        name.removeprefix("train/"): value
        for name, value in logged.items()
        if name.startswith("train/") and isinstance(value, float) and name.removeprefix("train/") not in known
    }
    print(
        f"step {result.step:3d}  reward {own.pop('reward'):.3f}  spread {own.pop('reward_std_dev'):.3f}  "
        + "".join(f"{name} {value:.2f}  " for name, value in own.items() if name not in result.metrics)
        + f"seconds: rollout {rollout_s:.1f}  train {result.metrics['seconds']:.1f}",
        flush=True,
    )


def show_best(model: art_ray.TrainableModel, step: int) -> None:
    """Prints the conversation of the best rollout that was trained at `step`."""
    path = curve.folder_of(model) / "trajectories" / "train" / f"{step:04d}.parquet"
    if not path.exists():
        return
    best = max((t for group in read_trajectory_groups_parquet(str(path)) for t in group), key=lambda t: t.reward)
    print(f"\nthe best rollout of the last step, reward {best.reward:.2f}:")
    for message in best.messages():
        calls = [call["function"] for call in message.get("tool_calls") or []]
        said = [message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]
        print(f"  {message['role']:9} " + "\n            ".join("\n".join(filter(None, said)).splitlines()))
