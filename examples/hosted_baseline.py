"""Logs a hosted model as a baseline, beside the model that learns: the same task, the same metrics, nothing trained.

`art_ray.Model` needs no backend. Its answers are asked from any server that speaks OpenAI's protocol; what it did is
written where a trained model's is, so that both can be compared. For instance:

    OPENAI_API_KEY=… python examples/hosted_baseline.py --base-url https://api.openai.com/v1 --model gpt-4.1-mini
"""

from __future__ import annotations

import argparse
import asyncio
import os

import polars
import yes_no_maybe

import art_ray


async def rollout(model: art_ray.Model, prompt: str) -> art_ray.Trajectory:
    """Asks once, and scores the answer as `yes_no_maybe` does."""
    trajectory = art_ray.Trajectory([{"role": "user", "content": prompt}])
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=8
    )
    trajectory.messages_and_choices.append(response.choices[0])
    trajectory.reward = yes_no_maybe.reward_of(response.choices[0].message.content or "")
    return trajectory.finish()


def compared(base_path: str, project: str) -> polars.DataFrame:
    """Returns the last mean reward in validation of every model of a project, the best first."""
    rows = []
    for folder in sorted(os.scandir(os.path.join(base_path, project, "models")), key=lambda entry: entry.name):
        history = art_ray.Model(name=folder.name, project=project, base_path=base_path).history()
        if "val/reward" in history.columns:
            last = history.drop_nulls("val/reward").row(-1, named=True)
            rows.append({"model": folder.name, "step": last["step"], "val/reward": last["val/reward"]})
    return polars.DataFrame(rows).sort("val/reward", descending=True)


async def main(options: argparse.Namespace) -> None:
    model = art_ray.Model(
        name=options.name or options.model.replace("/", "-"),
        project="yes-no-maybe",
        inference_base_url=options.base_url,
        inference_api_key=os.environ.get("OPENAI_API_KEY"),
        inference_model_name=options.model,
        base_path=options.base_path,
    )
    groups = await art_ray.gather_trajectory_groups(
        (
            art_ray.TrajectoryGroup(rollout(model, prompt) for _ in range(options.group_size))
            for prompt in yes_no_maybe.prompts()[-2:]  # those that the trained model is validated on
        ),
        pbar_desc=model.name,
        max_exceptions=0.1,
    )
    await model.log(groups, split="val")
    await model.close()
    print(compared(options.base_path, model.project))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="of the server, up to /v1")
    parser.add_argument("--model", required=True, help="the model's name there")
    parser.add_argument("--name", help="the model's name in the logs (default: as there)")
    parser.add_argument("--group-size", type=int, default=4, help="answers per prompt (default: 4)")
    parser.add_argument("--base-path", default=".art", help="where everything is written (default: .art)")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parsed()))
