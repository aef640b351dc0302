from __future__ import annotations

import asyncio

import pytest

from art_ray.errors import VersionNotServedError
from art_ray.serving.gate import BusyError, VersionGate
from art_ray.serving.leases import VersionTable


@pytest.fixture
def gate() -> VersionGate:
    table = VersionTable("policy")
    table.add(0, "hash0")
    table.make_current(0)
    return VersionGate(table, max_requests=3)


async def turns(count: int = 10) -> None:
    """Lets every other task run until it waits."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_change_of_weights_waits_for_running_requests_and_new_ones_wait_for_it(gate: VersionGate):
    events = []

    async def change() -> None:
        async with gate.emptied():
            events.append("changing")
            gate.table.clear()
            gate.table.add(1, "hash1")
            gate.table.make_current(1)

    first = await gate.enter("policy")
    changing = asyncio.create_task(change())
    await turns()
    second = asyncio.create_task(gate.enter("policy"))
    await turns()
    assert not events
    assert not second.done()
    await gate.leave(first)
    await changing
    assert (first, await second) == (0, 1)


async def test_a_request_for_the_old_version_is_refused_after_the_change(gate: VersionGate):
    first = await gate.enter("policy@0")

    async def change() -> None:
        async with gate.emptied():
            gate.table.clear()
            gate.table.add(1, "hash1")
            gate.table.make_current(1)

    changing = asyncio.create_task(change())
    await turns()
    late = asyncio.create_task(gate.enter("policy@0"))
    await turns()
    await gate.leave(first)
    await changing
    with pytest.raises(VersionNotServedError, match="held: policy@1"):
        await late


async def test_a_failed_change_lets_requests_in_again(gate: VersionGate):
    with pytest.raises(RuntimeError):
        async with gate.emptied():
            raise RuntimeError
    assert await gate.enter("policy") == 0


async def test_a_cancelled_change_lets_requests_in_again(gate: VersionGate):
    step = await gate.enter("policy")

    async def change() -> None:
        async with gate.emptied():
            pass

    changing = asyncio.create_task(change())
    await turns()
    waiting = asyncio.create_task(gate.enter("policy"))
    await turns()
    changing.cancel()
    assert await waiting == 0
    await gate.leave(step)


async def test_more_requests_than_allowed_are_refused_waiting_ones_included(gate: VersionGate):
    steps = [await gate.enter("policy"), await gate.enter("policy")]

    async def change() -> None:
        async with gate.emptied():
            pass

    changing = asyncio.create_task(change())
    await turns()
    third = asyncio.create_task(gate.enter("policy"))
    await turns()
    with pytest.raises(BusyError, match="max_requests"):
        await gate.enter("policy")
    for step in steps:
        await gate.leave(step)
    await changing
    await gate.leave(await third)
    assert gate.table.requests == 0


async def test_a_waiting_request_that_is_cancelled_leaves_no_trace(gate: VersionGate):
    step = await gate.enter("policy")

    async def change() -> None:
        async with gate.emptied():
            pass

    changing = asyncio.create_task(change())
    await turns()
    waiting = asyncio.create_task(gate.enter("policy"))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.waiting == 0
    await gate.leave(step)
    await changing
    assert gate.table.requests == 0


async def test_a_place_for_a_version_becomes_free_when_a_request_ends(gate: VersionGate):
    gate.table.add(1, "hash1")
    old = await gate.enter("policy@0")
    gate.table.make_current(1)
    waiting = asyncio.create_task(gate.until_room(2))
    await turns()
    assert not waiting.done()
    await gate.leave(old)
    await waiting
