import math
import pickle

import numpy as np
import pydantic
import pytest

from art_ray.errors import ConfigError, UnknownKeyError
from art_ray.types import Outcome, TrainConfig, TrainResult, nearest


def test_by_default_cispo_learns_at_5e_6_without_a_kl_term_in_one_optimizer_step():
    config = TrainConfig()
    assert (config.learning_rate, config.beta, config.loss) == (5e-6, 0.0, "cispo")
    assert (config.scale_rewards, config.optimizer_steps_per_train) == (True, 1)


@pytest.mark.parametrize(
    ("key", "hint"),
    [("learning_rat", "nearest: 'learning_rate'"), ("epsilon_hi", "nearest: 'epsilon_high'"), ("zzz", "Known keys")],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(key, hint):
    with pytest.raises(UnknownKeyError, match=f"TrainConfig has no key '{key}'.*{hint}"):
        TrainConfig(**{key: 1})


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": -1},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": "fast"},
        {"learning_rate": None},
        {"beta": -0.1},
        {"loss": "reinforce"},
        {"importance_sampling_level": "word"},
        {"optimizer_steps_per_train": 0},
        {"max_grad_norm": 0},
        {"truncated_importance_sampling": 0},
    ],
)
def test_a_value_that_cannot_work_is_an_error_that_names_key_and_value(values):
    [(key, value)] = values.items()
    with pytest.raises(ConfigError, match=f"TrainConfig: {key}: .*got {value!r}"):
        TrainConfig(**values)


def test_a_configuration_does_not_change_under_whoever_holds_it():
    config = TrainConfig()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.beta = 0.1


@pytest.mark.parametrize("copied", [TrainConfig.updated, lambda c, values: c.model_copy(update=values)])
def test_a_copy_with_other_values_is_validated_like_a_new_one(copied):
    config = TrainConfig(beta=0.1)
    changed = copied(config, {"learning_rate": 1e-4})
    assert (changed.learning_rate, changed.beta, config.learning_rate) == (1e-4, 0.1, 5e-6)
    with pytest.raises(UnknownKeyError, match="nearest: 'learning_rate'"):
        copied(config, {"learning_rat": 1e-4})
    with pytest.raises(ConfigError, match="learning_rate"):
        copied(config, {"learning_rate": -1})


def test_a_numpy_number_is_a_number():
    assert TrainConfig(learning_rate=np.float64(1e-4)).learning_rate == 1e-4
    assert type(TrainResult(step=np.int64(3), metrics={"loss": np.float32(0.5)}).metrics["loss"]) is float


def test_configurations_and_results_cross_a_process_boundary_unchanged():
    for value in [TrainConfig(beta=0.1, epsilon=0.2), TrainResult(step=3, metrics={"loss": 0.5})]:
        assert pickle.loads(pickle.dumps(value)) == value


def test_an_outcome_is_its_own_text():
    assert Outcome("failed") is Outcome.FAILED
    assert f"{Outcome.NO_SPREAD}" == "no_spread"
    assert len({outcome.value for outcome in Outcome}) == len(Outcome)


def test_only_a_word_that_is_alike_counts_as_near():
    assert nearest("bata", ["beta", "loss"]) == " (nearest: 'beta')"
    assert nearest("zzz", ["beta", "loss"]) == ""
