"""What the trainer's configuration refuses."""

import pytest

from art_ray.errors import ConfigError, UnsupportedLoraError
from art_ray.training.config import LoraSettings, RankSettings, TrainerConfig


@pytest.mark.parametrize("target", ["lm_head", "model.embed_tokens", "wte"])
def test_adapters_that_the_engine_would_ignore_are_refused_when_the_config_is_built(target):
    with pytest.raises(UnsupportedLoraError, match="ignores adapters"):
        LoraSettings(target_modules=["q_proj", target])


def test_modules_to_save_is_refused_when_the_config_is_built():
    with pytest.raises(UnsupportedLoraError, match="modules_to_save"):
        LoraSettings(modules_to_save=["norm"])


@pytest.mark.parametrize("values", [{"dtype": "float16"}, {"max_tokens_per_row": 1}, {"ranks": 0}])
def test_values_out_of_range_are_config_errors(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        TrainerConfig(**values)


def test_a_rank_outside_the_world_and_a_world_without_a_meeting_place_are_refused():
    with pytest.raises(ConfigError, match="ranks count from 0"):
        RankSettings(rank=2, world_size=2, init_method="file:///tmp/x")
    with pytest.raises(ConfigError, match="init_method"):
        RankSettings(rank=0, world_size=2)
