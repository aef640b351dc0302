"""The loop that drives sampling and training, with stubs of the workers and of the backend: every order of events."""

import asyncio
import contextlib
import gc
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import polars
import pytest

import art_ray
from art_ray.errors import ConfigError, TooManyExceptionsError, TrainingError
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.run_pipeline import _Options, _Pipeline
from art_ray.types import TrainConfig
from tests.stub_backend import StubBackend, at_once


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


@dataclass
class StubGroup:
    ref: art_ray.TrajectoryGroup
    versions: tuple[int, int] | None
    num_trajectories: int = 2
    num_exceptions: int = 0


@dataclass
class StubPool:
    """Samples groups in this process. A scenario in `slow` ends when the test lets it, every other one at once."""

    backend: StubBackend
    events: list[Any] = field(default_factory=list)
    slow: dict[Any, asyncio.Event] = field(default_factory=dict)
    broken: Any = None
    """The scenario that kills the pool."""
    num_exceptions: int = 0
    keys: list[str] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    lag: int = 0
    """How many versions the server is behind what was published."""
    is_open: bool = False
    times_opened: int = 0

    async def __aenter__(self):
        self.is_open = True
        self.times_opened += 1
        return self

    async def __aexit__(self, *_):
        assert not self.running, "groups outlive the pool"
        self.is_open = False

    async def group(self, scenario, key, step=None):
        assert self.is_open
        version = self.backend.step - self.lag
        self.events.append(("sample", scenario))
        self.keys.append(key)
        self.running.append(scenario)
        try:
            await asyncio.sleep(0)
            if scenario == self.broken:
                raise art_ray.errors.ActorDiedError("the last worker died")
            if scenario in self.slow:
                await self.slow[scenario].wait()
        finally:
            self.running.remove(scenario)
        messages = [{"role": "user", "content": str(scenario)}]
        group = art_ray.TrajectoryGroup(
            [art_ray.Trajectory(messages, reward=reward) for reward in (0.0, 1.0)], metadata={"scenario": scenario}
        )
        return StubGroup(group, (version, version), num_exceptions=self.num_exceptions)


@dataclass
class House:
    """A registered model with its stubs, and what happened to them."""

    model: art_ray.TrainableModel
    backend: StubBackend
    pool: StubPool

    def run(self, scenarios, **options):
        values = {
            "groups_per_step": 2,
            "max_steps_off_policy": 1,
            "num_steps": None,
            "config": TrainConfig(),
            "when_stale": "drop",
            "evaluate_every": None,
            "evaluate": None,
            "max_exceptions": 0,
            "name": "scenarios",
            **options,
        }
        checked = _Options(**values)
        checked.check()
        return _Pipeline(self.model, self.pool, scenarios, checked).steps()

    async def results(self, scenarios, **options):
        return [result async for result in self.run(scenarios, **options)]

    @property
    def trained(self):
        """The scenarios of each step."""
        return [[group.metadata.get("scenario") for group in groups] for groups, _ in self.backend.seen]

    def lines(self):
        path = self.folder / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def column(self, metric):
        return [(line["step"], line[metric]) for line in self.lines() if metric in line]

    @property
    def folder(self):
        return self.model._history().path.parent


@pytest.fixture
async def make_house(tmp_path):
    async def make(name="m", backend=None):
        model = art_ray.TrainableModel(
            name=name, project="p", base_model="base", base_path=str(tmp_path), report_metrics=[]
        )
        backend = backend or StubBackend()
        await model.register(backend)
        house = House(model, backend, StubPool(backend))
        houses.append(house)

        async def training(step):
            house.pool.events.append(("train", step))

        backend.training = training
        return house

    houses = []
    yield make
    for house in houses:
        await house.model.close()


@pytest.fixture
async def house(make_house):
    return await make_house()


# ── without overlap, and with it ─────────────────────────────────────────────────────────────────────────────────────


