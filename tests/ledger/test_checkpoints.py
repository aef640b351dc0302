import logging

import pytest

from art_ray.errors import UnknownMetricError
from tests.ledger.made import ledger_at


@pytest.fixture
def ledger(tmp_path):
    return ledger_at(tmp_path)


def test_the_latest_and_the_best_stay(ledger):
    for step, reward in [(1, 0.2), (2, 0.9), (3, 0.4)]:
        ledger.log(None, split="val", step=step, metrics={"reward": reward})
    assert ledger.steps_to_keep("val/reward", 3) == [2, 3]
    assert ledger.steps_to_keep("val/reward", 2) == [2]
    assert ledger.best_step("val/reward") == 2


def test_without_any_evaluation_the_latest_alone_stays_and_a_line_says_so(ledger, caplog):
    with caplog.at_level(logging.WARNING):
        assert ledger.steps_to_keep("val/reward", 4) == [4]
        ledger.log(None, split="train", step=4, metrics={"loss": 1.0})
        assert ledger.steps_to_keep("val/reward", 4) == [4]
    assert "only the latest checkpoint (4) is kept" in caplog.text


def test_a_metric_asked_for_by_name_that_is_not_there_deletes_nothing(ledger):
    ledger.log(None, split="val", step=1, metrics={"accuracy": 0.5})
    with pytest.raises(UnknownMetricError, match=r"nearest: 'val/accuracy'.*No checkpoint was deleted"):
        ledger.steps_to_keep("val/acuracy", 1)
    with pytest.raises(ValueError, match="val/accuracy"):
        ledger.steps_to_keep("val/acc", 1)


def test_a_metric_that_was_only_ever_null_leaves_the_latest(ledger):
    ledger.log(None, split="val", step=1, metrics={"accuracy": float("nan")})
    assert ledger.steps_to_keep("val/accuracy", 1) == [1]
