import asyncio
import copy
import inspect
import math
import pickle
import sys
import warnings

import numpy as np
import pydantic
import pytest
import torch
from openai.types.chat import ChatCompletionMessage

from art_ray.trajectories import (
    Choice,
    History,
    PendingTrajectoryGroup,
    RolloutFailure,
    Sampling,
    Trajectory,
    TrajectoryGroup,
    as_groups,
    mean_and_deviation,
)

PROMPT = {"role": "user", "content": "yes, no or maybe?"}
TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


def choice(content="maybe", *, tool_calls=None, reasoning=None, **extra) -> Choice:
    """An answer as a server returns it, with what the serving front adds."""
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "reasoning": reasoning}
    sampled = {
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [7, 8],
        "policy_version": 4,
        "temperature": 0.5,
        "logprobs": {
            "content": [{"token": t, "logprob": p, "top_logprobs": []} for t, p in [("may", -0.1), ("be", -2)]]
        },
    }
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message, **sampled, **extra})


def whole() -> Trajectory:
    """A trajectory with something in every field."""
    return Trajectory(
        [
            PROMPT,
            choice(),
            {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
            choice(tool_calls=[TOOL_CALL]),
        ],
        tools=[{"type": "function", "function": {"name": "look_up", "parameters": {}}}],
        additional_histories=[History(messages_and_choices=[PROMPT, choice("no")])],
        reward=0.5,
        metrics={"turns": 2, "won": True, "share": 0.25},
        metadata={"scenario": 7, "nested": {"a": [1, None]}},
        logs=["started"],
    )


def failure() -> Exception:
    try:
        raise ConnectionError("the server hung up")
    except ConnectionError as error:
        return error


class TestTrajectory:
    def test_an_answer_continues_the_conversation_as_a_message(self):
        assert Trajectory([PROMPT, choice("maybe")]).messages() == [PROMPT, {"role": "assistant", "content": "maybe"}]

    def test_tool_calls_and_reasoning_are_part_of_the_message(self):
        [message] = Trajectory([choice(None, tool_calls=[TOOL_CALL], reasoning="hm")]).messages()
        assert message == {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL], "reasoning": "hm"}

    def test_the_messages_can_be_changed_without_changing_the_trajectory(self):
        trajectory = Trajectory([PROMPT])
        trajectory.messages()[0]["content"] = "changed"
        assert trajectory.messages() == [PROMPT]

    def test_a_choice_stays_the_object_that_the_client_returned(self):
        answer = choice()
        assert Trajectory([PROMPT, answer]).messages_and_choices[1] is answer

    def test_a_message_object_of_the_client_becomes_a_message(self):
        message = ChatCompletionMessage(role="assistant", content="maybe")
        assert Trajectory([message]).messages() == [{"role": "assistant", "content": "maybe"}]

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"messages_and_choices": ["maybe"]}, "messages_and_choices.0"),
            ({"messages_and_choices": None}, "messages_and_choices"),
            ({"rewrd": 1.0}, "rewrd"),
            ({"reward": None}, "reward"),
            ({"reward": "high"}, "reward"),
            ({"reward": np.zeros(2)}, "reward"),
            ({"metrics": {"turns": "many"}}, "metrics.turns"),
            ({"metrics": {1: 2}}, "metrics.1"),
            ({"logs": "started"}, "logs"),
        ],
    )
    def test_a_field_that_is_wrong_is_named(self, values, named):
        with pytest.raises(pydantic.ValidationError) as caught:
            Trajectory(**{"messages_and_choices": [], **values})
        assert named in str(caught.value)

    def test_a_reward_of_the_wrong_type_is_refused_when_it_is_set_later(self):
        trajectory = Trajectory([])
        with pytest.raises(pydantic.ValidationError, match="reward"):
            trajectory.reward = None

    @pytest.mark.parametrize("number", [np.float32(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([0.5])])
    def test_numpy_and_torch_numbers_become_python_ones(self, number):
        trajectory = Trajectory([], reward=number, metrics={"share": number})
        assert (type(trajectory.reward), type(trajectory.metrics["share"])) == (float, float)
        trajectory.reward = number
        assert type(trajectory.reward) is float

    def test_metrics_keep_their_kind_of_number(self):
        metrics = Trajectory([], metrics={"won": True, "turns": 3, "np": np.int64(4), "flag": np.bool_(False)}).metrics
        assert [type(value) for value in metrics.values()] == [bool, int, int, bool]

    def test_only_a_finite_reward_is_a_score(self):
        scored = [Trajectory([], reward=reward).is_scored for reward in (0.0, -1, math.nan, math.inf)]
        assert scored == [True, True, False, False]

    def test_finish_sets_the_duration_in_seconds_and_returns_the_trajectory(self):
        trajectory = Trajectory([])
        assert trajectory.finish() is trajectory
        assert 0 <= trajectory.metrics["duration"] < 60

    async def test_track_duration_adds_up_even_when_the_block_raises(self):
        trajectory = Trajectory([])
        async with trajectory.track_duration("judge"):
            pass
        assert 0 < trajectory.metrics["judge_duration"] < 60
        trajectory.metrics["judge_duration"] = 100.0
        with pytest.raises(ConnectionError):
            async with trajectory.track_duration("judge"):
                raise failure()
        assert 100 < trajectory.metrics["judge_duration"] < 160

    def test_log_adds_a_line(self):
        trajectory = Trajectory([])
        trajectory.log("a")
        trajectory.log("b")
        assert trajectory.logs == ["a", "b"]

    def test_two_trajectories_share_no_lists(self):
        Trajectory([]).log("mine")
        assert Trajectory([]).logs == []

    def test_trajectories_are_equal_when_they_hold_the_same(self):
        assert whole() == whole()
        assert Trajectory([], reward=math.nan) == Trajectory([], reward=float("nan"))
        assert Trajectory([], reward=math.nan) != Trajectory([], reward=0.0)
        assert whole() != whole().model_copy(update={"logs": []})
        assert whole() != "a trajectory"


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda value: value.model_copy(deep=True),
    "dump": lambda value: type(value).model_validate(value.model_dump()),
    "json": lambda value: type(value).model_validate_json(value.model_dump_json()),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_group_and_its_trajectories_survive_every_kind_of_copy(copied):
    group = TrajectoryGroup(
        [whole(), Trajectory([], reward=math.nan), failure()], metadata={"id": 7}, metrics={"n": 2}, logs=["x"]
    )
    again = copied(group)
    assert again == group
    assert again is not group
    assert Sampling.of(again.trajectories[0].messages_and_choices[1]).token_ids == [7, 8]


class TestTrajectoryGroup:
    def test_it_holds_trajectories_and_iterates_over_them(self):
        trajectories = [Trajectory([], reward=1.0), Trajectory([], reward=2.0)]
        for group in [TrajectoryGroup(trajectories), TrajectoryGroup(trajectories=(t for t in trajectories))]:
            assert list(group) == trajectories
            assert len(group) == 2

    def test_exceptions_are_kept_wherever_they_are_given(self):
        group = TrajectoryGroup(
            [failure(), Trajectory([])], exceptions=[TimeoutError(), RolloutFailure.of(ValueError())]
        )
        assert [e.type for e in group.exceptions] == ["ConnectionError", "TimeoutError", "ValueError"]
        assert len(group) == 1

    def test_a_failure_is_remembered_with_type_message_and_traceback(self):
        [kept] = TrajectoryGroup([failure()]).exceptions
        assert (kept.type, kept.message) == ("ConnectionError", "the server hung up")
        assert "in failure" in kept.traceback

    def test_the_type_of_a_failure_says_where_it_comes_from(self):
        assert RolloutFailure.of(TimeoutError()).type == "TimeoutError"
        assert RolloutFailure.of(pydantic.errors.PydanticUserError("x", code=None)).type == (
            "pydantic.errors.PydanticUserError"
        )

    def test_an_exception_that_cannot_even_be_printed_is_kept(self):
        class BrokenError(Exception):
            def __str__(self):
                raise ZeroDivisionError

        assert "raised ZeroDivisionError" in RolloutFailure.of(BrokenError()).message

    @pytest.mark.parametrize("item", [None, "maybe", {"reward": 1.0}, ValueError, [Trajectory([])]])
    def test_an_item_of_another_type_is_a_type_error_that_says_which(self, item):
        with pytest.raises(TypeError, match=f"item 1 is {type(item).__name__}"):
            TrajectoryGroup([Trajectory([]), item])

    @pytest.mark.parametrize("items", [Trajectory([]), ValueError("x"), 3, None])
    def test_what_is_no_list_is_a_type_error_that_says_so(self, items):
        with pytest.raises(TypeError, match=f"takes a list of trajectories, got one {type(items).__name__}"):
            TrajectoryGroup(items)

    def test_other_arguments_are_checked(self):
        with pytest.raises(TypeError, match="exceptions= takes exceptions, got str"):
            TrajectoryGroup([], exceptions=["x"])
        with pytest.raises(TypeError, match="metdata"):
            TrajectoryGroup([], metdata={})
        with pytest.raises(pydantic.ValidationError, match="metrics"):
            TrajectoryGroup([], metrics={"difficulty": "high"})

    def test_an_empty_group_is_a_group(self):
        assert list(TrajectoryGroup([])) == []

    def test_two_groups_share_no_lists(self):
        TrajectoryGroup([]).log("mine")
        assert TrajectoryGroup([]).logs == []


class TestPendingTrajectoryGroup:
    async def test_a_group_of_coroutines_becomes_a_group_when_awaited(self):
        async def rollout(reward):
            return Trajectory([], reward=reward)

        async def fails():
            raise failure()

        pending = TrajectoryGroup([rollout(1.0), Trajectory([], reward=2.0), fails(), failure()], metadata={"id": 7})
        assert isinstance(pending, PendingTrajectoryGroup)
        group = await pending
        assert [t.reward for t in group] == [1.0, 2.0]
        assert len(group.exceptions) == 2
        assert group.metadata == {"id": 7}

    async def test_cancelling_it_cancels_its_rollouts(self):
        started, ended = asyncio.Event(), []

        async def rollout():
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def group():
            return await TrajectoryGroup([rollout(), rollout()])

        task = asyncio.get_running_loop().create_task(group())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True, True]

    async def test_a_cancelled_rollout_is_no_failed_one(self):
        async def rollout():
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await TrajectoryGroup([rollout()])

    @pytest.mark.parametrize("values", [{"metdata": {}}, {"metrics": {"a": "b"}}, {"exceptions": ["x"]}])
    def test_wrong_arguments_are_refused_before_anything_is_rolled_out(self, values):
        async def rollout():
            raise AssertionError("must not start")

        coroutine = rollout()
        with pytest.raises((TypeError, ValueError)):
            TrajectoryGroup([coroutine], **values)
        assert inspect.getcoroutinestate(coroutine) != inspect.CORO_RUNNING
        coroutine.close()

    async def test_a_rollout_that_returns_no_trajectory_is_a_type_error(self):
        async def forgot_to_return():
            return None

        with pytest.raises(TypeError, match="item 0 is NoneType"):
            await TrajectoryGroup([forgot_to_return()])


