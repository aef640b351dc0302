import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from art_ray import gather_trajectories, gather_trajectory_groups
from art_ray.errors import ConfigError, TooManyExceptionsError
from art_ray.trajectories import Trajectory, TrajectoryGroup


@pytest.fixture(autouse=True)
def no_complaints(caplog, recwarn):
    """Fails a test after which an exception was looked at by nobody, or a coroutine was left unstarted."""
    yield
    gc.collect(1)  # what one test makes is young
    assert "never retrieved" not in caplog.text
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


PROMPT = {"role": "user", "content": "yes, no or maybe?"}


async def rollout(reward: float, **metrics) -> Trajectory:
    await asyncio.sleep(0)
    return Trajectory([PROMPT], reward=reward, metrics=metrics)


async def failing(message: str = "no answer") -> Trajectory:
    await asyncio.sleep(0)
    raise ConnectionError(message)


class Blocked:
    """Rollouts that never end by themselves, and that need a while of the event loop to end when cancelled."""

    def __init__(self):
        self.num_running = 0
        self.num_cleaned_up = 0
        self.all_started = asyncio.Event()

    async def rollout(self, expected: int = 1) -> Trajectory:
        self.num_running += 1
        if self.num_running == expected:
            self.all_started.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("nothing sets this event")
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.num_running -= 1
            self.num_cleaned_up += 1


def begun(coroutine) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coroutine)


def rewards_of(groups):
    return [[trajectory.reward for trajectory in group] for group in groups]


async def test_groups_and_their_trajectories_keep_their_order_whoever_finishes_first():
    second_is_done = asyncio.Event()

    async def waits_for_the_second():
        await second_is_done.wait()
        return await rollout(1.0)

    async def frees_the_first():
        second_is_done.set()
        return await rollout(2.0)

    groups = await gather_trajectory_groups(
        TrajectoryGroup(rollouts) for rollouts in ([waits_for_the_second(), rollout(0.5)], [frees_the_first()])
    )
    assert rewards_of(groups) == [[1.0, 0.5], [2.0]]


async def test_a_failed_rollout_costs_only_itself_and_is_remembered():
    [group] = await gather_trajectory_groups(
        [TrajectoryGroup([rollout(1.0), failing("the server hung up"), rollout(0.0)])], max_exceptions=1
    )
    assert [t.reward for t in group] == [1.0, 0.0]
    [failure] = group.exceptions
    assert (failure.type, failure.message) == ("ConnectionError", "the server hung up")
    assert "in failing" in failure.traceback


async def test_a_group_keeps_what_was_said_about_it():
    [group] = await gather_trajectory_groups(
        [TrajectoryGroup([rollout(1.0)], metadata={"id": 7}, metrics={"difficulty": 2}, logs=["first"])]
    )
    assert (group.metadata, group.metrics, group.logs) == ({"id": 7}, {"difficulty": 2}, ["first"])


async def test_by_default_the_first_failure_ends_the_gather_and_everything_that_runs():
    blocked = Blocked()
    with pytest.raises(TooManyExceptionsError, match=r"1 of 4 rollouts failed.*ConnectionError: no answer") as caught:
        await gather_trajectory_groups(
            [TrajectoryGroup([blocked.rollout(), blocked.rollout()]), TrajectoryGroup([failing(), blocked.rollout()])]
        )
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert (blocked.num_running, blocked.num_cleaned_up) == (0, 3)


async def test_failures_are_counted_over_all_groups_together():
    def groups():
        return [TrajectoryGroup([failing(), rollout(1.0)]) for _ in range(3)]

    assert len(await gather_trajectory_groups(groups(), max_exceptions=3)) == 3
    with pytest.raises(TooManyExceptionsError, match="3 of 6"):
        await gather_trajectory_groups(groups(), max_exceptions=2)


async def test_between_0_and_1_a_share_of_all_rollouts_may_fail():
    def groups():
        return [TrajectoryGroup([failing(), rollout(1.0)]) for _ in range(3)]

    assert len(await gather_trajectory_groups(groups(), max_exceptions=0.5)) == 3
    with pytest.raises(TooManyExceptionsError, match="3 of 6"):
        await gather_trajectory_groups(groups(), max_exceptions=0.49)


