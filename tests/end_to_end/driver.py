"""A user's script, small: trains a policy for some steps on a reward that any tokens can earn.

Run by the tests as a process of its own, so that it can be killed. Prints what it does, a line each.
"""

from __future__ import annotations

import argparse
import asyncio

import art_ray


async def rollout(model: art_ray.TrainableModel, prompt: str) -> art_ray.Trajectory:
    trajectory = art_ray.Trajectory([{"role": "user", "content": prompt}])
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=6
    )
    trajectory.messages_and_choices.append(response.choices[0])
    trajectory.reward = float(sum(response.choices[0].token_ids) % 7)
    return trajectory


async def main(options: argparse.Namespace) -> None:
    model = art_ray.TrainableModel(
        name="driven", project="tests", base_model=options.base_model, base_path=options.base_path, report_metrics=[]
    )
    async with art_ray.LocalBackend(serving=art_ray.ServingConfig(max_model_len=256)) as backend:
        print("registering", flush=True)
        await model.register(backend)
        print(f"registered at step {await model.get_step()}", flush=True)
        while (step := await model.get_step()) < options.steps:
            groups = await art_ray.gather_trajectory_groups(
                (art_ray.TrajectoryGroup(rollout(model, prompt) for _ in range(4)) for prompt in ("one", "two")),
                pbar_desc=None,
            )
            print(f"training step {step + 1}", flush=True)
            result = await model.train(groups, art_ray.TrainConfig(learning_rate=1e-4))
            print(f"trained step {result.step} on {result.metrics['num_trajectories_trained']:g}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-path", required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    asyncio.run(main(parser.parse_args()))