async def test_with_zero_steps_off_policy_it_is_the_plain_loop_call_for_call(make_house):
    config = TrainConfig(learning_rate=1e-3)
    piped, plain = await make_house("piped"), await make_house("plain")
    results = []
    async for result in piped.run(list("abcdef"), max_steps_off_policy=0, config=config):
        for _ in range(5):
            await asyncio.sleep(0)  # nothing is sampled meanwhile
        piped.pool.events.append(("body", result.step))
        results.append((result.step, result.metrics))

    expected = []
    async with plain.pool as pool:
        for step in range(3):
            batch = "abcdef"[2 * step : 2 * step + 2]
            groups = await asyncio.gather(*(pool.group(s, key=s) for s in batch))
            result = await plain.model.train([group.ref for group in groups], config)
            plain.pool.events.append(("body", result.step))
            expected.append((result.step, result.metrics))

    assert results == expected
    assert piped.pool.events == plain.pool.events
    assert piped.backend.seen == plain.backend.seen

    def without_time(house, names):
        return [{k: v for k, v in line.items() if k != "recorded_at"} for line in house.lines() if names & line.keys()]

    of_train = {"train/reward", "train/loss"}
    assert without_time(piped, of_train) == without_time(plain, of_train)
    assert [value for _, value in piped.column("train/staleness_max")] == [0, 0, 0]


async def test_the_next_step_is_sampled_while_one_is_trained(house):
    async def training(step):
        wanted = [("sample", s) for s in ("ab", "abcd", "abcdef")[min(step + 1, 2)]]
        await until(lambda: [e for e in house.pool.events if e in wanted] == wanted)

    house.backend.training = training
    results = await house.results("abcdef")
    assert [result.step for result in results] == [1, 2, 3]
    assert house.trained == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(result.staleness_mean <= 1 for result in results)


async def test_with_one_step_off_policy_sampling_goes_on_in_the_callers_block(house):
    async for result in house.run("abcdef"):
        wanted = 2 * min(result.step + 2, 3)
        await until(lambda wanted=wanted: len(house.pool.events) - house.backend.step >= wanted)
        assert house.backend.step == result.step, "but no step begins there"


async def test_each_step_says_how_it_went_and_logs_it_beside_the_metrics_of_training(house):
    first, second = await house.results("abcd")
    assert (first.metrics["loss"], first.num_groups_stale, first.staleness_mean) == (2.0, 0, 0.0)
    assert second.staleness_mean == 1.0
    for metric in ("staleness_mean", "seconds_sampling", "seconds_waiting", "seconds_training"):
        assert house.column(f"train/{metric}") == [(1, getattr(first, metric)), (2, getattr(second, metric))]
    assert house.column("train/groups_dropped_stale") == [(1, 0), (2, 0)]


# ── too late ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def late(house, slow, **options):
    """Runs until step 6 with a scenario that ends only once three steps were taken without it."""
    house.pool.slow[slow] = asyncio.Event()

    async def training(step):
        if step == 3:
            house.pool.slow[slow].set()
            await until(lambda: slow not in house.pool.running)

    house.backend.training = training
    return await house.results("abcdefghijkl", num_steps=6, **options)


async def test_a_group_that_is_too_old_is_logged_with_its_outcome_and_its_scenario_trained_later(house):
    results = await late(house, "b")
    assert sum(result.num_groups_stale for result in results) == 1
    assert sorted(itertools.chain(*house.trained)) == list("abcdefghijkl")
    assert max(value for _, value in house.column("train/staleness_max")) <= 1
    assert house.pool.events.count(("sample", "b")) == 2
    assert len(set(house.pool.keys)) == len(house.pool.keys) == 13, "the second attempt is told from the first"
    [path] = (house.folder / "trajectories" / "stale").iterdir()
    assert [group.metadata for group in read_trajectory_groups_parquet(path)] == [{"scenario": "b"}]
    assert polars.read_parquet(path)["outcome"].to_list() == ["stale", "stale"]
    assert [value for _, value in house.column("stale/reward")] == [0.5]
    assert sum(value for _, value in house.column("train/groups_dropped_stale")) == 1


async def test_groups_that_are_too_old_are_trained_where_that_is_asked_for(house):
    config = TrainConfig(truncated_importance_sampling=2.0)
    results = await late(house, "b", when_stale="train", config=config)
    assert sorted(itertools.chain(*house.trained)) == list("abcdefghijkl")
    assert house.pool.events.count(("sample", "b")) == 1
    assert [result.num_groups_stale for result in results].count(1) == 1
    assert sum(value for _, value in house.column("train/groups_trained_stale")) == 1
    assert max(value for _, value in house.column("train/staleness_max")) > 1
    assert not (house.folder / "trajectories" / "stale").exists()


