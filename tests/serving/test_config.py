from __future__ import annotations

import pytest

from art_ray.errors import ConfigError, UnknownKeyError
from art_ray.serving.config import REFUSED_ENGINE_ARGS, ServingConfig


def test_auto_merges_on_cpu_and_keeps_adapters_elsewhere():
    assert ServingConfig().weights_on("cpu") == "merged"
    assert ServingConfig().weights_on("cuda") == "adapter"
    assert ServingConfig(weights="adapter").weights_on("cpu") == "adapter"


@pytest.mark.parametrize(
    "name", ["api_key", "--api-key", "generation-config", "no_enable_lora", "logprobs_mode", "port"]
)
def test_an_engine_argument_that_breaks_a_guarantee_is_refused_with_the_reason(name: str):
    key = name.lstrip("-").replace("-", "_").removeprefix("no_")
    with pytest.raises(ConfigError) as refused:
        ServingConfig(engine_args={name: 1})
    assert REFUSED_ENGINE_ARGS[key] in str(refused.value)


def test_other_engine_arguments_pass():
    assert ServingConfig(engine_args={"tool_call_parser": "hermes"}).engine_args == {"tool_call_parser": "hermes"}


def test_an_unknown_key_is_refused_with_the_nearest_one():
    with pytest.raises(UnknownKeyError, match="'replicas'"):
        ServingConfig(replica=2)


@pytest.mark.parametrize("values", [{"pin_ttl_s": 300.0}, {"load_timeout_s": 60.0}, {"pin_ttl_s": 5000}])
def test_a_lease_outlasts_no_load(values: dict[str, float]):
    with pytest.raises(ConfigError, match=r"pin_ttl_s: .*must be shorter than load_timeout_s"):
        ServingConfig(**values)
    assert ServingConfig(pin_ttl_s=5000, load_timeout_s=6000).pin_ttl_s == 5000


@pytest.mark.parametrize("cores", ["", "0-", "a", "0-1|", "1,,2"])
def test_cores_are_lists_of_numbers_and_ranges(cores: str):
    with pytest.raises(ConfigError, match="cpu_cores"):
        ServingConfig(cpu_cores=cores)


def test_cores_may_be_given_per_worker():
    assert ServingConfig(cpu_cores="0-1,4|2,3").cpu_cores == "0-1,4|2,3"
