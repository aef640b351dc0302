"""The trainer: from trajectory groups at step N to a committed checkpoint of step N + 1."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_ray.errors import CheckpointError, TrainingError
from art_ray.training import checkpoint
from art_ray.training.advantages import StepSamples, collect, collect_supervised
from art_ray.training.config import TrainerSpec
from art_ray.training.lock import WriterLock
from art_ray.training.optimizer import Optimizer
from art_ray.training.packing import TrainingBatch, pack
from art_ray.training.policy import ADAPTER_FILE, Policy
from art_ray.training.ranks import Ranks
from art_ray.training.samples import TrainingSample
from art_ray.training.step import Progress, StepResult, train_step
from art_ray.trajectories import Trajectory, TrajectoryGroup
from art_ray.types import TrainConfig

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

_OPTIMIZER, _STATE = "optimizer.safetensors", "random_state.json"


class Trainer:
    """Owns the weights of one policy. Resumes from the newest complete checkpoint, or writes step 0.

    With several ranks every rank holds one `Trainer` and makes the same calls; the first one reads and writes.
    A directory has one trainer at a time: the first rank holds its lock until `close`, or until it is gone.

    Raises:
        UnknownBaseModelError, UnsupportedLoraError: what was asked for cannot be trained.
        CheckpointError: another trainer works in the directory, or its newest checkpoint cannot be gone on from.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        if spec.trainer.num_threads is not None:
            torch.set_num_threads(spec.trainer.num_threads)
        self._policy = Policy(spec.base_model, spec.lora, spec.trainer)
        self._optimizer = Optimizer(self._policy.adapter, spec.trainer)
        self._ranks = Ranks(spec.place, self._policy.device, spec.trainer.collective_timeout_s)
        self._seed = spec.trainer.seed
        self._is_torn = False  # whether memory may be ahead of the checkpoint, after a step that failed halfway
        self.step = 0
        """The step of the weights in memory, which is the newest committed one."""
        self._lock: WriterLock | None = None
        try:
            self._ranks.on_first(self._take_lock)
            self._resume()
        except BaseException:
            self.close()  # an error is kept with its frames, and they with this object: another try would wait for it
            raise

    # ---- the algorithm ------------------------------------------------------------------------------------------

    def train(
        self,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        step: int,
        progress: Progress | None = None,
        *,
        request_id: str | None = None,
    ) -> dict[str, float]:
        """Trains from `step` to `step` + 1, commits that checkpoint, and returns the step's metrics.

        A step that is already committed is not taken again: the metrics in its manifest are returned, to the call
        that took it and to one without a `request_id`.

        Args:
            groups: what was rolled out, in any order; the same on every rank.
            config: how to learn from it.
            step: the step of the policy to start from.
            progress: called after each row that this rank computed.
            request_id: names this call, so that it can be repeated; written into the manifest.

        Raises:
            TrainingError: `step` is ahead of the newest checkpoint, or was taken by a call of another `request_id`.
            CheckpointError: `step` + 1 was deleted, or the checkpoint cannot be written.
            NonFiniteError: loss or gradients were not finite three times in a row.
        """
        started = time.monotonic()
        if self._is_torn:
            self._resume()
        if step != self.step:
            return self._committed(step, request_id)

        work = collect(
            groups,
            self.spec.trainer.max_tokens_per_row,
            scale_rewards=config.scale_rewards,
            render=self._policy.render if config.allow_training_without_logprobs else None,
        )
        if not work.samples:
            return self._advance_without_learning(work, config, started, request_id)
        return self._learn(work, config, started, progress, request_id)

    def sft(
        self,
        trajectories: Sequence[Trajectory],
        config: TrainConfig,
        step: int,
        progress: Progress | None = None,
        *,
        request_id: str | None = None,
    ) -> dict[str, float]:
        """Trains from `step` to `step` + 1 on the likelihood of the trajectories' answers, for a warm start.

        Of `config` only the learning rate, `warmup_steps`, `optimizer_steps_per_train` and `max_grad_norm` play a part.
        Answers with token ids are trained as sampled; assistant messages without are tokenized by the template.
        Packing, commit, repetition and errors are those of `train`.
        """
        started = time.monotonic()
        if self._is_torn:
            self._resume()
        if step != self.step:
            return self._committed(step, request_id)
        work = collect_supervised(trajectories, self.spec.trainer.max_tokens_per_row, self._policy.render)
        if not work.samples:
            return self._advance_without_learning(work, config, started, request_id)
        return self._learn(work, config, started, progress, request_id, is_supervised=True)

    def _learn(
        self,
        work: StepSamples,
        config: TrainConfig,
        started: float,
        progress: Progress | None,
        request_id: str | None,
        *,
        is_supervised: bool = False,
    ) -> dict[str, float]:
        step = self.step
        self._is_torn = True
        batches = self._batches(work.samples, config.optimizer_steps_per_train)
        with torch.random.fork_rng(devices=[]):  # dropout: a function of seed, step and rank alone
            torch.manual_seed(hash((self._seed, step, self._ranks.rank)))
            results = [
                train_step(
                    self._policy, self._optimizer, batch, config, self._ranks, progress, is_supervised=is_supervised
                )
                for batch in batches
            ]
        metrics = _metrics(work, batches, results, config) | {
            "tokens_padding": float(sum(self._policy.padding(row) for batch in batches for row in batch.rows)),
            "seconds": time.monotonic() - started,
        }
        metrics = self._commit(step + 1, metrics, config, request_id)
        self.step, self._is_torn = step + 1, False
        return metrics

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """Returns the log-probabilities of each sequence's trained tokens under the current policy.

        float32 [num_trained] each, at the temperatures that the tokens were sampled at.
        """
        self._policy.model.eval()
        try:
            rows = [pack([sample], self.spec.trainer.max_tokens_per_row).rows[0] for sample in samples]
            return [self._policy.logprobs(row)[0].cpu() for row in rows]
        finally:
            self._policy.model.train()

    def close(self) -> None:
        """Leaves the group of ranks, and the checkpoint directory to another trainer. It trains no more."""
        if self._lock is not None:
            self._lock.release()
        self._ranks.close()

    def _batches(self, samples: Sequence[TrainingSample], num_steps: int) -> list[TrainingBatch]:
        """Deals the step's trajectories out to optimizer steps, in an order that depends on the seed alone."""
        trajectories = sorted({sample.trajectory for sample in samples})
        np.random.default_rng([self._seed, self.step]).shuffle(trajectories)
        parts = [set(trajectories[i::num_steps]) for i in range(num_steps)]
        return [
            pack(
                [sample for sample in samples if sample.trajectory in part],
                self.spec.trainer.max_tokens_per_row,
                self._ranks.world_size,
            )
            for part in parts
            if part
        ]

    def _advance_without_learning(
        self, work: StepSamples, config: TrainConfig, started: float, request_id: str | None
    ) -> dict[str, float]:
        """Commits the current checkpoint again as the next step, and says why."""
        reasons = {str(outcome): count for outcome, count in work.outcomes.items() if count}
        logger.warning(
            "step %d: nothing to learn from %d groups; %s%s. The step advances with unchanged weights.",
            self.step,
            work.num_groups_submitted,
            ", ".join(f"{count} {name}" for name, count in reasons.items()) or "no rollouts",
            "".join(f"; {reason} ({count}x)" for reason, count in work.reasons.items()),
        )
        metrics = _metrics(work, [], [], config) | {"seconds": time.monotonic() - started}
        manifest = self._ranks.on_first(
            lambda: checkpoint.copy_as_step(
                self.spec.checkpoints_dir,
                self.step,
                self.step + 1,
                metrics=metrics,
                config=self._described(config),
                request_id=request_id,
            )
        )
        self.step += 1
        return _metrics_for(manifest, request_id)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _committed(self, step: int, request_id: str | None) -> dict[str, float]:
        """The metrics of a step that was taken before."""
        if step > self.step:
            raise TrainingError(
                f"asked to train from step {step}, but the newest checkpoint in {self.spec.checkpoints_dir} is step "
                f"{self.step}: train the steps between, or restore their checkpoints"
            )
        manifest = self._ranks.on_first(lambda: checkpoint.read_manifest(self.spec.checkpoints_dir, step + 1))
        return _metrics_for(manifest, request_id)

    def _commit(
        self, step: int, metrics: dict[str, float], config: TrainConfig | None, request_id: str | None
    ) -> dict[str, float]:
        """Writes what is in memory as the checkpoint of `step`; returns the metrics in its manifest."""

        def write(directory: Path) -> None:
            self._policy.save_adapter(directory)
            save_file(self._optimizer.state(), directory / _OPTIMIZER)
            state = {
                "seed": self._seed,
                "num_optimizer_steps": self._optimizer.num_steps,
                "num_non_finite_in_a_row": self._optimizer.num_non_finite_in_a_row,
            }
            (directory / _STATE).write_text(json.dumps(state))

        manifest = self._ranks.on_first(
            lambda: checkpoint.commit(
                self.spec.checkpoints_dir,
                step,
                write,
                base_model=self.spec.base_model,
                metrics=metrics,
                config=self._described(config),
                request_id=request_id,
            )
        )
        return _metrics_for(manifest, request_id)

    def _take_lock(self) -> None:
        self._lock = WriterLock(self.spec.checkpoints_dir)

    def _resume(self) -> None:
        """Brings memory to the newest complete checkpoint; commits step 0 where there is none."""
        found = self._ranks.on_first(self._read_newest)
        if found is None:
            self._commit(0, {}, None, None)
            return
        self._policy.load_adapter(found.adapter)
        self._optimizer.load(found.optimizer, found.num_optimizer_steps, found.num_non_finite_in_a_row)
        self._seed, self.step, self._is_torn = found.seed, found.step, False

    def _read_newest(self) -> _Saved | None:
        directory = self.spec.checkpoints_dir
        checkpoint.sweep(directory)
        step = checkpoint.newest_step(directory)
        if step is None:
            return None
        manifest = checkpoint.verify(directory, step)
        if manifest.base_model != self.spec.base_model:
            logger.warning(
                "checkpoint %d was trained on %s; going on with %s", step, manifest.base_model, self.spec.base_model
            )
        path = checkpoint.step_dir(directory, step)
        settings = json.loads((path / "adapter_config.json").read_bytes())
        if (settings["r"], settings["lora_alpha"]) != (self.spec.lora.r, self.spec.lora.alpha):
            raise CheckpointError(
                f"{path} holds an adapter with r={settings['r']}, alpha={settings['lora_alpha']}; asked for are "
                f"r={self.spec.lora.r}, alpha={self.spec.lora.alpha}. Ask for the same, or train under another name"
            )
        return _Saved(
            step,
            load_file(path / ADAPTER_FILE),
            load_file(path / _OPTIMIZER),
            **json.loads((path / _STATE).read_bytes()),
        )

    def _described(self, config: TrainConfig | None) -> dict[str, Any]:
        return {
            "train": config.model_dump(mode="json") if config is not None else None,
            "lora": self.spec.lora.model_dump(mode="json"),
            "trainer": self.spec.trainer.model_dump(mode="json"),
            "world_size": self._ranks.world_size,
        }


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint restores; sent from the first rank to the others."""

    step: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    seed: int
    num_optimizer_steps: int
    num_non_finite_in_a_row: int


def _metrics_for(manifest: checkpoint.Manifest, request_id: str | None) -> dict[str, float]:
    """The metrics of a committed step, for the call that took it, or for one that gives no id."""
    if request_id not in (None, manifest.request_id):
        raise TrainingError(
            f"step {manifest.step} was taken by another call ({manifest.request_id or 'one without an id'}), so that "
            f"the groups of this one ({request_id}) were not trained: ask for the newest step and train from there"
        )
    return dict(manifest.metrics)


def _metrics(
    work: StepSamples, batches: Sequence[TrainingBatch], results: Sequence[StepResult], config: TrainConfig
) -> dict[str, float]:
    """The metrics of one train call; those of the loss only where there was an optimizer step."""
    metrics = {
        "learning_rate": results[-1].update.learning_rate if results else config.learning_rate,
        "num_groups_submitted": work.num_groups_submitted,
        "num_groups_trainable": work.num_groups_trainable,
        "num_trajectories_trained": work.num_trajectories,
        "num_tokens_trained": sum(batch.num_trained_tokens for batch in batches),
        "tokens_submitted": sum(batch.num_tokens_submitted for batch in batches),
        "tokens_unique": sum(batch.num_tokens_unique for batch in batches),
        "tokens_packed": sum(batch.num_tokens_packed for batch in batches),
        "num_rows": sum(len(batch.rows) for batch in batches),
        "reward_spread": work.reward_spread,
        **{f"outcome_{outcome}": count for outcome, count in work.outcomes.items()},
    }
    if results:
        log_ratios = torch.cat([result.log_ratios for result in results])
        metrics |= {
            "loss": _mean([result.loss for result in results]),
            "policy_loss": _mean([result.policy_loss for result in results]),
            "entropy": _mean([result.entropy for result in results]),
            "grad_norm": _mean([result.update.grad_norm for result in results]),
            "updates_skipped": sum(result.update.skipped for result in results),
            "clipped_share": sum(result.num_clipped for result in results) / len(log_ratios),
            **_ratio_metrics(log_ratios),
        }
        if results[0].kl_div is not None:
            metrics["kl_div"] = _mean([result.kl_div for result in results if result.kl_div is not None])
    return {name: float(value) for name, value in metrics.items()}


def _ratio_metrics(log_ratios: Tensor) -> dict[str, float]:
    """How far the trainer is from the sampler, over the tokens trained."""
    with np.errstate(all="ignore"):  # non-finite ratios are reported as such
        quantiles = np.quantile(np.exp(log_ratios.double().numpy()), [0.01, 0.5, 0.99, 1.0])
    return {
        # "k3" estimate of KL(sampler || trainer): the tokens come from the sampler.
        "sampler_kl": float((torch.expm1(log_ratios.double()) - log_ratios.double()).mean()),
        "logprob_difference_max": float(log_ratios.abs().max()),
        **{f"ratio_{name}": float(q) for name, q in zip(("p01", "p50", "p99", "max"), quantiles, strict=True)},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
