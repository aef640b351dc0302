"""TRL's GRPOTrainer on the work of `bench_trl`, step by step: run by the Python of an environment that holds `trl`.

`python tests/bench/trl_step.py '{"model": …}'` prints `versions {…}` when it is ready. Each line on standard input is
answered by one whole step (rollout, training, update) and `step {"seconds": …, "reward": …, "num_tokens": …}`; in
between it waits. It ends after the last step, or with its input.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from typing import Any

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


def reward_of(answer: str) -> float:
    """Returns the reward of the first known word in `answer`: what both sides learn from."""
    found = re.search(r"\b(yes|no|maybe)\b", answer.lower())
    return REWARDS[found.group()] if found else 0.0


def main(options: dict) -> None:
    from importlib.metadata import version

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options["threads"])
    prompts = [prompt for step in options["prompts_of_steps"] for prompt in step]
    num_completions = len(options["prompts_of_steps"][0]) * options["group_size"]
    rewards_of_steps: list[float] = []

    def reward(completions: list, **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [float(i % 2) if options["is_length_fixed"] else reward_of(text) for i, text in enumerate(texts)]
        rewards_of_steps.append(sum(scores) / len(scores))
        return scores

    class StepByStep(TrainerCallback):
        num_tokens_before = 0

        def on_step_begin(self, *_: object, **__: object) -> None:
            if not sys.stdin.readline():
                raise SystemExit
            self.started = time.perf_counter()

        def on_step_end(self, _args: object, state: Any, *_: object, **__: object) -> None:
            seconds = time.perf_counter() - self.started
            num_tokens = int(state.num_input_tokens_seen - self.num_tokens_before)
            self.num_tokens_before = state.num_input_tokens_seen
            step = {"seconds": seconds, "reward": rewards_of_steps[-1], "num_tokens": num_tokens}
            print("step", json.dumps(step), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=options["model"],
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                # All completions of a step are sampled together; forward and backward hold `micro_batch` of them.
                per_device_train_batch_size=options["micro_batch"],
                gradient_accumulation_steps=num_completions // options["micro_batch"],
                num_generations=options["group_size"],
                max_completion_length=options["max_tokens"],
                # Keeps the end of the answer from being sampled. To ignore it, as our side does, is no option here: TRL
                # cuts each answer behind the first one.
                generation_kwargs={"min_new_tokens": options["max_tokens"]} if options["is_length_fixed"] else None,
                temperature=1.0,
                learning_rate=options["learning_rate"],
                lr_scheduler_type="constant",
                adam_beta2=options["adam_beta2"],
                beta=0.0,
                max_steps=len(options["prompts_of_steps"]),
                shuffle_dataset=False,
                gradient_checkpointing=False,  # TRL's default would save memory, and cost time
                seed=options["seed"],
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in prompts]),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[StepByStep()],
        )
        versions = {name: version(name) for name in ("trl", "torch", "transformers", "peft")}
        print("versions", json.dumps(versions), flush=True)
        trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
