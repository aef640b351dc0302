"""The trainer's numbers and speed on one device: `python -m tests.gpu.trainer_step`.

Needs torch, transformers, peft and the `training` room; no model, no hub. On a CUDA device it takes a few minutes,
compilation of FlexAttention included; on a CPU it runs the same checks on less, and says what it left out.
Exits with 1 where a check fails.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from art_ray.training.config import LoraSettings, RankSettings, TrainerConfig, TrainerSpec
from art_ray.training.packing import TrainingBatch, pack
from art_ray.training.policy import Policy
from art_ray.training.ranks import open_group
from art_ray.training.trainer import Trainer
from art_ray.types import TrainConfig
from tests.small_models import Kind, save_random_model, tiny_config
from tests.training.made import random_groups, sample
from tests.training.plain import packed, plain, relative_difference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KINDS: tuple[Kind, ...] = ("llama", "qwen3", "gemma")
failures: list[str] = []


def check(name: str, value: float, bound: float) -> None:
    """Prints one line, and remembers a value that is not below its bound."""
    passed = value < bound
    print(f"  {'ok  ' if passed else 'FAIL'} {name}: {value:.2e} (bound {bound:.0e})", flush=True)
    if not passed:
        failures.append(name)


def exactness(folder: Path, dtype: str, logprob_bound: float, gradient_bound: float) -> None:
    """Random trees in rows of three sizes against one sequence at a time."""
    generator = np.random.default_rng(0)
    stem = generator.integers(0, 512, 150).tolist()
    samples = []
    for index in range(9):
        tokens = [*stem[: 150 - 20 * (index % 3)], *generator.integers(0, 512, 40 + 7 * index).tolist()]
        temperatures = np.where(generator.random(len(tokens)) < 0.5, 1.0, 0.7)
        samples.append(sample(tokens, range(100, len(tokens)), 0.1 * (index + 1), temperatures=temperatures))
    for kind in KINDS:
        path = save_random_model(folder / f"{kind}", tiny_config(kind, vocab_size=512))
        policy = Policy(
            str(path),
            LoraSettings(init_lora_weights=False),
            TrainerConfig(dtype=dtype, device=DEVICE),  # type: ignore[arg-type]
        )
        expected, expected_gradients = plain(policy, samples)
        for max_tokens in (10_000, 500, 256):
            found, gradients = packed(policy, pack(samples, max_tokens))
            by_advantage = {round(key, 4): value for key, value in found.items()}
            worst = max(
                float((by_advantage[round(item.advantage, 4)] - wanted).abs().max())
                for item, wanted in zip(samples, expected, strict=True)
            )
            check(f"{dtype} {kind} rows of {max_tokens}: log-probabilities, largest difference", worst, logprob_bound)
            relative = relative_difference(gradients, expected_gradients)
            check(f"{dtype} {kind} rows of {max_tokens}: gradient, relative difference", relative, gradient_bound)


def resumption(folder: Path) -> None:
    """Two steps, a new trainer, one more, against three steps in one trainer."""
    path = save_random_model(folder / "resumed", tiny_config("qwen3", vocab_size=512))

    def trainer(name: str) -> Trainer:
        config = TrainerConfig(dtype="float32", device=DEVICE)  # type: ignore[arg-type]
        return Trainer(TrainerSpec(base_model=str(path), checkpoints_dir=folder / name, trainer=config))

    def step(of: Trainer, number: int) -> None:
        of.train(random_groups(seed=number, vocabulary=512), TrainConfig(learning_rate=1e-3), number)

    straight, first = trainer("straight"), trainer("halves")
    for number in range(3):
        step(straight, number)
    for number in range(2):
        step(first, number)
    first.close()
    step(trainer("halves"), 2)
    one, other = (folder / name / "0003" / "adapter_model.safetensors" for name in ("straight", "halves"))
    from safetensors.torch import load_file

    weights, same = load_file(one), load_file(other)
    difference = max(float((weights[name] - same[name]).abs().max()) for name in weights)
    # Sums on a GPU have no fixed order, so that equality to the bit is asked of the CPU alone.
    check("train 3 against train 2, resume, train 1: adapter", difference, 1e-5 if ON_GPU else 1e-30)


def group_of_ranks(folder: Path) -> None:
    """What `Ranks` sends: tensors of the device, tensors and objects of the CPU, through one group (of one)."""
    device = torch.device(DEVICE)
    open_group(RankSettings(init_method=f"file://{folder / 'meeting'}"), device, 60.0)
    try:
        for where in {torch.device("cpu"), device}:
            numbers = torch.arange(3.0, dtype=torch.float64, device=where)
            dist.all_reduce(numbers)
            check(f"sum over the ranks, {where.type}", float((numbers.cpu() - torch.arange(3.0)).abs().max()), 1e-30)
        box = [{"step": 3}]
        dist.broadcast_object_list(box, src=0, device=device)
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, torch.ones(2))
        check("an object to all ranks", float(box != [{"step": 3}]), 1e-30)
        check("objects of all ranks", float((gathered[0] - torch.ones(2)).abs().max()), 1e-30)  # type: ignore[operator]
    finally:
        dist.destroy_process_group()


def seconds_of(work: Callable[[], object], repetitions: int) -> float:
    """The fastest of some repetitions, after one that does not count."""
    times = []
    for _ in range(repetitions + 1):
        if ON_GPU:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def one_by_one(policy: Policy, batches: list[TrainingBatch]) -> None:
    for batch in batches:
        packed(policy, batch)


def throughput(folder: Path) -> None:
    """Whole train steps of a 135M model: shared prefixes against one row per sequence."""
    width = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    layers = 30 if ON_GPU else 4
    path = save_random_model(folder / "wide", tiny_config("llama", num_hidden_layers=layers, **width))
    shapes = [(40, 14, 4), (600, 32, 4), (2000, 200, 4)] if ON_GPU else [(40, 14, 2), (200, 32, 1)]
    print(f"\nthroughput, {layers} layers of SmolLM2-135M's width, rank 8; groups of 8")
    print(f"{'dtype':>9} {'prompt':>7} {'answer':>7} {'groups':>7} {'seconds':>8} {'tokens/s':>9} {'unique/s':>9} "
          f"{'unshared s':>11} {'times':>6} {'peak GB':>8}")  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        config = TrainerConfig(dtype=dtype, device=DEVICE)  # type: ignore[arg-type]
        policy = Policy(str(path), LoraSettings(), config)
        for prompt, answer, num_groups in shapes:
            groups = random_groups(0, num_groups, 8, prompt, answer)
            turns = [(g.trajectories[i].messages_and_choices[1], i) for g in groups for i in range(8)]
            samples = [
                sample(
                    [*turn.prompt_token_ids, *turn.token_ids],  # type: ignore[union-attr]
                    range(prompt, prompt + len(turn.token_ids)),  # type: ignore[union-attr]
                    float(i),
                )
                for turn, i in turns
            ]
            shared = pack(samples, config.max_tokens_per_row)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            ours = seconds_of(partial(packed, policy, shared), 3 if ON_GPU else 1)
            peak = torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else float("nan")
            alone = [pack([item], config.max_tokens_per_row) for item in samples]
            theirs = seconds_of(partial(one_by_one, policy, alone), 1)
            print(
                f"{dtype:>9} {prompt:>7} {answer:>7} {num_groups:>7} {ours:>8.3f} "
                f"{shared.num_tokens_submitted / ours:>9.0f} {shared.num_tokens_packed / ours:>9.0f} "
                f"{theirs:>11.3f} {theirs / ours:>6.1f} {peak:>8.2f}",
                flush=True,
            )


def main() -> None:
    """Runs everything; exits with 1 where a check failed."""
    device = (
        torch.cuda.get_device_name() if ON_GPU else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    )
    print(f"{device}; " + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
    if not ON_GPU:
        print("no CUDA device: left out are FlexAttention's compiled kernels and backward pass, AdamW's fused CUDA "
              "kernel, nccl, device memory, and the large shapes of the table")  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("\nexactness")
        exactness(folder / "float32", "float32", 1e-4, 1e-5)
        exactness(folder / "bfloat16", "bfloat16", 0.5, 0.1)
        resumption(folder)
        group_of_ranks(folder)
        throughput(folder)
    print(f"\n{len(failures)} of the checks failed; {time.monotonic() - started:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