class TestSampling:
    def test_it_is_what_the_engine_said_about_the_answer(self):
        sampling = Sampling.of(choice(sampling_restrictions={"top_p": 0.9}))
        assert sampling == Sampling(
            prompt_token_ids=[1, 2, 3],
            token_ids=[7, 8],
            logprobs=[-0.1, -2.0],
            policy_versions=[4, 4],
            temperature=0.5,
            restrictions={"top_p": 0.9},
        )

    def test_each_token_may_have_a_version_of_its_own(self):
        assert Sampling.of(choice(policy_versions=[4, 5])).policy_versions == [4, 5]

    @pytest.mark.parametrize(
        "changed",
        [
            {"token_ids": None},
            {"prompt_token_ids": None},
            {"policy_version": None},
            {"logprobs": None},
            {"token_ids": [7]},
            {"policy_versions": [4]},
        ],
    )
    def test_without_all_of_it_or_when_the_parts_disagree_there_is_none(self, changed):
        assert Sampling.of(choice(**changed)) is None

    @pytest.mark.parametrize(
        "changed",
        [
            {"temperature": -0.5},
            {"temperature": math.nan},
            {"temperature": math.inf},
            {"temperature": "warm"},
            {"temperature": True},
            {"temperature": [1.0]},
            {"token_ids": ["a", "b"]},
            {"token_ids": [7.5, 8.0]},
            {"token_ids": [7, -1]},
            {"token_ids": [7, 2**31]},
            {"token_ids": 3},
            {"prompt_token_ids": "abc"},
            {"prompt_token_ids": [None]},
            {"policy_version": "two"},
            {"policy_version": -1},
            {"policy_version": "two", "policy_versions": [1, 1]},
            {"policy_versions": ["a", "b"]},
            {"policy_versions": 3},
            {"sampling_restrictions": "top_p"},
            {"logprobs": {"content": [{"token": t, "logprob": math.nan, "top_logprobs": []} for t in "ab"]}},
            {"logprobs": {"content": [{"token": t, "logprob": -math.inf, "top_logprobs": []} for t in "ab"]}},
        ],
        ids=repr,
    )
    def test_what_no_engine_of_ours_says_is_none_and_no_error(self, changed):
        assert Sampling.of(choice(**changed)) is None

    def test_log_probabilities_that_the_client_did_not_check_are_none_if_they_are_no_numbers(self):
        for odd in ("-0.5", None, {}):
            answer = choice()
            answer.logprobs.content[0].logprob = odd
            assert Sampling.of(answer) is None
        answer.logprobs = {"content": []}
        assert Sampling.of(answer) is None

    def test_a_temperature_of_null_is_the_default_one(self):
        assert Sampling.of(choice(temperature=None)).temperature == 1.0
        assert Sampling.of(choice(temperature=0)).temperature == 0.0


