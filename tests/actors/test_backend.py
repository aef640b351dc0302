"""What the backend itself decides: which step a call is, and which model is which. A stub trains in place of actors."""

import pytest
import ray

import art_ray
from art_ray.errors import ConfigError
from art_ray.ray_backend import RayBackend, _key, _Running
from art_ray.types import TrainConfig

pytestmark = pytest.mark.usefixtures("ray_instance")


class StubTrainerGroup:
    """Counts the steps that a trainer would take, and finds a repeated one done, as the real one does."""

    def __init__(self) -> None:
        self.step = 0
        self.requests = []
        self.fail_to_publish = False

    async def ensure(self) -> int:
        return self.step

    async def train(self, request, report):
        self.requests.append(request)
        if request.step == self.step:
            self.step += 1
        return {"loss": float(len(self.requests))}

    def adapter(self, step):
        if self.fail_to_publish:
            raise ConnectionError("no replica took it")
        return step

    def stop(self) -> None:
        pass


@pytest.fixture
def trained(tmp_path):
    model = art_ray.TrainableModel(name="m", project="p", base_model="base", base_path=str(tmp_path))
    backend, trainer = RayBackend(), StubTrainerGroup()
    spec, serving = backend._options_of(model)
    backend._models[_key(model)] = _Running(trainer, spec, serving)
    return model, backend, trainer


async def train(backend, model, groups, config=None):
    return [m async for m in backend._train_model(model, groups, config or TrainConfig(), {})]


async def test_a_call_repeated_after_its_commit_is_the_same_step_with_the_options_of_the_repetition(trained):
    model, backend, trainer = trained
    groups = [ray.put("a"), ray.put("b")]
    trainer.fail_to_publish = True
    with pytest.raises(ConnectionError):
        await train(backend, model, groups, TrainConfig(learning_rate=1.0))
    trainer.fail_to_publish = False
    await train(backend, model, groups, TrainConfig(learning_rate=0.5))
    first, second = trainer.requests
    assert (first.step, first.request_id) == (second.step, second.request_id)
    assert (first.config.learning_rate, second.config.learning_rate) == (1.0, 0.5)
    assert await backend._get_step(model) == 1


async def test_other_groups_after_a_failed_call_are_the_next_step(trained):
    model, backend, trainer = trained
    trainer.fail_to_publish = True
    with pytest.raises(ConnectionError):
        await train(backend, model, [ray.put("a")])
    trainer.fail_to_publish = False
    await train(backend, model, [ray.put("b")])
    assert [request.step for request in trainer.requests] == [0, 1]
    assert len({request.request_id for request in trainer.requests}) == 2


async def test_models_are_told_apart_by_their_base_path_and_refused_with_other_options(trained, tmp_path):
    model, backend, _ = trained
    elsewhere = model.model_copy(deep=True)
    elsewhere.base_path = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="not registered"):
        await train(backend, elsewhere, [])
    other = model.model_copy(deep=True)
    other.base_model = "another"
    with pytest.raises(ConfigError, match="registered already"):
        await backend._prepare_backend_for_training(other)


async def test_closing_ends_everything_although_one_part_fails(trained, tmp_path):
    _, backend, trainer = trained
    ended = []

    class StubLedger:
        def __init__(self, name):
            self.name = name

        async def close(self, timeout_s):
            ended.append(self.name)
            raise TimeoutError(self.name)

    trainer.stop = lambda: ended.append("trainer")
    backend._ledgers = {("", "p", name): StubLedger(name) for name in "ab"}
    with pytest.raises(TimeoutError):
        await backend.close()
    assert sorted(ended) == ["a", "b", "trainer"]
