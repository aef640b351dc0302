"""TRL's GRPOTrainer on the work of `bench_trl`: run with the Python of an environment that holds `trl`, not ours.

`python tests/bench/trl_step.py '{"model": …, "prompts": […], "steps": 4, …}'` prints one JSON object: seconds of each
step (rollout, training and update together) and the mean reward of each.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time


def main(options: dict) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options["threads"])
    size, prompts = options["group_size"], options["prompts"]
    rewards_of_steps: list[float] = []

    def reward(completions: list, **_: object) -> list[float]:
        texts = [completion[0]["content"].lower() for completion in completions]
        words = {"maybe": 1.0, "no": 0.75, "yes": 0.5} if options["is_scored"] else {}
        scores = [
            next((value for word, value in words.items() if word in text), 0.0) if words else float(i % 2)
            for i, text in enumerate(texts)
        ]
        rewards_of_steps.append(sum(scores) / len(scores))
        return scores

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=options["model"],
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=options["dtype"] == "bfloat16",
                model_init_kwargs={"dtype": options["dtype"]},
                per_device_train_batch_size=len(prompts) * size,
                num_generations=size,
                max_completion_length=options["max_tokens"],
                generation_kwargs={"min_new_tokens": options["max_tokens"]} if options["is_length_fixed"] else None,
                temperature=1.0,
                learning_rate=options["learning_rate"],
                lr_scheduler_type="constant",
                beta=0.0,
                max_steps=options["steps"],
                gradient_checkpointing=False,
                seed=options["seed"],
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in prompts]),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
    print(json.dumps({"seconds": clock.seconds, "rewards": rewards_of_steps}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