@pytest.mark.parametrize(
    ("share", "total", "allowed"), [(0.29, 100, 29), (0.58, 50, 29), (1 / 3, 3, 1), (0.07, 100, 7)]
)
async def test_exactly_the_share_may_fail_and_not_one_more(share, total, allowed):
    for num_failed in (allowed, allowed + 1):
        rollouts = [failing() for _ in range(num_failed)] + [rollout(1.0) for _ in range(total - num_failed)]
        gathered = gather_trajectory_groups([TrajectoryGroup(rollouts)], max_exceptions=share)
        if num_failed == allowed:
            assert len((await gathered)[0].exceptions) == allowed
        else:
            with pytest.raises(TooManyExceptionsError, match=f"{num_failed} of {total} rollouts failed"):
                await gathered


async def test_a_share_is_not_judged_before_the_size_of_every_group_is_known():
    failed_first = asyncio.Event()

    async def small_group_with_a_failure():
        group = await TrajectoryGroup([failing(), rollout(1.0)])
        failed_first.set()
        return group

    async def large_group():
        await failed_first.wait()
        return await TrajectoryGroup(rollout(1.0) for _ in range(8))

    groups = await gather_trajectory_groups([small_group_with_a_failure(), large_group()], max_exceptions=0.1)
    assert [len(group) for group in groups] == [1, 8]


@pytest.mark.parametrize("max_exceptions", [-1, -0.5, math.nan])
async def test_a_limit_that_can_mean_nothing_is_refused(max_exceptions):
    with pytest.raises(ConfigError, match="max_exceptions"):
        await gather_trajectory_groups([], max_exceptions=max_exceptions)


async def test_cancelling_the_gather_returns_only_when_every_rollout_has_ended():
    blocked = Blocked()
    gathering = begun(
        gather_trajectory_groups([TrajectoryGroup(blocked.rollout(4) for _ in range(2)) for _ in range(2)])
    )
    await blocked.all_started.wait()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert (blocked.num_running, blocked.num_cleaned_up) == (0, 4)


async def test_cancelling_again_during_the_clean_up_leaves_nothing_behind_either():
    blocked = Blocked()
    gathering = begun(gather_trajectory_groups([TrajectoryGroup(blocked.rollout(2) for _ in range(2))]))
    await blocked.all_started.wait()
    for _ in range(5):
        gathering.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert (blocked.num_running, blocked.num_cleaned_up) == (0, 2)


async def test_two_groups_that_fail_at_once_leave_nothing_behind():
    blocked = Blocked()
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([TrajectoryGroup([blocked.rollout(), failing()]) for _ in range(3)])
    assert (blocked.num_running, blocked.num_cleaned_up) == (0, 3)


async def test_a_failure_before_the_other_rollouts_have_started_is_no_different():
    async def fails_at_once():
        raise ConnectionError

    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([TrajectoryGroup([fails_at_once(), rollout(1.0)]) for _ in range(2)])
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectories([fails_at_once(), rollout(1.0)])


async def test_a_cancellation_inside_a_rollout_is_never_swallowed():
    async def cancelled():
        raise asyncio.CancelledError

    blocked = Blocked()
    with pytest.raises(asyncio.CancelledError):
        await gather_trajectory_groups([TrajectoryGroup([cancelled(), blocked.rollout()])], max_exceptions=10)
    assert blocked.num_running == 0


async def test_a_task_given_as_a_rollout_is_cancelled_too():
    blocked = Blocked()
    task = begun(blocked.rollout())
    await blocked.all_started.wait()
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([TrajectoryGroup([task, failing()])])
    assert task.cancelled()
    assert blocked.num_running == 0


