"""What cannot work is refused with what, where and what instead, before a weight is loaded."""

import pytest
import ray

import art_ray
from art_ray.errors import ConfigError, ResourcesError, UnknownBaseModelError, UnknownKeyError, UnsupportedLoraError
from tests.processes import wait_until
from tests.small_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("ray_instance")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


async def refused(tmp_path, *, base_model, backend=None, **options) -> Exception:
    model = art_ray.TrainableModel(
        name="m", project="p", base_model=str(base_model), base_path=str(tmp_path), report_metrics=[], **options
    )
    backend = backend or art_ray.RayBackend()
    with pytest.raises(art_ray.ArtRayError) as caught:
        await model.register(backend)
    await backend.close()
    assert ray.is_initialized(), "a backend ends only what it started"
    assert not list(tmp_path.rglob("checkpoints/*")), "nothing was started"
    wait_until(_none_left, 20, "the backend's actors to be gone")
    return caught.value


def _none_left() -> bool:
    for name in ("trainer:p/m", "vllm:p/m:0", "model:p/m"):
        try:
            ray.get_actor(name)
        except ValueError:
            continue
        return False
    return True


async def test_a_base_model_that_is_no_folder(tmp_path):
    error = await refused(tmp_path, base_model=tmp_path / "nowhere")
    assert isinstance(error, UnknownBaseModelError)
    assert "nowhere" in str(error)
    assert "hub id" in str(error)


async def test_a_base_model_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model").mkdir()
    error = await refused(tmp_path, base_model=tmp_path / "model")
    assert isinstance(error, UnknownBaseModelError)
    assert "config.json" in str(error)


@pytest.mark.parametrize(
    ("peft_args", "says"),
    [
        ({"target_modules": ["lm_head"]}, "ignores"),
        ({"modules_to_save": ["embed_tokens"]}, "ignored"),
        ({"target_modules": ["q_prj"]}, "nearest: 'q_proj'"),
    ],
)
async def test_a_lora_target_that_is_absent_or_that_the_engine_ignores(tmp_path, tiny, peft_args, says):
    error = await refused(tmp_path, base_model=tiny, _internal_config={"peft_args": peft_args})
    assert isinstance(error, UnsupportedLoraError)
    assert says in str(error)


async def test_an_option_that_does_not_exist(tmp_path, tiny):
    error = await refused(tmp_path, base_model=tiny, _internal_config={"peft_args": {"rank": 8}})
    assert isinstance(error, UnknownKeyError)
    error = await refused(tmp_path, base_model=tiny, _internal_config={"engine_args": {"api_key": "x"}})
    assert isinstance(error, ConfigError)
    assert "the front checks the key" in str(error)


async def test_too_few_resources(tmp_path, tiny):
    backend = art_ray.RayBackend(serving=art_ray.ServingConfig(tensor_parallel=8))
    error = await refused(tmp_path, base_model=tiny, backend=backend)
    assert isinstance(error, ResourcesError)
    assert "CPU: asked 9, present 2, missing 7" in str(error)


async def test_a_gpu_that_is_not_there_cannot_be_shared(tmp_path, tiny):
    backend = art_ray.RayBackend(serving=art_ray.ServingConfig(sleeps=True))
    error = await refused(tmp_path, base_model=tiny, backend=backend)
    assert isinstance(error, ConfigError)
    assert "needs a GPU to share; the cluster has none" in str(error)
