"""Waiting: every wait ends, and its error is one of ours and names what it waited for."""

import asyncio
import pickle

import pytest
import ray

from art_ray.actors import calls
from art_ray.actors.calls import Wait
from art_ray.errors import ActorError, DeadlineError, EngineError

pytestmark = pytest.mark.usefixtures("ray_instance")


@ray.remote(num_cpus=0)
class Patient:
    """Answers, fails or waits, as told."""

    def __init__(self) -> None:
        self._release = asyncio.Event()
        self._polls = 0

    async def echo(self, value):
        return value

    async def fail(self, error):
        raise error

    async def hold(self):
        await self._release.wait()
        return "released"

    async def release(self):
        self._release.set()

    async def moving(self):
        self._polls += 1
        return self._polls

    async def die(self):
        import os

        os._exit(1)


def wait_for(method: str, timeout_s: float) -> Wait:
    return Wait("patient", method, "127.0.0.1", "an answer", timeout_s)


@pytest.fixture
def patient():
    actor = Patient.remote()
    yield actor
    ray.kill(actor)


async def test_an_answer_is_returned(patient):
    assert await calls.answer(patient.echo.remote(3), wait_for("echo", 30)) == 3
    assert await asyncio.to_thread(calls.answer_now, patient.echo.remote(4), wait_for("echo", 30)) == 4


async def test_a_late_answer_is_an_error_that_names_actor_method_node_and_what_was_awaited(patient):
    with pytest.raises(DeadlineError) as caught:
        await calls.answer(patient.hold.remote(), wait_for("hold", 0.3))
    for part in ("patient.hold", "node 127.0.0.1", "0.3 s", "an answer"):
        assert part in str(caught.value)


async def test_an_error_of_ours_arrives_as_it_was_raised(patient):
    with pytest.raises(EngineError, match="its last words") as caught:
        await calls.answer(patient.fail.remote(EngineError("its last words")), wait_for("fail", 30))
    assert str(pickle.loads(pickle.dumps(caught.value))) == "its last words"


async def test_a_foreign_error_arrives_as_an_actor_error_with_its_text(patient):
    with pytest.raises(ActorError, match="no such key"):
        await calls.answer(patient.fail.remote(KeyError("no such key")), wait_for("fail", 30))


async def test_a_timeout_that_the_actor_raised_is_not_taken_for_our_deadline(patient):
    with pytest.raises(ActorError, match="the actor's own"):
        await calls.answer(patient.fail.remote(TimeoutError("the actor's own")), wait_for("fail", 30))


async def test_a_dead_actor_is_an_error_that_names_it(patient):
    with pytest.raises(ActorError, match=r"patient on node 127\.0\.0\.1 died; waited for an answer"):
        await calls.answer(patient.die.remote(), wait_for("die", 30))


async def test_a_lost_object_is_an_error_that_names_it():
    with pytest.raises(DeadlineError, match="waited for group 3"):
        calls.fetch([ray.put(1), _never()], "group 3", 0.3)


def _never():
    holder = Patient.remote()
    return holder.hold.remote()


async def test_work_that_moves_is_not_late_and_its_progress_is_reported(patient):
    seen = []
    held = patient.hold.remote()

    async def progress():
        moved = await calls.answer(patient.moving.remote(), wait_for("moving", 30))
        if moved == 4:
            await calls.answer(patient.release.remote(), wait_for("release", 30))
        return moved

    # Four polls take longer than the deadline: only standing still would miss it.
    value = await calls.watch(held, wait_for("hold", 3 * calls.POLL_INTERVAL_S), progress, seen.append)
    assert value == "released"
    assert seen[:4] == [1, 2, 3, 4]


async def test_work_that_stands_still_misses_its_deadline(patient):
    async def progress():
        return await calls.answer(patient.echo.remote(0), wait_for("echo", 30))

    with pytest.raises(DeadlineError, match=r"patient\.hold"):
        await calls.watch(patient.hold.remote(), wait_for("hold", 1.0), progress, lambda _: None)