def test_ctrl_c_lets_every_rollout_clean_up(tmp_path):
    script = textwrap.dedent(
        """
        import asyncio
        from art_ray import TrajectoryGroup, gather_trajectory_groups

        async def rollout(name):
            try:
                print("running", flush=True)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                print("cleaned up", name, flush=True)

        asyncio.run(gather_trajectory_groups([TrajectoryGroup([rollout("a"), rollout("b")])]))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    with process:
        assert [process.stdout.readline(), process.stdout.readline()] == ["running\n", "running\n"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["cleaned up a", "cleaned up b"]
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("result", [None, 3, {"reward": 1.0}])
async def test_a_rollout_that_returns_no_trajectory_is_a_mistake_that_ends_the_gather(result):
    async def forgot_to_return():
        return result

    blocked = Blocked()
    with pytest.raises(TypeError, match=f"a rollout returned {type(result).__name__}"):
        await gather_trajectory_groups([TrajectoryGroup([forgot_to_return(), blocked.rollout()])], max_exceptions=9)
    assert blocked.num_running == 0


async def test_what_is_no_group_is_refused_before_anything_starts():
    started = []

    async def starts():
        started.append(True)
        return await rollout(1.0)

    with pytest.raises(TypeError, match="item 1 is Trajectory"):
        await gather_trajectory_groups([TrajectoryGroup([starts()]), await rollout(1.0)])
    assert not started


async def test_an_awaitable_of_a_group_is_as_good_as_a_group():
    async def group():
        return TrajectoryGroup([await rollout(0.25), await rollout(0.75)])

    done = TrajectoryGroup([await rollout(1.0)])
    assert rewards_of(await gather_trajectory_groups([group(), done])) == [[0.25, 0.75], [1.0]]


async def test_an_awaitable_that_fails_becomes_a_group_of_its_exception():
    async def no_group():
        raise ConnectionError("no scenario")

    groups = await gather_trajectory_groups([no_group(), TrajectoryGroup([rollout(1.0)])], max_exceptions=1)
    assert rewards_of(groups) == [[], [1.0]]
    assert groups[0].exceptions[0].message == "no scenario"
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([no_group()])


async def test_an_awaitable_of_something_else_is_a_type_error():
    async def no_group():
        return [await rollout(1.0)]

    with pytest.raises(TypeError, match="list where a TrajectoryGroup was expected"):
        await gather_trajectory_groups([no_group()])


async def test_failures_inside_an_awaited_group_count():
    async def group():
        return await TrajectoryGroup([failing("inside"), rollout(1.0)])

    with pytest.raises(TooManyExceptionsError, match="inside"):
        await gather_trajectory_groups([group()])
    assert len(await gather_trajectory_groups([group()], max_exceptions=1)) == 1


async def test_failures_of_groups_that_were_finished_beforehand_do_not_count():
    finished = await TrajectoryGroup([failing(), rollout(1.0)])
    assert await gather_trajectory_groups([finished]) == [finished]


async def test_nothing_gathers_to_nothing():
    assert await gather_trajectory_groups([]) == []
    assert await gather_trajectories([]) == []


class TestAfterEach:
    async def test_it_may_change_a_group_in_place_or_replace_it(self):
        def halved(group):
            for trajectory in group:
                trajectory.reward /= 2
            return group

        async def reversed_(group):
            await asyncio.sleep(0)
            return TrajectoryGroup(reversed(group.trajectories))

        for after_each, expected in [(halved, [[0.5, 1.0], [1.5]]), (reversed_, [[2.0, 1.0], [3.0]])]:
            groups = [TrajectoryGroup([rollout(1.0), rollout(2.0)]), TrajectoryGroup([rollout(3.0)])]
            assert rewards_of(await gather_trajectory_groups(groups, after_each=after_each)) == expected

    async def test_it_may_split_a_group_or_drop_it(self):
        def split_or_drop(group):
            return [TrajectoryGroup([t]) for t in group] if len(group) > 1 else None

        groups = [TrajectoryGroup([rollout(1.0)]), TrajectoryGroup([rollout(2.0), rollout(3.0)])]
        assert rewards_of(await gather_trajectory_groups(groups, after_each=split_or_drop)) == [[2.0], [3.0]]

    async def test_it_runs_while_other_groups_are_still_rolled_out(self):
        first_is_judged = asyncio.Event()

        async def waits():
            await first_is_judged.wait()
            return await rollout(2.0)

        def judge(group):
            first_is_judged.set()
            return group

        groups = [TrajectoryGroup([waits()]), TrajectoryGroup([rollout(1.0)])]
        assert rewards_of(await gather_trajectory_groups(groups, after_each=judge)) == [[2.0], [1.0]]

    async def test_what_it_raises_ends_the_gather(self):
        def broken(group):
            raise KeyError("judge")

        blocked = Blocked()
        with pytest.raises(KeyError, match="judge"):
            await gather_trajectory_groups(
                [TrajectoryGroup([rollout(1.0)]), TrajectoryGroup([blocked.rollout()])], after_each=broken
            )
        assert blocked.num_running == 0

    async def test_anything_else_that_it_returns_is_a_type_error(self):
        with pytest.raises(TypeError, match="after_each returns"):
            await gather_trajectory_groups([TrajectoryGroup([rollout(1.0)])], after_each=lambda group: 0.5)


class TestProgressBar:
    async def test_it_shows_trajectories_mean_reward_exceptions_and_metrics(self, capsys):
        await gather_trajectory_groups(
            [TrajectoryGroup([rollout(1.0, turns=4, won=True), failing()]), TrajectoryGroup([rollout(0.5, turns=2)])],
            pbar_desc="step 3",
            max_exceptions=1,
        )
        last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
        for part in ["step 3:", " 3/3 ", "reward=0.75", "exceptions=1", "turns=3", "won=1"]:
            assert part in last

    async def test_it_shows_no_more_metrics_than_asked(self, capsys):
        await gather_trajectory_groups([TrajectoryGroup([rollout(1.0, a=1, b=2, c=3)])], max_metrics=2)
        last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
        assert "b=2" in last
        assert "c=3" not in last

    async def test_it_moves_with_each_trajectory_and_not_with_each_group(self, capsys):
        blocked = Blocked()
        gathering = begun(gather_trajectory_groups([TrajectoryGroup([rollout(1.0), blocked.rollout(1)])]))
        await blocked.all_started.wait()
        while not blocked.num_cleaned_up:  # the bar is drawn again when the gather ends
            gathering.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await gathering
        assert " 1/2 " in capsys.readouterr().err.rstrip().rpartition("\r")[2]

    async def test_a_reward_that_is_not_scored_enters_no_mean(self, capsys):
        await gather_trajectory_groups([TrajectoryGroup([rollout(1.0), rollout(math.nan)])])
        assert "reward=1," in capsys.readouterr().err

    async def test_a_group_of_unknown_size_corrects_the_total_when_it_is_known(self, capsys):
        async def group():
            return await TrajectoryGroup(rollout(1.0) for _ in range(5))

        await gather_trajectory_groups([group()])
        assert " 5/5 " in capsys.readouterr().err

    async def test_a_metric_that_is_no_number_does_not_harm_it(self):
        async def odd():
            trajectory = await rollout(1.0)
            trajectory.metrics["answer"] = "maybe"
            return trajectory

        [group] = await gather_trajectory_groups([TrajectoryGroup([odd()])])
        assert group.trajectories[0].metrics == {"answer": "maybe"}


class TestGatherTrajectories:
    async def test_results_keep_their_order_and_a_failure_stands_in_its_place(self):
        results = await gather_trajectories([rollout(1.0), failing("second"), rollout(3.0)], max_exceptions=1)
        assert [results[0].reward, results[2].reward] == [1.0, 3.0]
        assert isinstance(results[1], ConnectionError)

    async def test_several_trajectories_of_one_rollout_stay_together(self):
        async def two():
            return (trajectory for trajectory in [await rollout(1.0), await rollout(2.0)])

        [pair] = await gather_trajectories([two()])
        assert [t.reward for t in pair] == [1.0, 2.0]

    async def test_one_failure_too_many_ends_all(self):
        blocked = Blocked()
        with pytest.raises(TooManyExceptionsError) as caught:
            await gather_trajectories([blocked.rollout(), failing()])
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert blocked.num_running == 0

    async def test_what_is_no_trajectory_is_a_type_error(self):
        async def nothing():
            return None

        with pytest.raises(TypeError, match="a rollout returned NoneType"):
            await gather_trajectories([nothing()])
        with pytest.raises(TypeError, match="item 0 is Trajectory"):
            await gather_trajectories([await rollout(1.0)])
