"""One rank of a trainer, as a process: `python -m tests.training.rank_program <spec as JSON> <behaviour>`."""

from __future__ import annotations

import os
import signal
import sys

from art_ray.errors import ArtRayError
from art_ray.training.config import TrainerSpec
from art_ray.training.trainer import Trainer
from art_ray.types import TrainConfig
from tests.training.made import random_groups

CONFIG = TrainConfig(learning_rate=1e-2, beta=0.05)


def main(spec_json: str, behaviour: str) -> None:
    spec = TrainerSpec.model_validate_json(spec_json)
    trainer = Trainer(spec)
    if behaviour == "die" and spec.place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "fail":
        trainer._described = lambda config: {}["metrics"]  # type: ignore[method-assign]
    for step in range(trainer.step, trainer.step + 2):
        metrics = trainer.train(random_groups(seed=step, num_groups=3, group_size=4, vocabulary=512), CONFIG, step)
        print(f"rank {spec.place.rank} step {trainer.step} loss {metrics['loss']:.6f}", flush=True)
    assert trainer.train([], CONFIG, trainer.step - 1) == metrics
    nothing = trainer.train([], CONFIG, trainer.step)
    assert nothing["num_groups_trainable"] == 0
    trainer.close()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ArtRayError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
