"""From conversations to token sequences."""

from __future__ import annotations

import math

import pytest

from art_ray.training.samples import Refusal, samples_of
from art_ray.trajectories import History, Trajectory
from art_ray.types import Outcome
from tests.training.made import choice

USER = {"role": "user", "content": "?"}


def sequences(trajectory: Trajectory, max_tokens: int = 1000) -> list[tuple[list[int], list[int]]]:
    """(tokens, positions that are trained) of each sequence."""
    found = samples_of(trajectory, max_tokens)
    assert not isinstance(found, Refusal), found
    return [(s.tokens.tolist(), s.trained.nonzero()[0].tolist()) for s in found]


def refusal(trajectory: Trajectory, max_tokens: int = 1000) -> Refusal:
    found = samples_of(trajectory, max_tokens)
    assert isinstance(found, Refusal)
    return found


def test_only_sampled_tokens_are_trained():
    assert sequences(Trajectory([USER, choice([1, 2, 3], [4, 5])])) == [([1, 2, 3, 4, 5], [3, 4])]


def test_turns_that_extend_each_other_join_and_what_the_template_adds_between_them_is_context():
    # 9 ends the answer; 8 is the newline that the template writes behind it, 6 7 the tool's result.
    turns = [USER, choice([1, 2], [3, 9]), {"role": "tool", "content": "x"}, choice([1, 2, 3, 9, 8, 6, 7], [4, 9])]
    assert sequences(Trajectory(turns)) == [([1, 2, 3, 9, 8, 6, 7, 4, 9], [2, 3, 7, 8])]


def test_a_turn_whose_template_dropped_earlier_reasoning_starts_a_new_sequence():
    turns = [USER, choice([1, 2], [50, 51, 3, 9]), USER, choice([1, 2, 3, 9, 8], [4, 9])]
    assert sequences(Trajectory(turns)) == [([1, 2, 50, 51, 3, 9], [2, 3, 4, 5]), ([1, 2, 3, 9, 8, 4, 9], [5, 6])]


def test_a_prompt_that_lacks_the_last_sampled_token_starts_a_new_sequence():
    turns = [USER, choice([1, 2], [3, 9]), USER, choice([1, 2, 3, 8], [4])]
    assert len(sequences(Trajectory(turns))) == 2


def test_a_summarised_history_starts_a_new_sequence_and_later_turns_extend_that_one():
    turns = [USER, choice([1, 2], [3]), choice([1, 7], [4]), choice([1, 7, 4, 8], [5])]
    assert sequences(Trajectory(turns)) == [([1, 2, 3], [2]), ([1, 7, 4, 8, 5], [2, 4])]


def test_additional_histories_are_sequences_of_their_own():
    trajectory = Trajectory(
        [USER, choice([1, 2], [3])], additional_histories=[History(messages_and_choices=[USER, choice([1, 2, 3], [6])])]
    )
    assert sequences(trajectory) == [([1, 2, 3], [2]), ([1, 2, 3, 6], [3])]


def test_ids_log_probabilities_temperatures_and_versions_stay_with_their_token():
    turns = [
        choice([1, 2], [3, 4], [-0.1, -0.2], temperature=0.5, version=7),
        choice([1, 2, 3, 4, 5], [6], [-0.3], temperature=2.0, policy_versions=[8]),
    ]
    (found,) = samples_of(Trajectory(turns), 100)  # type: ignore[misc]
    assert found.logprobs[[2, 3, 5]].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert math.isnan(found.logprobs[4])
    assert found.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 2.0]
    assert found.versions.tolist() == [-1, -1, 7, 7, -1, 8]


def test_an_assistant_message_without_ids_is_context():
    turns = [USER, {"role": "assistant", "content": "written by hand"}, USER, choice([1, 2, 3, 4], [5])]
    assert sequences(Trajectory(turns)) == [([1, 2, 3, 4, 5], [4])]


def test_an_empty_answer_adds_nothing():
    assert sequences(Trajectory([choice([1], []), choice([1, 2], [3])])) == [([1, 2, 3], [2])]


def test_an_empty_answer_to_another_prompt_does_not_end_the_sequence():
    turns = [choice([1, 2], [3]), choice([9], []), choice([1, 2, 3, 4], [5])]
    assert sequences(Trajectory(turns)) == [([1, 2, 3, 4, 5], [2, 4])]


def test_a_first_token_that_nothing_precedes_is_context():
    assert sequences(Trajectory([choice([], [5, 6])])) == [([5, 6], [1])]


@pytest.mark.parametrize("answer", [choice([1, 2], []), choice([], [5])])
def test_a_conversation_in_which_nothing_was_sampled_after_something_is_refused(answer):
    assert refusal(Trajectory([answer])).outcome is Outcome.NO_LOGPROBS


def test_a_choice_without_token_ids_refuses_the_trajectory_rather_than_train_the_rest():
    without = choice([1, 2, 3], [4])
    del without.__pydantic_extra__["token_ids"]  # type: ignore[attr-defined]
    assert refusal(Trajectory([choice([1], [2]), without])).outcome is Outcome.NO_LOGPROBS


def test_a_conversation_without_any_choice_is_refused():
    assert refusal(Trajectory([USER])).outcome is Outcome.NO_LOGPROBS


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"sampling_restrictions": {"top_p": 0.9}}])
def test_restricted_sampling_is_refused_with_what_restricted_it(more):
    found = refusal(Trajectory([choice([1], [2], **more)]))
    assert found.outcome is Outcome.RESTRICTED_SAMPLING
    assert "top_p=0.9" in found.reason or "temperature=0.0" in found.reason


def test_a_sequence_longer_than_a_row_is_refused_with_both_lengths():
    found = refusal(Trajectory([choice([1, 2, 3], [4, 5])]), max_tokens=4)
    assert found.outcome is Outcome.TOO_LONG
    assert "5 tokens" in found.reason
    assert "is 4" in found.reason


def test_answers_without_ids_are_trained_with_unknown_log_probabilities_where_the_template_is_given():
    def render(messages, tools):
        return list(range(len(messages))), [100 + len(messages)]

    turns = [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}]
    found = samples_of(Trajectory(turns), 100, render)
    assert [s.tokens.tolist() for s in found] == [[0, 1, 102], [0, 1, 2, 3, 104]]  # type: ignore[union-attr]
    assert all(math.isnan(s.logprobs[s.trained][0]) for s in found)  # type: ignore[union-attr]