async def test_what_ended_in_the_callers_block_is_known_before_the_next_step_is_chosen(house):
    house.pool.slow["b"] = asyncio.Event()
    async for result in house.run("abcdef", groups_per_step=1, max_steps_off_policy=2):
        if result.step == 1:
            await until(lambda: house.pool.running == ["b"])
            house.pool.slow["b"].set()
            await until(lambda: not house.pool.running)
    assert list(itertools.chain(*house.trained)) == list("abcdef")


@pytest.mark.parametrize("behind", [0, 1])
async def test_a_server_of_old_versions_is_found_out_instead_of_sampling_for_ever(house, behind):
    house.backend.step, house.pool.lag = 7, behind + 1
    with pytest.raises(art_ray.errors.ServingError, match=r"too old twice.*by version .*Does something serve old"):
        await house.results(itertools.count(), max_steps_off_policy=behind)
    assert not house.pool.is_open


async def test_training_on_groups_of_any_age_needs_a_bound_on_their_weights(house):
    with pytest.raises(ConfigError, match="truncated_importance_sampling=…"):
        house.run("ab", when_stale="train")


# ── however it ends ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("behind", [0, 1, 3])
async def test_leaving_the_loop_leaves_nothing_running(house, behind):
    house.pool.slow = {scenario: asyncio.Event() for scenario in "efghijkl"}
    before = asyncio.all_tasks()
    async with contextlib.aclosing(house.run("abcdefghijkl", max_steps_off_policy=behind)) as steps:
        async for result in steps:
            if result.step == 2:
                break
    assert (house.pool.running, house.pool.is_open) == ([], False)
    assert asyncio.all_tasks() == before


async def test_a_plain_break_ends_everything_as_soon_as_the_loop_turns(house):
    house.pool.slow = {scenario: asyncio.Event() for scenario in "cdef"}
    async for _ in house.run("abcdef"):
        break
    gc.collect()
    await until(lambda: not house.pool.is_open)


@pytest.mark.parametrize("moment", ["sampling", "training", "evaluating"])
async def test_a_cancellation_at_any_moment_ends_groups_step_and_evaluation(house, moment):
    never = asyncio.Event()
    began = []
    house.backend.holds_versions = True

    async def forever(what):
        began.append(what)
        try:
            await never.wait()
        finally:
            began.append("ended")

    async def evaluate(pinned):
        if moment == "evaluating":
            await forever(pinned)

    house.pool.slow = dict.fromkeys("cd" if moment != "sampling" else "ab", never)
    if moment == "training":
        house.backend.training = forever
    before = asyncio.all_tasks()
    run = asyncio.create_task(house.results("abcd", evaluate=evaluate, evaluate_every=1))
    await until(lambda: len(house.pool.running) == 2 and (began or moment == "sampling"))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == before
    assert (house.pool.running, house.pool.is_open, house.backend.held) == ([], False, [])
    assert began[1:] == ([] if moment == "sampling" else ["ended"])


async def test_what_a_group_raises_ends_the_run(house):
    house.pool.broken = "c"
    house.pool.slow = {"d": asyncio.Event()}
    with pytest.raises(art_ray.errors.ActorDiedError, match="last worker died"):
        await house.results("abcd")
    assert (house.pool.running, house.pool.is_open) == ([], False)


async def test_more_failures_in_a_step_than_allowed_end_the_run_and_are_sampled_anew_in_the_next(house):
    house.pool.num_exceptions = 1
    assert len(await house.results("abcd", max_exceptions=0.34, num_steps=1)) == 1
    message = "2 of the 6 rollouts for step 2 failed, more than max_exceptions=0 allows.*split 'failed' of step 1"
    with pytest.raises(TooManyExceptionsError, match=message):
        await house.results("abcd")
    assert house.backend.step == 1
    assert [step for step, _ in house.column("failed/reward")] == [1]
    house.pool.num_exceptions = 0
    await house.results("abcd")
    assert house.trained == [["a", "b"], ["c", "d"]]
    assert house.pool.keys[-2:] == ["scenarios-2.1", "scenarios-3.1"], "not found among what was kept"


async def test_a_step_that_something_else_took_is_noticed(house):
    run = house.run("abcdef")
    assert (await anext(run)).step == 1
    await house.model.train([art_ray.TrajectoryGroup([])])
    with pytest.raises(TrainingError, match="trained 'm' to step 3, where it expected 2"):
        await anext(run)
    assert not house.pool.is_open


