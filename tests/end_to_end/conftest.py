"""One run that many tests look at: a real policy, trained for two steps, still served."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import art_ray
from art_ray.serving.config import ServingConfig
from art_ray.training.config import TrainerConfig

QUESTIONS = ["Answer with yes, no or maybe.", "Say one word: no, maybe or yes."]


def make_model(base_path: Path, base_model: Path) -> art_ray.TrainableModel:
    return art_ray.TrainableModel(
        name="policy",
        project="first-run",
        base_model=str(base_model),
        base_path=str(base_path),
        report_metrics=["wandb"],
    )


def make_backend() -> art_ray.RayBackend:
    return art_ray.RayBackend(
        trainer=TrainerConfig(dtype="float32"), serving=ServingConfig(dtype="float32", max_model_len=512)
    )


async def rollout(model: art_ray.TrainableModel, question: str, index: int = 0) -> art_ray.Trajectory:
    """One answer; its reward is the length of its text, which differs within any group of sampled answers."""
    trajectory = art_ray.Trajectory([{"role": "user", "content": question}])
    response = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=8
    )
    trajectory.messages_and_choices.append(response.choices[0])
    trajectory.reward = float(len(response.choices[0].message.content or ""))
    return trajectory.finish()


async def gather(model: art_ray.TrainableModel) -> list[art_ray.TrajectoryGroup]:
    groups = await art_ray.gather_trajectory_groups(
        (art_ray.TrajectoryGroup(rollout(model, question) for _ in range(4)) for question in QUESTIONS), pbar_desc=None
    )
    assert any(statistics.pstdev([t.reward for t in group]) > 0 for group in groups)
    return groups


@dataclass
class Run:
    """What two steps left behind."""

    model: art_ray.TrainableModel
    backend: art_ray.RayBackend
    groups: list[list[art_ray.TrajectoryGroup]] = field(default_factory=list)
    """By step."""
    results: list[art_ray.TrainResult] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.model.base_path) / "first-run" / "models" / "policy"


@pytest.fixture(scope="session")
async def run(ray_instance, small_model, tmp_path_factory):
    """Two steps of the loop in the README, evaluated before the first; the policy is served until the session ends."""
    model = make_model(tmp_path_factory.mktemp("art"), small_model)
    backend = make_backend()
    await model.register(backend)
    run = Run(model, backend)
    await model.log(await gather(model), split="val")
    for _ in range(2):
        groups = await gather(model)
        run.groups.append(groups)
        run.results.append(await model.train(groups, art_ray.TrainConfig(learning_rate=1e-3)))
    yield run
    await backend.close()
