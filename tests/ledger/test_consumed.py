import pytest

from art_ray.errors import InvalidNameError
from art_ray.ledger.consumed import Consumed, ConsumedScenarios


@pytest.fixture
def consumed(tmp_path):
    return ConsumedScenarios(tmp_path, "easy")


def test_nothing_was_consumed_before_anything_is_noted_and_nothing_is_written(consumed, tmp_path):
    assert consumed.at(7) == Consumed()
    assert not list(tmp_path.iterdir())


def test_a_step_that_was_announced_counts_once_its_checkpoint_is_there(consumed, tmp_path):
    consumed.begin(1, [0, 1])
    consumed.begin(2, [3, 2])
    again = ConsumedScenarios(tmp_path, "easy")
    assert again.at(1) == Consumed(first_unread=2)
    assert again.at(2) == Consumed(first_unread=4)
    assert again.at(9) == Consumed(first_unread=4), "steps that another call took consume nothing"


def test_a_step_that_was_not_taken_and_announced_again_consumed_what_it_said_last(consumed):
    consumed.begin(1, [0, 1])
    consumed.begin(2, [3, 4])
    consumed.begin(2, [2, 3])
    assert consumed.at(2) == Consumed(first_unread=4)


def test_scenarios_that_were_overtaken_are_still_to_be_trained_with_how_often_they_were_dropped(consumed):
    consumed.begin(1, [0, 2])
    consumed.begin(2, [4, 5])
    consumed.drop(2, [1])
    assert consumed.at(2) == Consumed(first_unread=6, waiting={1: 1, 3: 0})
    consumed.drop(2, [6])
    assert consumed.at(2) == Consumed(first_unread=7, waiting={1: 1, 3: 0, 6: 1})
    consumed.begin(3, [1, 3])
    assert consumed.at(3) == Consumed(first_unread=7, waiting={6: 1})


def test_evaluations_that_ended_are_known(consumed):
    consumed.evaluated(0)
    consumed.evaluated(4)
    assert consumed.at(4).evaluated == {0, 4}


def test_other_scenarios_of_the_model_are_counted_apart(consumed, tmp_path):
    consumed.begin(1, [0, 1])
    assert ConsumedScenarios(tmp_path, "hard").at(1) == Consumed()


def test_a_line_that_a_crash_tore_is_passed_over(consumed, tmp_path):
    consumed.begin(1, [0, 1])
    with (tmp_path / "scenarios" / "easy.jsonl").open("a") as file:
        file.write('{"step": 2, "trai')
    assert consumed.at(2) == Consumed(first_unread=2)
    consumed.begin(2, [2])
    assert consumed.at(2) == Consumed(first_unread=3)


def test_a_name_that_is_no_path_part_is_refused(tmp_path):
    with pytest.raises(InvalidNameError, match="name"):
        ConsumedScenarios(tmp_path, "../easy")