class TestMeanAndDeviation:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ([], (0, 0)),
            ([3.0], (3, 0)),
            ([0, 0], (0, 0)),
            ([1, 2, 3, 4], (2.5, math.sqrt(1.25))),
            ([1e9, 1e9 + 1], (1e9 + 0.5, 0.5)),
            ([1e200, -1e200], (0, 1e200)),
            ([sys.float_info.max, -sys.float_info.max], (0, sys.float_info.max)),
            ([sys.float_info.max] * 3, (sys.float_info.max, 0)),
            ([5e-324 * 4, 0], (5e-324 * 2, 5e-324 * 2)),
        ],
    )
    def test_it_is_exact_however_large_small_or_close_the_values_are(self, values, expected):
        assert mean_and_deviation(values) == pytest.approx(expected, rel=1e-15, abs=0)


class TestAsGroups:
    group, one, two = TrajectoryGroup([]), Trajectory([], reward=1.0), Trajectory([], reward=2.0)

    def test_groups_stay_as_they_are_and_an_iterable_is_consumed_once(self):
        groups = [self.group, TrajectoryGroup([self.one])]
        found = as_groups(group for group in groups)
        assert all(a is b for a, b in zip(found, groups, strict=True))

    def test_trajectories_and_exceptions_become_one_group(self):
        [found] = as_groups([self.one, failure(), self.two])
        assert (list(found), len(found.exceptions)) == ([self.one, self.two], 1)

    def test_a_single_group_or_trajectory_needs_no_list(self):
        assert as_groups(self.group) == [self.group]
        assert as_groups(self.one) == [TrajectoryGroup([self.one])]

    def test_nothing_is_no_group(self):
        assert as_groups([]) == []

    def test_a_mixture_is_a_type_error(self):
        with pytest.raises(TypeError, match="a mixture of 1 groups and 2 trajectories"):
            as_groups([self.one, self.group, self.two])

    @pytest.mark.parametrize(
        ("items", "said"),
        [(None, "got NoneType"), ("maybe", "item 0 is str"), ([[]], "item 0 is list"), (3, "got int")],
    )
    def test_anything_else_is_a_type_error_that_names_it(self, items, said):
        with pytest.raises(TypeError, match=said):
            as_groups(items)

    def test_what_is_still_awaited_is_a_type_error_that_says_how_to_go_on(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the coroutine below is never awaited
            with pytest.raises(TypeError, match="gather_trajectory_groups"):
                as_groups(TrajectoryGroup([asyncio.sleep(0)]))

    def test_references_stand_for_groups(self):
        assert as_groups("ab", is_reference=lambda item: item in ("a", "b")) == ["a", "b"]
