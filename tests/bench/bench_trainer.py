"""What a training step costs: against a bare loop, in memory, and as the step grows."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch

from art_ray.training.config import LoraSettings, RankSettings, TrainerConfig
from art_ray.training.logprobs import chunked_logprobs
from art_ray.training.optimizer import Optimizer
from art_ray.training.packing import PackedRow, TrainingBatch, pack
from art_ray.training.policy import Policy
from art_ray.training.ranks import Ranks
from art_ray.training.step import train_step
from art_ray.types import TrainConfig
from tests.bench import Measured, benchmark
from tests.small_models import save_random_model, small_real_model, tiny_config
from tests.training.made import sample

PACKAGES = ("torch", "transformers", "peft")
GROUP_SIZE, PROMPT, ANSWER = 8, 40, 14


def batch(num_groups: int, prompt: int = PROMPT, answer: int = ANSWER) -> TrainingBatch:
    """Groups of 8 completions of one prompt each, all of random tokens, in rows of the default size."""
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(num_groups):
        stem = generator.integers(3, 49152, prompt).tolist()
        samples += [
            sample(
                [*stem, *generator.integers(3, 49152, answer).tolist()], range(prompt, prompt + answer), 1.0 - i % 2 * 2
            )
            for i in range(GROUP_SIZE)
        ]
    return pack(samples, TrainerConfig().max_tokens_per_row)


@cache
def policy() -> Policy:
    """SmolLM2-135M with LoRA of rank 8 on all linear layers, in the default dtype of this machine."""
    return Policy(str(small_real_model()), LoraSettings(), TrainerConfig(device="cpu"))


@cache
def optimizer() -> Optimizer:
    return Optimizer(policy().adapter, policy().config)


def step_seconds(work: TrainingBatch) -> float:
    """One whole optimizer step."""
    alone = Ranks(RankSettings(), torch.device("cpu"), 60.0)
    started = time.perf_counter()
    train_step(policy(), optimizer(), work, TrainConfig(learning_rate=1e-5), alone)
    return time.perf_counter() - started


@cache
def bare_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_real_model(), dtype=policy().dtype, attn_implementation="sdpa")
    import peft

    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings).train()


def bare_seconds(work: TrainingBatch) -> float:
    """What one would write by hand for the same rows: a 4D mask, logits where they are needed, and backward."""
    model = bare_model()
    model.zero_grad()
    started = time.perf_counter()
    for row in work.rows:
        index = np.arange(len(row))
        mask = (index[None, :] <= index[:, None]) & (index[:, None] < row.subtree_end[None, :])
        hidden = (
            model.get_base_model()
            .model(
                input_ids=torch.from_numpy(row.tokens)[None],
                position_ids=torch.from_numpy(row.positions)[None],
                attention_mask=torch.from_numpy(mask)[None, None],
                use_cache=False,
            )
            .last_hidden_state[0]
        )
        logits = model.get_base_model().lm_head(hidden[torch.from_numpy(row.sources)]).float()
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row.targets)[:, None])[:, 0]
        ratios = torch.exp(logprobs - torch.from_numpy(row.logprobs))
        loss = -(ratios.detach().clamp(0, 5) * torch.from_numpy(row.advantages) * logprobs).sum()
        (loss / work.num_trained_tokens).backward()
    return time.perf_counter() - started


@benchmark("train_vs_bare_loop", unit="tokens/s", runs=5, packages=PACKAGES)
def train_vs_bare_loop() -> Measured:
    """Tokens/s of our step and of a bare forward and backward on the same 4 groups of 8."""
    work = batch(4)
    return Measured(work.num_tokens_packed / step_seconds(work), work.num_tokens_packed / bare_seconds(work))


@benchmark("train_scaling_16x", unit="time at 16x over 16 times the time at 1x", runs=3, packages=PACKAGES)
def train_scaling() -> Measured:
    """Whether a step of 4 and 16 times the groups takes 4 and 16 times as long."""
    seconds = {groups: step_seconds(batch(groups)) for groups in (1, 4, 16)}
    print("  seconds: " + ", ".join(f"{groups} groups {value:.2f}" for groups, value in seconds.items()))
    return Measured(seconds[16] / (16 * seconds[1]), 1.0)


ROW = 8192


def peak_mb(way: str) -> float:
    """The most memory of a process that computes one row of 8,192 tokens in one of three ways."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_trainer", way],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    return float(done.stdout.split()[-1])


def compute_row(way: str) -> None:
    """`activations`: layers alone; `ours`; `naive`: whole logits. Two layers of SmolLM2's width, all tokens trained."""
    with tempfile.TemporaryDirectory() as name:
        width = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
        path = save_random_model(Path(name), tiny_config("llama", max_position_embeddings=ROW, **width))
        wide = Policy(str(path), LoraSettings(), TrainerConfig(device="cpu", dtype="float32"))
    tokens = np.random.default_rng(0).integers(3, 49152, ROW).tolist()
    row: PackedRow = pack([sample(tokens, range(1, ROW))], ROW).rows[0]
    hidden, _ = wide._hidden(row)
    targets = torch.from_numpy(row.targets)
    if way == "activations":
        hidden.sum().backward()
    elif way == "ours":
        sources, temperatures = torch.from_numpy(row.sources), torch.from_numpy(row.temperatures)
        chunk = wide.config.logprob_chunk_tokens
        chunked_logprobs(hidden, sources, temperatures, targets, wide._head, chunk)[0].sum().backward()
    else:
        logits = (hidden[:-1] @ wide._head.weight.T).float()
        torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum().backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


@benchmark("peak_memory_8k_mb", unit="MB above the activations", runs=1, packages=PACKAGES)
def peak_memory() -> Measured:
    """What log-probabilities of a row of 8,192 tokens with a vocabulary of 49,152 need on top of the activations."""
    activations, ours, naive = (peak_mb(way) for way in ("activations", "ours", "naive"))
    print(f"  peak of the process in MB: activations {activations:.0f}, ours {ours:.0f}, naive {naive:.0f}")
    return Measured(ours - activations, naive - activations)


if __name__ == "__main__":
    compute_row(sys.argv[1])
