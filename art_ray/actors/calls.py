"""The only place that waits for an actor or for an object. Every wait has a deadline; every error is one of ours."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions as ray_errors

from art_ray.errors import ActorDiedError, ActorError, ArtRayError, DeadlineError

__all__ = ["Wait", "answer", "answer_now", "fetch", "together", "watch"]

POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Wait:
    """What is waited for, so that an error can name it."""

    actor: str
    """The actor's name, as the Ray dashboard shows it."""
    method: str
    node: str
    """Address of the node on which the actor runs."""
    waiting_for: str
    """What the answer means to the user, as a noun: "the first answer of the engine"."""
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.actor}.{self.method} on node {self.node}"


async def answer(ref: Any, wait: Wait) -> Any:
    """Returns the value behind `ref`.

    Raises:
        DeadlineError: it did not come within `wait.timeout_s`.
        ArtRayError: what the actor raised, where that is one of ours.
        ActorDiedError: the actor died.
        ActorError: it raised something else; carries its traceback as text.
    """
    future = _future(ref)
    # Not wait_for: an actor's own TimeoutError would look like a missed deadline.
    done, _ = await asyncio.wait({future}, timeout=wait.timeout_s)
    if not done:
        raise _late(wait, wait.timeout_s)
    return _value(future, wait)


def answer_now(ref: Any, wait: Wait) -> Any:
    """Like `answer`, for code that has no event loop."""
    try:
        return ray.get(ref, timeout=wait.timeout_s)
    except ray_errors.GetTimeoutError:
        raise _late(wait, wait.timeout_s) from None
    except ray_errors.RayError as error:
        raise _ours(error, wait) from None


def fetch(refs: list[Any], what: str, timeout_s: float) -> list[Any]:
    """Returns the objects behind `refs`, in order, from inside an actor.

    Raises:
        DeadlineError: they did not arrive in time.
        ActorError: an object is lost, because its owner or its node died.
    """
    wait = Wait("object store", "get", ray.util.get_node_ip_address(), what, timeout_s)
    # Not ray.get: inside an async actor it warns of a blocked event loop, also on a thread that is not the loop's.
    futures = [ref.future() for ref in refs]
    done, late = concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
    try:
        for future in done:
            future.result()
    except ray_errors.RayError as error:
        raise _ours(error, wait) from None
    if late:
        raise _late(wait, timeout_s)
    return [future.result() for future in futures]


async def together(*waiting: Awaitable[Any]) -> list[Any]:
    """Returns all results in order, or raises the first error once the other waits are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


async def watch(ref: Any, wait: Wait, progress: Callable[[], Awaitable[Any]], report: Callable[[Any], None]) -> Any:
    """Returns the value behind `ref`, passing what `progress` returns to `report` whenever it changes.

    The deadline counts from the last change: long work that moves is not late, work that stands still is.

    Raises:
        DeadlineError, ArtRayError, ActorError: as `answer`.
    """
    future = _future(ref)
    seen, moved = None, time.monotonic()
    while True:
        done, _ = await asyncio.wait({future}, timeout=POLL_INTERVAL_S)
        if done:
            return _value(future, wait)
        current = await progress()
        if current != seen:
            seen, moved = current, time.monotonic()
            report(current)
        elif time.monotonic() - moved > wait.timeout_s:
            raise _late(wait, wait.timeout_s)


def _future(ref: Any) -> asyncio.Future[Any]:
    future = asyncio.wrap_future(ref.future())
    # Whoever was cancelled or ran out of time asks no more: what comes then is no news to anybody.
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return future


def _value(future: asyncio.Future[Any], wait: Wait) -> Any:
    try:
        return future.result()
    except ray_errors.RayError as error:
        raise _ours(error, wait) from None


def _late(wait: Wait, waited_s: float) -> DeadlineError:
    return DeadlineError(f"{wait} did not answer within {waited_s:g} s; waited for {wait.waiting_for}")


def _ours(error: ray_errors.RayError, wait: Wait) -> ArtRayError:
    """Returns Ray's exception as one of ours, so that nobody downstream needs to know Ray's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ArtRayError):
        return cause
    if isinstance(error, ray_errors.RayTaskError):
        return ActorError(f"{wait} failed while waiting for {wait.waiting_for}:\n{error}")
    if isinstance(error, (ray_errors.RayActorError, ray_errors.WorkerCrashedError, ray_errors.NodeDiedError)):
        return ActorDiedError(f"{wait.actor} on node {wait.node} died; waited for {wait.waiting_for}: {error}")
    return ActorError(f"{wait}: {type(error).__name__} while waiting for {wait.waiting_for}: {error}")