async def test_a_step_that_was_given_up_and_taken_all_the_same_counts(house):
    began = asyncio.Event()

    async def forever(step):
        began.set()
        await asyncio.Event().wait()

    async def settled(model):
        house.backend.step = 1  # whoever asks waits for the end of the step, and has it served
        return "http://127.0.0.1:9/v1", "a-secret-key"

    house.backend.training = forever
    run = asyncio.create_task(house.results("abcd"))
    await began.wait()
    run.cancel()
    await asyncio.wait([run])
    house.backend.training, house.backend._prepare_backend_for_training = at_once, settled
    again = house.model.model_copy(deep=True)  # as another process has it
    house.model = again
    results = await house.results("abcd", num_steps=2)
    assert [result.step for result in results] == [2]
    assert house.trained[1:] == [["c", "d"]]


# ── going on ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("endless", [False, True])
async def test_a_run_that_was_left_goes_on_without_skipping_or_repeating_a_scenario(house, behind, endless):
    def scenarios():
        return iter(range(12)) if endless else range(12)

    for stop in (1, 4, 6):
        async with contextlib.aclosing(house.run(scenarios(), max_steps_off_policy=behind, num_steps=6)) as steps:
            async for result in steps:
                if result.step == stop:
                    break
    assert house.trained == [[2 * step, 2 * step + 1] for step in range(6)]
    assert await house.results(scenarios(), num_steps=6) == [], "the steps asked for are taken"
    assert house.pool.times_opened == 3, "no worker is started for nothing"


@pytest.mark.parametrize("moment", ["fail_before", "fail_after"])
async def test_a_step_consumes_its_scenarios_if_and_only_if_it_was_committed(make_house, moment):
    house = await make_house()
    await house.results(range(8), num_steps=1)
    setattr(house.backend, moment, True)
    with pytest.raises(RuntimeError, match="lost"):
        await house.results(range(8), num_steps=4)
    setattr(house.backend, moment, False)
    again = await make_house(backend=house.backend)  # another process, which finds what the first one left
    results = await again.results(range(8), num_steps=4)
    committed = house.trained if moment == "fail_after" else [house.trained[0], *house.trained[2:]]
    assert committed == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [result.step for result in results] == ([2, 3, 4] if moment == "fail_before" else [3, 4])


async def test_a_scenario_that_was_too_late_before_a_restart_is_sampled_first_after_it(house):
    house.pool.slow["b"] = asyncio.Event()

    async def training(step):
        if step == 3:
            house.pool.slow["b"].set()
            await until(lambda: "b" not in house.pool.running)

    house.backend.training = training
    async with contextlib.aclosing(house.run("abcdefghijkl", num_steps=6)) as steps:
        async for result in steps:
            if result.num_groups_stale:
                break
    house.pool.events.clear()
    house.pool.keys.clear()
    await house.results(iter("abcdefghijkl"), num_steps=6)
    assert house.pool.events[0] == ("sample", "b")
    assert house.pool.keys[0] == "scenarios-1.1"
    assert sorted(itertools.chain(*house.trained)) == list("abcdefghijkl")


async def test_two_sets_of_scenarios_of_one_model_are_counted_apart(house):
    await house.results("abcd", name="easy", num_steps=2)
    await house.results("efgh", name="hard", num_steps=4)
    assert await house.results("abcd", name="easy", num_steps=2) == []
    assert house.trained == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]


async def test_steps_that_were_taken_otherwise_consume_no_scenario(house):
    await house.model.train([art_ray.TrajectoryGroup([])])
    await house.results("abcd", num_steps=3)
    assert house.trained[1:] == [["a", "b"], ["c", "d"]]


# ── how many scenarios ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_too_few_scenarios_for_the_steps_asked_for_are_refused_before_the_first(house):
    with pytest.raises(ConfigError, match="2 to a step, last until step 3, but num_steps=5"):
        await house.results("abcdef", num_steps=5)
    assert (house.pool.events, house.pool.is_open) == ([], False)
    await house.results("abcdef", num_steps=2)
    with pytest.raises(ConfigError, match="last until step 3, but num_steps=4"):
        await house.results("abcdef", num_steps=4)


@pytest.mark.parametrize("behind", [0, 1, 5])
async def test_scenarios_whose_number_is_not_known_are_all_trained_before_too_few_are_an_error(house, behind):
    with pytest.raises(ConfigError, match="last until step 3, but num_steps=5"):
        await house.results(iter("abcde"), num_steps=5, max_steps_off_policy=behind)
    assert house.trained == [["a", "b"], ["c", "d"], ["e"]]


