from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from art_ray.errors import ConfigError, ServingError
from art_ray.serving.adapter import AdapterVersion
from art_ray.serving.canary import Canary, check_canary, probe
from art_ray.serving.merge import BaseWeights
from tests.serving.adapters import adapter_of, write_adapter


def test_an_adapter_read_from_disk_pickles_and_checks(tmp_path: Path, tiny: Path):
    version = pickle.loads(pickle.dumps(AdapterVersion.from_directory(3, write_adapter(tiny, tmp_path / "a", seed=1))))
    version.check()
    assert version.step == 3
    assert version.config["r"] == 4
    assert "lora" not in repr(version)  # megabytes do not belong into a log


def test_a_byte_that_changed_on_the_way_is_noticed(tmp_path: Path, tiny: Path):
    version = AdapterVersion.from_directory(3, write_adapter(tiny, tmp_path / "a", seed=1))
    weights = bytearray(version.files["adapter_model.safetensors"])
    weights[-1] ^= 1
    altered = dataclasses.replace(version, files={**version.files, "adapter_model.safetensors": bytes(weights)})
    with pytest.raises(ServingError, match="altered on its way"):
        altered.check()


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ServingError, match=r"adapter_config\.json"):
        AdapterVersion.from_directory(0, tmp_path)


def test_merged_weights_are_base_plus_scaled_product(tmp_path: Path, tiny: Path):
    adapter = adapter_of(tiny, tmp_path, step=1, seed=1)
    base, merged = load_file(tiny / "model.safetensors"), dict(BaseWeights(tiny).merged(adapter))
    lora = load_file(tmp_path / "1" / "adapter_model.safetensors")
    key = "model.layers.1.mlp.down_proj"
    a, b = (lora[f"base_model.model.{key}.lora_{x}.weight"].double() for x in "AB")
    expected = base[f"{key}.weight"].double() + 8 / 4 * b @ a
    torch.testing.assert_close(merged[f"{key}.weight"].double(), expected, atol=1e-6, rtol=1e-6)
    untouched = "model.layers.0.input_layernorm.weight"
    assert torch.equal(merged[untouched], base[untouched])
    assert base.keys() - merged.keys() == {"model.embed_tokens.weight", "model.norm.weight"}, "no layer, not adapted"


def test_an_adapter_for_another_base_model_is_refused_by_name(tmp_path: Path, tiny: Path):
    adapter = adapter_of(tiny, tmp_path, step=1, seed=1)
    other = tmp_path / "other"
    other.mkdir()
    base = load_file(tiny / "model.safetensors")
    save_file({name: tensor[:8] for name, tensor in base.items()}, other / "model.safetensors")
    with pytest.raises(ServingError, match="made for another base model"):
        BaseWeights(other).check(adapter)
    save_file({"lm_head.weight": torch.zeros(2)}, other / "model.safetensors")
    with pytest.raises(ServingError, match=r"has no weight 'model\.layers"):
        BaseWeights(other).check_mergeable(adapter)


def test_merging_needs_safetensors(tmp_path: Path):
    with pytest.raises(ConfigError, match="weights='adapter'"):
        BaseWeights(tmp_path)


def canaries(tmp_path: Path, tiny: Path, logprobs: list[float], seed: int) -> Canary:
    return Canary(logprobs, probe(adapter_of(tiny, tmp_path, step=seed, seed=seed)))


def test_weights_that_moved_without_effect_on_the_answer_are_refused(tmp_path: Path, tiny: Path):
    base = Canary([-1.0, -2.0], {})
    first, second = canaries(tmp_path, tiny, [-1.0, -2.0], seed=1), canaries(tmp_path, tiny, [-1.5, -2.0], seed=2)
    with pytest.raises(ServingError, match="of the base model"):
        check_canary(1, first, base, None, "float32")
    with pytest.raises(ServingError, match="of the version before"):
        check_canary(3, Canary([-1.5, -2.0], first.effects), base, second, "float32")
    check_canary(2, second, base, first, "float32")


def test_an_untrained_adapter_answers_as_the_base_model_does(tmp_path: Path, tiny: Path):
    base, untrained = Canary([-1.0], {}), canaries(tmp_path, tiny, [-1.0], seed=0)
    assert untrained.weights_moved_from(base) == 0
    check_canary(0, untrained, base, None, "float32")


def test_a_change_below_the_engines_rounding_need_not_show(tmp_path: Path, tiny: Path):
    base, moved = Canary([-1.0], {}), canaries(tmp_path, tiny, [-1.0], seed=1)
    slight = Canary([-1.0], {name: effect * 1e-4 for name, effect in moved.effects.items()})
    check_canary(1, slight, base, None, "bfloat16")
    with pytest.raises(ServingError, match="does not apply"):
        check_canary(1, slight, base, None, "float32")


def test_answers_that_are_no_numbers_are_refused():
    with pytest.raises(ServingError, match="no finite numbers"):
        check_canary(1, Canary([float("nan")], {}), Canary([-1.0], {}), None, "float32")


def test_the_probe_is_scale_times_b_times_a_of_one_vector(tmp_path: Path, tiny: Path):
    effect = probe(adapter_of(tiny, tmp_path, step=1, seed=1))["base_model.model.model.layers.0.self_attn.q_proj"]
    assert effect.shape == (128,)
    assert np.abs(effect).max() > 0
