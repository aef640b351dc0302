"""A fleet of stub replicas: who is asked, and what becomes of requests and versions when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from art_ray.errors import DeadlineError, EngineError, ServingError
from art_ray.serving.config import ServingConfig
from art_ray.serving.fleet import Fleet
from art_ray.serving.health import Health
from art_ray.serving.spec import EngineSpec
from art_ray.trajectories import Sampling
from tests.serving.conftest import until
from tests.serving.stub_replica import PROMPT, StubReplica, answer_to

KEY = "a-key"


@dataclass(frozen=True)
class Version:
    step: int
    sha256: str


class House:
    """A fleet, its stubs (those that were replaced, too), and a client."""

    def __init__(self, replicas: int = 2, weights: str = "adapter", **serving: Any) -> None:
        self.weights, self.made = weights, []
        self.prepare = lambda replica: None
        values = {"replicas": replicas, "probe_interval_s": 0.05, "max_num_seqs": 2, "load_timeout_s": 10.0}
        config = ServingConfig(**{**values, "pin_ttl_s": 5.0, **serving})
        spec = EngineSpec("base", "policy", KEY, 8, serving=config)
        self.fleet = Fleet(spec, self._make, health=lambda: Health(longest_wait_s=0.05))
        self.client = openai.AsyncOpenAI(api_key=KEY, base_url="http://unset", max_retries=0)

    def _make(self, index: int, restarts: int) -> StubReplica:
        replica = StubReplica(f"r{index}.{restarts}", self.weights)
        self.prepare(replica)
        self.made.append(replica)
        return replica

    async def start(self, step: int | None = 1) -> House:
        self.client.base_url = (await self.fleet.start()).base_url
        if step is not None:
            await self.publish(step)
        return self

    async def publish(self, step: int, sha256: str | None = None, holder: str | None = None) -> Any:
        return await self.fleet.publish(step, Version(step, sha256 or f"hash{step}"), holder=holder)

    async def ask(self, max_tokens: int = 6, model: str = "policy", **options: Any) -> Any:
        messages = [{"role": "user", "content": "?"}]
        return await self.client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            **options,  # type: ignore[arg-type]
        )

    async def streamed(self, max_tokens: int = 6) -> Any:
        state = ChatCompletionStreamState()
        async for chunk in await self.ask(max_tokens, stream=True):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot.choices[0]

    def replica(self, name: str) -> StubReplica:
        return next(replica for replica in self.made if replica.name == name)

    @property
    def answering(self) -> StubReplica:
        return next(replica for replica in self.made if replica.in_flight)

    def states(self) -> list[str]:
        return [replica["state"] for replica in self.fleet.status()["replicas"]]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    await house.fleet.stop()


@pytest.fixture
async def merged() -> AsyncIterator[House]:
    house = House(weights="merged")
    yield house
    await house.fleet.stop()


class Pause:
    """Holds an answer before its n-th token until it is let go."""

    def __init__(self, number: int) -> None:
        self.number, self.reached, self.go = number, asyncio.Event(), asyncio.Event()

    async def __call__(self, number: int) -> None:
        if number == self.number:
            self.reached.set()
            await self.go.wait()


def pause_all(house: House, number: int = 3) -> Pause:
    pause = Pause(number)
    for replica in house.made:
        replica.on_token = pause
    return pause


async def test_a_request_whose_replica_dies_is_answered_by_another(house: House):
    await house.start()
    pause = pause_all(house)
    asking = asyncio.create_task(house.ask())
    await pause.reached.wait()
    dying = house.answering
    dying.kill()
    pause.go.set()
    sampling = Sampling.of((await asking).choices[0])
    assert sampling is not None
    assert (sampling.token_ids, sampling.policy_versions) == (answer_to(PROMPT, 6), [1] * 6)
    assert [len(replica.requests) for replica in house.made[:2]] == [1, 1]


@pytest.mark.parametrize("number", range(6))
async def test_a_streamed_answer_goes_on_elsewhere_with_exact_tokens(house: House, number: int):
    await house.start()
    pause = pause_all(house, number)
    asking = asyncio.create_task(house.streamed())
    await pause.reached.wait()
    dying = house.answering
    dying.kill()
    pause.go.set()
    choice = await asking
    sampling = Sampling.of(choice)
    assert sampling is not None
    expected = answer_to(PROMPT, 6)
    assert sampling.token_ids == expected
    assert sampling.logprobs == [-token / 1000 for token in expected]
    assert (sampling.prompt_token_ids, sampling.policy_versions) == (PROMPT, [1] * 6)
    assert choice.message.content == "".join(f"<{token}>" for token in expected)
    rest = next(replica for replica in house.made if replica.requests and replica is not dying).requests[0]
    assert (rest["prompt"], rest["max_tokens"]) == (PROMPT + expected[:number], 6 - number)


async def test_a_stream_of_which_only_its_head_came_through_begins_anew_elsewhere(house: House):
    await house.start()
    for replica in house.made:
        replica.dies_after_head = True
    house.made[1].dies_after_head = False
    house.made[1].on_token = None
    choices = [await house.streamed() for _ in range(2)]  # each of the two is asked first once
    for choice in choices:
        sampling = Sampling.of(choice)
        assert sampling is not None
        assert sampling.token_ids == answer_to(PROMPT, 6)
    assert house.made[0].requests


async def test_a_stream_that_depends_on_all_of_its_tokens_ends_with_an_error_that_says_so(house: House):
    await house.start()
    pause = pause_all(house)

    async def read() -> None:
        async for _ in await house.ask(stream=True, presence_penalty=0.5):
            pass

    reading = asyncio.create_task(read())
    await pause.reached.wait()
    house.answering.kill()
    pause.go.set()
    with pytest.raises(openai.APIError, match="its sampling depends on all of its tokens"):
        await reading


async def test_a_request_that_kills_whoever_answers_it_is_given_up(house: House):
    await house.start()

    def deadly(replica: StubReplica) -> None:
        async def kill(number: int) -> None:
            replica.kill()

        replica.on_token = kill

    house.prepare = deadly
    for replica in house.made:
        deadly(replica)
    with pytest.raises(openai.InternalServerError, match="3 replicas died while they answered"):
        await house.ask()
    await until(lambda: house.states() == ["ready", "ready"])


async def test_a_dead_replica_returns_only_once_it_holds_what_the_others_hold(house: House):
    await house.start()
    await house.publish(2, holder="evaluation")
    loading = asyncio.Event()

    async def held_up(step: int) -> None:
        loading.set()
        await may_load.wait()

    may_load = asyncio.Event()

    def slow(replica: StubReplica) -> None:
        replica.on_load = held_up

    house.prepare = slow
    house.made[0].kill()
    await until(lambda: "ready" in house.states() and house.states() != ["ready", "ready"])
    await asyncio.wait_for(loading.wait(), 10)
    assert sorted(house.states()) == ["loading", "ready"]
    for _ in range(4):
        await house.ask()
    assert not house.replica("r0.1").requests
    may_load.set()
    await until(lambda: house.states() == ["ready", "ready"])
    assert house.replica("r0.1").held == {1, 2}
    await asyncio.gather(*(house.ask() for _ in range(4)))
    assert house.replica("r0.1").requests


async def test_without_any_replica_waiting_requests_end_with_the_last_words(house: House):
    await house.start()

    def cannot_start(replica: StubReplica) -> None:
        def refuse() -> None:
            raise EngineError("no memory left on the device")

        replica.on_start = refuse

    house.prepare = cannot_start
    for replica in house.made:
        replica.kill()
    with pytest.raises(openai.InternalServerError, match="no memory left on the device"):
        await asyncio.wait_for(house.ask(), 60)
    assert house.states() == ["failed", "failed"]
    with pytest.raises(EngineError, match="no memory left on the device"):
        await house.publish(2)


async def test_more_requests_than_the_replicas_can_take_wait_in_order(house: House):
    await house.start()
    pause = pause_all(house, 0)
    order: list[int] = []

    async def ask(number: int) -> None:
        await house.ask()
        order.append(number)

    tasks = []
    for number in range(7):
        tasks.append(asyncio.create_task(ask(number)))
        await until(lambda number=number: house.fleet.status()["in_flight"] == number + 1)
    assert [replica.in_flight for replica in house.made] == [2, 2]
    assert house.fleet.status()["waiting"] == 3
    pause.go.set()
    await asyncio.gather(*tasks)
    assert sorted(order[:4]) == [0, 1, 2, 3]


async def test_a_request_waits_for_its_turn_no_longer_than_it_may():
    house = House(replicas=1, queue_timeout_s=0.3)
    await house.start()
    pause = pause_all(house, 0)
    tasks = [asyncio.create_task(house.ask()) for _ in range(2)]
    await until(lambda: house.made[0].in_flight == 2)
    with pytest.raises(openai.InternalServerError, match="queue_timeout_s"):
        await house.ask()
    pause.go.set()
    await asyncio.gather(*tasks)
    await house.fleet.stop()


async def test_a_client_that_leaves_ends_its_request_at_the_replica(house: House):
    await house.start()
    pause = pause_all(house)
    asking = asyncio.create_task(house.streamed())
    await pause.reached.wait()
    replica = house.answering
    asking.cancel()
    await until(lambda: house.fleet.status()["in_flight"] == 0)
    pause.go.set()
    await until(lambda: replica.in_flight == 0)
    assert house.states() == ["ready", "ready"]


async def test_a_version_that_a_replica_refuses_leaves_the_current_one(house: House):
    await house.start()

    async def refuse(step: int) -> None:
        raise ServingError("made for another base model")

    house.made[1].on_load = refuse
    with pytest.raises(ServingError, match="another base model"):
        await house.publish(2)
    assert (await house.ask()).model == "policy@1"
    assert [replica.held for replica in house.made] == [{1}, {1}]
    assert house.states() == ["ready", "ready"]


async def test_a_replica_that_dies_while_it_loads_does_not_hold_up_the_version(house: House):
    await house.start()

    async def die(step: int) -> None:
        house.made[0].kill()

    house.made[0].on_load = die
    assert (await house.publish(2)).step == 2
    assert (await house.ask()).model == "policy@2"
    await until(lambda: house.states() == ["ready", "ready"])
    assert house.replica("r0.1").held == {2}


@pytest.mark.parametrize("weights", ["adapter", "merged"])
async def test_a_version_is_published_even_if_all_replicas_die_of_the_first_try(weights: str):
    house = await House(weights=weights).start()
    for replica in list(house.made):

        async def die(step: int, replica: StubReplica = replica) -> None:
            replica.kill()

        replica.on_load = die
    assert (await house.publish(2)).step == 2
    assert (await house.ask()).model == "policy@2"
    await house.fleet.stop()


async def test_a_version_leaves_all_replicas_when_its_last_lease_ends(house: House):
    await house.start()
    await house.publish(1, holder="evaluation")
    await house.publish(2)
    assert [replica.held for replica in house.made] == [{1, 2}, {1, 2}]
    house.made[1].kill()
    await until(lambda: house.states() == ["ready", "ready"] and len(house.made) == 3)
    assert house.replica("r1.1").held == {1, 2}
    await house.fleet.release("evaluation")
    assert [house.replica(name).held for name in ("r0.0", "r1.1")] == [{2}, {2}]
    with pytest.raises(openai.NotFoundError, match="held: policy@2"):
        await house.ask(model="policy@1")


async def test_two_publications_at_once_leave_one_current_version_everywhere(house: House):
    await house.start()
    await asyncio.gather(house.publish(2), house.publish(3))
    current = house.fleet.status()["current"]
    assert current in (2, 3)
    await until(lambda: [replica.held for replica in house.made] == [{current}] * 2)


async def test_merged_weights_are_changed_while_nothing_is_answered(merged: House):
    await merged.start()
    pause = pause_all(merged)
    asking = asyncio.create_task(merged.ask())
    await pause.reached.wait()
    publishing = asyncio.create_task(merged.publish(2))
    await until(lambda: ("stage", 2) in merged.made[0].calls)
    late = asyncio.create_task(merged.ask())
    await until(lambda: merged.fleet.status()["waiting"] == 1)
    assert not any(call[0] == "load" and call[1] == 2 for call in merged.made[0].calls)
    pause.go.set()
    await publishing
    assert [(await answer).model for answer in (asking, late)] == ["policy@1", "policy@2"]
    assert all(("load", 2, 0) in replica.calls for replica in merged.made)


async def test_a_publication_without_room_ends_at_its_deadline_and_harms_nobody():
    house = await House(max_versions=2, load_timeout_s=0.5, pin_ttl_s=0.4).start()
    await house.publish(1, holder="evaluation")
    await house.publish(2)
    house.fleet._table.pin(1, "evaluation", 60)
    with pytest.raises(DeadlineError, match="load_timeout_s"):
        await house.publish(3)
    assert (await house.ask()).model == "policy@2"
    await house.fleet.stop()


async def test_no_request_gets_in_while_the_engines_sleep(merged: House):
    await merged.start()
    await merged.fleet.sleep()
    asking = asyncio.create_task(merged.ask())
    await until(lambda: merged.fleet.status()["waiting"] == 1)
    assert merged.fleet.status()["state"] == "asleep"
    await merged.fleet.wake()
    assert (await asking).model == "policy@1"
    assert all(replica.calls[-2:] == ["sleep", "wake"] for replica in merged.made)


async def test_stopping_ends_requests_in_flight(house: House):
    await house.start()
    pause = pause_all(house)
    asking = asyncio.create_task(house.ask())
    await pause.reached.wait()
    await asyncio.wait_for(house.fleet.stop(), 20)
    with pytest.raises(openai.APIError):
        await asking
