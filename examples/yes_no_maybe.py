"""Teaches a small model to answer "maybe": the whole loop of the README, on any machine.

Each prompt asks for one of "yes", "no", "maybe"; the reward is 0.5, 0.75 or 1.0 by the first of these words in the
answer, 0 if there is none. Run again, it goes on from the last complete step.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from itertools import permutations

import curve
import small_model

import art_ray

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
VALIDATE_EVERY = 5


def prompts() -> list[str]:
    """Returns every way in which the examples ask for one of the three words."""
    forms = ["Choose a word: {}, {}, {}", "Pick one word: {}, {}, {}.", "Which word do you like best: {}, {} or {}?"]
    return [form.format(*words) for words in permutations(REWARDS) for form in forms]


def reward_of(answer: str) -> float:
    """Returns the reward of the first known word in `answer`."""
    found = re.search(r"\b(yes|no|maybe)\b", answer.lower())
    return REWARDS[found.group()] if found else 0.0


async def rollout(model: art_ray.TrainableModel, prompt: str) -> art_ray.Trajectory:
    """Asks the served policy once, and scores what it says."""
    trajectory = art_ray.Trajectory([{"role": "user", "content": prompt}])
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=8
    )
    trajectory.messages_and_choices.append(response.choices[0])
    trajectory.reward = reward_of(response.choices[0].message.content or "")
    trajectory.metrics["tokens"] = response.usage.completion_tokens if response.usage else 0
    return trajectory.finish()


async def gather(
    model: art_ray.TrainableModel, batch: list[str], size: int, desc: str
) -> list[art_ray.TrajectoryGroup]:
    """Returns one group of `size` rollouts for each prompt of `batch`."""
    return await art_ray.gather_trajectory_groups(
        (art_ray.TrajectoryGroup(rollout(model, prompt) for _ in range(size)) for prompt in batch), pbar_desc=desc
    )


def report(groups: list[art_ray.TrajectoryGroup], result: art_ray.TrainResult, rollout_s: float) -> None:
    """Prints one line: what the step learned from, and where its seconds went."""
    rewards = [trajectory.reward for group in groups for trajectory in group]
    spread = statistics.mean(statistics.pstdev([t.reward for t in group]) for group in groups)
    tokens = sum(trajectory.metrics["tokens"] for group in groups for trajectory in group)
    metrics = result.metrics
    loss = f"{metrics['loss']:+.4f}" if "loss" in metrics else "   –   "  # nothing to learn where all rewards are equal
    print(
        f"step {result.step:3d}  reward {statistics.mean(rewards):.3f}  spread {spread:.3f}  "
        f"loss {loss}  {tokens / rollout_s:4.0f} tok/s  "
        f"seconds: rollout {rollout_s:.1f}  train {metrics['seconds']:.1f}  "
        f"weight sync {metrics['seconds_weight_sync']:.1f}",
        flush=True,
    )


async def main(options: argparse.Namespace) -> None:
    """Trains until `options.steps` steps are done."""
    model = art_ray.TrainableModel(
        name=f"seed-{options.seed}",
        project="yes-no-maybe",
        base_model=options.base_model or str(small_model.prepare()),
        base_path=options.base_path,
    )
    *train_prompts, held_out_a, held_out_b = prompts()
    async with art_ray.RayBackend(trainer=art_ray.TrainerConfig(seed=options.seed)) as backend:
        await model.register(backend)
        done = await model.get_step()
        if done:
            print(f"going on from step {done} of {options.steps}")
        started = time.monotonic()
        for batch in art_ray.iterate_dataset(
            train_prompts, groups_per_step=options.groups, num_epochs=10_000, initial_step=done, use_tqdm=False
        ):
            if batch.step >= options.steps:
                break
            if batch.step % VALIDATE_EVERY == 0:
                await model.log(await gather(model, [held_out_a, held_out_b], 4, "validate"), split="val")
            begun = time.monotonic()
            groups = await gather(model, batch.items, options.group_size, f"step {batch.step + 1}")
            rollout_s = time.monotonic() - begun
            result = await model.train(groups, config=art_ray.TrainConfig(learning_rate=options.learning_rate))
            report(groups, result, rollout_s)
        print(f"{max(0, options.steps - done)} steps in {time.monotonic() - started:.0f} s")
        await model.log(await gather(model, [held_out_a, held_out_b], 4, "validate"), split="val")
        await model.delete_checkpoints()
    curve.show(model)


def parsed() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="train until this step")
    parser.add_argument("--groups", type=int, default=4, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers per prompt")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-path", default=".art", help="where everything is written")
    parser.add_argument("--base-model", help="a folder or a hub id (default: SmolLM2-135M-Instruct, from PyPI)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        asyncio.run(main(parsed()))
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted: run the same command again to go on from the last complete step") from None