async def test_without_a_number_of_steps_every_scenario_is_trained_once(house):
    assert [result.step for result in await house.results("abcde")] == [1, 2, 3]
    assert house.trained == [["a", "b"], ["c", "d"], ["e"]]
    assert await house.results("abcde") == []


async def test_endless_scenarios_are_read_only_as_far_as_needed(house):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield number

    run = house.run(endless(), num_steps=4)
    async for _ in run:
        assert len(run.ag_frame.f_locals["self"]._scenarios._kept) <= 4
    assert read == list(range(8))


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_nth_version_is_evaluated_under_its_own_name_and_logged_at_its_step(house):
    names = []

    async def evaluate(pinned):
        names.append(pinned.get_inference_name())
        return [art_ray.TrajectoryGroup([art_ray.Trajectory([], reward=1.0)])]

    await house.results("abcdefgh", evaluate=evaluate, evaluate_every=2)
    assert names == ["m@0", "m@2", "m@4"]
    assert house.column("val/reward") == [(0, 1.0), (2, 1.0), (4, 1.0)]
    assert house.backend.held == []


async def test_an_evaluation_runs_beside_training_where_its_version_stays_served(house):
    house.backend.holds_versions = True
    seen = []

    async def evaluate(pinned):
        step = await pinned.get_step()
        if step == 0:
            await until(lambda: house.backend.step >= 2)
        seen.append((step, list(house.backend.held)))

    await house.results("abcdefgh", evaluate=evaluate, evaluate_every=4)
    assert seen == [(0, [0]), (4, [4])], "its version is held until it has ended"


async def test_where_one_version_is_served_at_a_time_the_next_step_waits_for_the_evaluation(house):
    evaluated, trained = [], asyncio.Event()

    async def training(step):
        trained.set()

    async def evaluate(pinned):
        trained.clear()
        await until(lambda: len(house.pool.keys) >= min(8, 2 * (house.backend.step + 2)))  # sampling goes on
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(trained.wait(), 0.1)
        evaluated.append((await pinned.get_step(), house.backend.step, trained.is_set()))

    house.backend.training = training
    await house.results("abcdefgh", evaluate=evaluate, evaluate_every=1)
    assert evaluated == [(step, step, False) for step in range(5)]


async def test_an_evaluation_that_was_cut_off_is_repeated_and_one_that_ended_is_not(house):
    evaluated = []

    async def evaluate(pinned):
        evaluated.append(await pinned.get_step())
        if len(evaluated) == 2:
            await asyncio.Event().wait()

    house.backend.holds_versions = True
    async with contextlib.aclosing(house.run("abcd", evaluate=evaluate, evaluate_every=2)) as steps:
        async for result in steps:
            if result.step == 2:
                await until(lambda: len(evaluated) == 2)
                break
    for _ in range(2):
        await house.results("abcd", evaluate=evaluate, evaluate_every=2)
    assert evaluated == [0, 2, 2]


@pytest.mark.parametrize("while_sampling", [False, True])
async def test_what_an_evaluation_raises_ends_the_run_at_once(house, while_sampling):
    async def evaluate(pinned):
        raise LookupError("no questions")

    house.backend.holds_versions = True
    if while_sampling:
        house.pool.slow = dict.fromkeys(range(4), asyncio.Event())
    with pytest.raises(LookupError, match="no questions"):
        await house.results(itertools.count(), evaluate=evaluate, evaluate_every=1000)
    assert (house.pool.running, house.pool.is_open, house.backend.held) == ([], False, [])


# ── what cannot work ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step is at least 1, got 0"),
        ({"max_steps_off_policy": -1}, "max_steps_off_policy is at least 0, got -1"),
        ({"num_steps": -2}, "num_steps is at least 0, got -2"),
        ({"evaluate_every": 0}, "evaluate_every is at least 1, got 0"),
        ({"evaluate_every": 3}, "evaluate and evaluate_every belong together"),
        ({"when_stale": "keep"}, "'drop' or 'train', got 'keep'"),
        ({"max_exceptions": -1}, "max_exceptions=-1"),
        ({"name": "a/b"}, "path separator"),
    ],
)
async def test_a_value_that_cannot_work_is_refused_at_once(house, option, message):
    with pytest.raises(ConfigError, match=message):
        house.run("abcd", **option)
