"""Several ranks over gloo: the same gradient, the same checkpoints, and an error where a rank dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from art_ray.training import checkpoint
from art_ray.training.config import LoraSettings, RankSettings, TrainerConfig, TrainerSpec
from tests.training.made import complete_steps


def run(
    model: Path, directory: Path, world_size: int, behaviour: str = "train", **trainer: object
) -> list[tuple[int, str]]:
    """Starts `world_size` ranks; returns (exit code, output) of each."""
    meeting = directory.with_suffix(f".meeting{len(list(directory.parent.iterdir()))}")
    processes = []
    for rank in range(world_size):
        spec = TrainerSpec(
            base_model=str(model),
            checkpoints_dir=directory,
            lora=LoraSettings(init_lora_weights=False),
            trainer=TrainerConfig(
                **{
                    "dtype": "float32",
                    "device": "cpu",
                    "num_threads": 1,
                    "adam_epsilon": 1.0,
                    "max_tokens_per_row": 30,
                    "ranks": world_size,
                    "collective_timeout_s": 60,
                    **trainer,
                }
            ),
            place=RankSettings(rank=rank, world_size=world_size, init_method=f"file://{meeting}"),
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.rank_program", spec.model_dump_json(), behaviour],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
        )
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def flat(directory: Path, step: int, file: str, ending: str = "") -> torch.Tensor:
    state = load_file(checkpoint.step_dir(directory, step) / file)
    return torch.cat([value.reshape(-1) for name, value in sorted(state.items()) if name.endswith(ending)]).double()


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alone") / "checkpoints"
    ((code, output),) = run(tiny_model, directory, 1)
    assert code == 0, output
    return directory


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_sum_to_the_gradient_of_one_and_agree_on_every_metric(tiny_model, tmp_path, alone, world_size):
    directory = tmp_path / "checkpoints"
    results = run(tiny_model, directory, world_size)
    assert [code for code, _ in results] == [0] * world_size, results
    losses = [[line.split("loss")[1] for line in output.splitlines() if "loss" in line] for _, output in results]
    assert losses[0]
    assert all(other == losses[0] for other in losses)
    assert complete_steps(directory) == [0, 1, 2, 3]

    # AdamW's first moment after one step is a tenth of the gradient.
    gradient = flat(alone, 1, "optimizer.safetensors", ".exp_avg")
    same = flat(directory, 1, "optimizer.safetensors", ".exp_avg")
    assert (same - gradient).norm() / gradient.norm() < 1e-5

    moved = flat(alone, 2, "adapter_model.safetensors") - flat(alone, 0, "adapter_model.safetensors")
    apart = flat(alone, 2, "adapter_model.safetensors") - flat(directory, 2, "adapter_model.safetensors")
    assert apart.norm() / moved.norm() < 1e-5


def test_checkpoints_of_one_rank_are_resumed_by_two(tiny_model, tmp_path):
    directory = tmp_path / "checkpoints"
    assert run(tiny_model, directory, 1)[0][0] == 0
    results = run(tiny_model, directory, 2)
    assert [code for code, _ in results] == [0, 0], results
    assert complete_steps(directory) == [0, 1, 2, 3, 4, 5, 6]


def test_an_error_of_the_first_rank_that_is_none_of_ours_reaches_all_of_them_at_once(tiny_model, tmp_path):
    results = run(tiny_model, tmp_path / "checkpoints", 2, "fail", collective_timeout_s=100)
    assert [code for code, _ in results] == [3, 3], results
    assert all("TrainingError: rank 0 failed: KeyError: 'metrics'" in output for _, output in results)


def test_a_rank_that_dies_is_a_training_error_of_the_others_and_the_step_is_not_committed(tiny_model, tmp_path):
    directory = tmp_path / "checkpoints"
    survivor, dead = run(tiny_model, directory, 2, "die", collective_timeout_s=20)
    assert dead[0] == -9
    assert survivor[0] == 3, survivor
    assert "TrainingError: rank 0 of 2 lost the others" in survivor[1]
    assert complete_steps(directory) == [0]
