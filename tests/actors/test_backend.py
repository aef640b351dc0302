"""What the backend itself decides: which step a call is, and which model is which. A stub trains in place of actors."""

import pytest
import ray

import art_ray
from art_ray.actors.placement import Placed
from art_ray.backend import Call
from art_ray.errors import ConfigError, ResourcesError
from art_ray.ray_backend import RayBackend, _key, _Running
from art_ray.serving.adapter import LoadedVersion
from art_ray.types import TrainConfig

pytestmark = pytest.mark.usefixtures("ray_instance")


class StubTrainerGroup:
    """Keeps the requests that a trainer would get."""

    def __init__(self) -> None:
        self.requests = []

    async def settled(self) -> int:
        return 0

    async def train(self, request, report):
        self.requests.append(request)
        return {"loss": 1.0}

    def adapter(self, step):
        return step

    def stop(self) -> None:
        pass


@ray.remote(num_cpus=0)
class StubFleet:
    """Takes whatever version it is given."""

    def publish(self, step, version, holder=None):
        return LoadedVersion(step, "a-hash", 0.0, canary_change=0.0)

    def stop(self):
        pass


@pytest.fixture
def trained(tmp_path):
    model = art_ray.TrainableModel(name="m", project="p", base_model="base", base_path=str(tmp_path))
    backend, trainer = RayBackend(), StubTrainerGroup()
    spec, serving = backend._options_of(model)
    resources = {"trainer:p/m:0": {"CPU": 1.0}, "vllm:p/m:0": {"CPU": 1.0}}
    fleet = Placed(StubFleet.remote(), "fleet:p/m")
    backend._models[_key(model)] = _Running(trainer, spec, serving, fleet=fleet, resources=resources)
    yield model, backend, trainer
    ray.kill(fleet.handle)


async def train(backend, model, groups, config=None, call=None):
    call = call or Call("train-1", 0)
    return [m async for m in backend._train_model(model, groups, config or TrainConfig(), {}, call=call)]


async def test_the_trainer_gets_the_step_and_the_name_of_the_call_with_the_options_of_this_attempt(trained):
    model, backend, trainer = trained
    groups = [ray.put("a"), ray.put("b")]
    for rate in (1.0, 0.5):
        await train(backend, model, groups, TrainConfig(learning_rate=rate), Call("train-abc", 7))
    assert {(r.step, r.request_id, r.groups, r.supervised) for r in trainer.requests} == {
        (7, "train-abc", tuple(groups), False)
    }
    assert [r.config.learning_rate for r in trainer.requests] == [1.0, 0.5]


async def test_a_second_model_for_which_there_is_no_room_is_refused_at_once(trained):
    _, backend, _ = trained
    second = art_ray.TrainableModel(name="second", project="p", base_model="base")
    with pytest.raises(ResourcesError, match="CPU: asked 4, present 2, missing 2"):
        await backend._prepare_backend_for_training(second)


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
