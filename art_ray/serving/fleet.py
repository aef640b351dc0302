"""The replicas of one policy, the versions they hold in common, and the one URL behind which they stand.

A version is published to all replicas at once, and is current once they hold it. A replica that dies or stands still
leaves the rotation at once, is started again, loads the versions that are held, and only then returns. Everything here
runs in one event loop; no Ray is known: replicas are reached through `ReplicaPort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from art_ray.errors import ActorDiedError, ArtRayError, ConfigError, DeadlineError, EngineError, ServingError
from art_ray.serving.adapter import LoadedVersion
from art_ray.serving.dispatch import Dispatch
from art_ray.serving.front import Front, FrontLimits
from art_ray.serving.gate import VersionGate
from art_ray.serving.health import Health, State
from art_ray.serving.leases import VersionTable
from art_ray.serving.listener import Listener
from art_ray.serving.routing import Rotation
from art_ray.serving.spec import Endpoint, EngineSpec

__all__ = ["Address", "Fleet", "ReplicaPort"]

logger = logging.getLogger(__name__)

LOST = (ActorDiedError, EngineError, DeadlineError)
"""What a replica that is dead or stands still makes its callers see."""


class ReplicaPort(Protocol):
    """How the fleet reaches one replica. Each method ends within a deadline of its own, by an error at the latest."""

    name: str

    async def start(self) -> Endpoint:
        """Starts the engine."""
        ...

    async def stage(self, version: Any) -> None:
        """Checks a version, and makes ready what loading it needs."""
        ...

    async def load(self, version: Any) -> LoadedVersion:
        """Loads a version."""
        ...

    async def unload(self, step: int) -> None:
        """Unloads a version."""
        ...

    async def probe(self) -> None:
        """Raises where the engine does not compute."""
        ...

    async def sleep(self) -> None:
        """Gives the device's memory back."""
        ...

    async def wake(self) -> None:
        """Takes the device's memory again."""
        ...

    async def end(self) -> None:
        """Ends the replica with all of its processes; never raises."""
        ...


# fleet ──Address──> backend
@dataclass(frozen=True)
class Address:
    """Where the policy is served."""

    base_url: str
    """Base URL of the OpenAI API, ending in `/v1`; the same for as long as the run lasts."""
    weights: str
    """How versions are served: "adapter" or "merged"."""


@dataclass
class _Slot:
    """The place of one replica, whoever fills it at the moment."""

    index: int
    health: Health
    replica: ReplicaPort
    lost: asyncio.Future[str]
    endpoint: Endpoint | None = None
    error: ArtRayError | None = None
    """What its last start or load ended with."""
    held: set[int] = field(default_factory=set)
    """Versions that its engine was given and did not give back."""

    @property
    def is_up(self) -> bool:
        """Whether its engine answers."""
        return self.health.state in (State.LOADING, State.READY)


class Fleet:
    """Serves one policy from several replicas.

    Args:
        spec: what each replica serves, and how.
        make: makes the replica of a slot, which is not started yet; called again with a higher number of restarts each
            time that one was lost.
        port: to listen on; 0 takes a free one.
        health: makes the state of one replica.
    """

    def __init__(
        self,
        spec: EngineSpec,
        make: Callable[[int, int], ReplicaPort],
        *,
        port: int = 0,
        health: Callable[[], Health] = Health,
    ) -> None:
        serving = spec.serving
        self._spec, self._serving, self._make, self._health = spec, serving, make, health
        self._table = VersionTable(spec.name)
        self._gate = VersionGate(self._table, serving.max_requests)
        self._versions: dict[int, Any] = {}
        """What replicas are given to load, by step."""
        self._weights = ""
        """How the engines serve versions: "adapter" or "merged"; known once one has started."""
        self._refused_fields: Mapping[str, str] = {}
        self._changing = asyncio.Lock()
        """Held while versions are loaded or unloaded anywhere."""
        self._news = asyncio.Condition()
        self._slots: list[_Slot] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._tidying: set[asyncio.Task[None]] = set()
        self._asleep = contextlib.AsyncExitStack()
        """Keeps requests out while the engines sleep."""
        self._sleeps = False
        self._dispatch = Dispatch(
            Rotation(serving.max_num_seqs),
            api_key=spec.api_key,
            queue_timeout_s=serving.queue_timeout_s,
            on_lost=self._lose_by_name,
            hopeless=self.failure,
            resumes="reasoning_parser" not in serving.engine_args,
        )
        self._listener = Listener(self._front(), spec.host, port)

    # ── from its start to its end ────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Address:
        """Starts all replicas; returns where the policy is served once each has started, or one did and others cannot.

        It serves no version until one is published.

        Raises:
            ConfigError, EngineError, DeadlineError: no replica can start.
        """
        if not self._keepers:
            self._slots = [self._slot(index) for index in range(self._serving.replicas)]
            self._keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        await self._until(lambda: all(slot.is_up or slot.health.state is State.FAILED for slot in self._slots))
        if not self._weights:
            raise next(slot.error for slot in self._slots if slot.error is not None)
        return Address(f"{await self._listener.start()}/v1", self._weights)

    async def stop(self) -> None:
        """Ends the service and every replica."""
        await self._listener.stop()
        for task in (*self._keepers, *self._tidying):
            task.cancel()
        await asyncio.gather(*self._keepers, *self._tidying, return_exceptions=True)
        await asyncio.gather(*(slot.replica.end() for slot in self._slots))
        await self._dispatch.close()

    async def _keep(self, slot: _Slot) -> None:
        """Starts the replica of a slot, and another one each time that it is lost."""
        while True:
            try:
                slot.endpoint = await slot.replica.start()
                self._weights, self._refused_fields = slot.endpoint.weights, slot.endpoint.refused_fields
                await self._bring_up(slot)
                reason = await self._watched(slot)
                slot.error = EngineError(f"{slot.replica.name}: {reason}")
            except ArtRayError as error:
                slot.error, reason = error, str(error)
            except Exception as error:  # of a kind that nobody foresaw: lost all the same, and told by name
                slot.error = EngineError(f"{slot.replica.name}: {type(error).__name__}: {error}")
                reason = str(slot.error)
            self._dispatch.remove(slot.replica.name, reason)
            wait_s = slot.health.lost(reason, for_good=isinstance(slot.error, ConfigError))
            logger.warning("replica %s is lost%s: %s", slot.replica.name, "" if wait_s else " for good", reason)
            self._dispatch.notice()
            await self._announce()
            await slot.replica.end()
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)
            fresh = self._slot(slot.index, slot.health)
            slot.replica, slot.lost, slot.endpoint, slot.held = fresh.replica, fresh.lost, None, set()

    async def _bring_up(self, slot: _Slot) -> None:
        """Has a started replica load what the others hold, and takes it into rotation if that is something."""
        async with self._changing:
            slot.health.started()
            if self._sleeps:
                await slot.replica.sleep()
            else:
                for step in sorted(self._table.steps, key=lambda step: step == self._table.current):
                    await self._load(slot, step)
                if self._table.current is not None:
                    self._into_rotation(slot)
        await self._announce()

    async def _watched(self, slot: _Slot) -> str:
        """Returns why the replica is lost, once it is."""
        while True:
            await asyncio.wait({slot.lost}, timeout=self._serving.probe_interval_s)
            if slot.lost.done():
                return slot.lost.result()
            if not self._sleeps:
                try:
                    await slot.replica.probe()
                except ArtRayError as error:
                    return str(error)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def publish(self, step: int, version: Any, *, holder: str | None = None) -> LoadedVersion:
        """Has every replica load a version, and lets it answer requests for the bare name from then on.

        Args:
            step: the version.
            version: what the replicas are given: an `AdapterVersion`, or a reference to one.
            holder: loads it beside the current version instead, leased to this holder for `pin_ttl_s` seconds or until
                `release`. Again: from then on anew.

        Returns:
            The answer of the replica that took longest.

        Raises:
            ServingError: altered on its way, refused by the engine, or without effect on the canary's answer.
            EngineError: no replica is left; carries the last words.
            DeadlineError: no place became free, or no replica came back, within `load_timeout_s`.
        """
        timeout_s = self._serving.load_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if holder is not None:
                    self._refuse_holders(step)
                loaded = await self._published(step, version)
                if holder is not None:
                    self._table.pin(step, holder, self._serving.pin_ttl_s)
                else:
                    self._table.make_current(step)
                    for slot in self._slots:
                        if slot.is_up and step in slot.held:
                            self._into_rotation(slot)
        except TimeoutError:
            raise DeadlineError(
                f"version {step} was not loaded within {timeout_s:g} s (ServingConfig.load_timeout_s); versions held "
                f"and their users: {self._table.status()['versions']}; replicas: {self._replicas()}"
            ) from None
        await self._tidy()
        return loaded

    async def release(self, holder: str) -> None:
        """Ends the leases of `holder`; versions that nobody needs then are unloaded."""
        self._table.unpin(holder)
        await self._tidy()

    async def sleep(self) -> None:
        """Lets running requests end, keeps new ones waiting, and has the engines give their memory back."""
        if self._sleeps:
            return
        await self._asleep.enter_async_context(self._gate.emptied())
        async with self._changing:
            self._sleeps = True
            await self._everywhere(lambda slot: slot.replica.sleep())

    async def wake(self) -> None:
        """Undoes `sleep`: weights are back before the first request is let in."""
        if not self._sleeps:
            return
        async with self._changing:
            await self._everywhere(lambda slot: slot.replica.wake())
            self._sleeps = False
            for slot in self._slots:
                if slot.is_up and self._table.current is not None and self._table.current not in slot.held:
                    await self._load(slot, self._table.current)  # it was started while the others slept
                    self._into_rotation(slot)
        await self._asleep.aclose()

    async def _published(self, step: int, version: Any) -> LoadedVersion:
        """Loads a version on every replica that is up; waits for one to come back where none is."""
        while True:
            if self._needs_room(step):  # outside the lock, which a replica that comes back needs as well
                await self._gate.until_room(self._serving.max_versions)
            async with self._changing:
                await self._unload_idle()
                if self._needs_room(step):
                    continue
                if loaded := await self._load_everywhere(step, version):
                    self._table.add(step, loaded[0].sha256)
                    if self._weights == "merged":
                        self._table.make_current(step)
                    return max(loaded, key=lambda one: one.seconds)
            if (failure := self.failure()) is not None:
                raise EngineError(f"no replica of {self._spec.name!r} is left. Last words:\n{failure}")
            await self._until(lambda: self.failure() is not None or any(map(_can_be_asked, self._slots)))

    def _needs_room(self, step: int) -> bool:
        """Returns whether a version has to wait for a place among the others; merged weights have one for all."""
        is_full = len(self._table) >= self._serving.max_versions
        return self._weights == "adapter" and step not in self._table and is_full

    async def _load_everywhere(self, step: int, version: Any) -> list[LoadedVersion]:
        """Loads a version on the replicas that are up; returns what they answered.

        Raises:
            ServingError: the version is at fault; those that took it have unloaded it again.
        """
        await self._everywhere(lambda slot: slot.replica.stage(version))
        if self._weights == "merged" and step not in self._table:
            async with self._gate.emptied():
                self._table.clear()
                self._versions = {step: version}
                return await self._everywhere(lambda slot: self._load(slot, step))
        self._versions.setdefault(step, version)
        try:
            return await self._everywhere(lambda slot: self._load(slot, step))
        except ServingError:
            if step not in self._table:
                del self._versions[step]
                await self._unload_idle()
            raise

    async def _everywhere(self, work: Callable[[_Slot], Any]) -> list[Any]:
        """Returns what the replicas that are up answer; those that turn out to be lost are taken out.

        Raises:
            ArtRayError: what a living replica raised.
        """
        slots = [slot for slot in self._slots if _can_be_asked(slot)]
        results = await asyncio.gather(*(work(slot) for slot in slots), return_exceptions=True)
        answers, error = [], None
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, LOST):
                self._lose(slot, str(result))
            elif isinstance(result, BaseException):
                error = error or result
            else:
                answers.append(result)
        if error is not None:
            raise error
        return answers

    async def _load(self, slot: _Slot, step: int) -> LoadedVersion:
        slot.held.add(step)
        loaded = await slot.replica.load(self._versions[step])
        if self._weights == "merged":
            slot.held = {step}
        return loaded

    async def _unload_idle(self) -> None:
        """Unloads everywhere what nobody needs. The caller holds the lock."""
        for step in self._table.removable():
            self._table.remove(step)  # first: from here on nobody can ask for it
            self._versions.pop(step, None)
        if self._sleeps:
            return

        async def unloaded(slot: _Slot) -> None:
            for step in slot.held - set(self._table.steps):
                await slot.replica.unload(step)
                slot.held.discard(step)

        await self._everywhere(unloaded)

    async def _tidy(self) -> None:
        async with self._changing:
            await self._unload_idle()

    async def _left(self) -> None:
        """Unloads what nobody needs any more, without keeping the client waiting that left it."""
        if self._table.removable():
            task = asyncio.create_task(self._tidy())
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)

    def _refuse_holders(self, step: int) -> None:
        if self._weights == "merged":
            raise ServingError(
                f"version {step} cannot be kept beside others: merged weights hold one version at a time; "
                "use ServingConfig(weights='adapter')"
            )

    # ── what is asked of it ──────────────────────────────────────────────────────────────────────────────────────

    def failure(self) -> str | None:
        """Returns the last words of the replicas if none is left and none will come back, otherwise None."""
        if not self._slots or any(slot.health.state is not State.FAILED for slot in self._slots):
            return None
        return "\n".join(f"{slot.replica.name}: {slot.health.reason}" for slot in self._slots)

    def status(self) -> dict[str, Any]:
        """Returns versions, replicas, and requests, as plain values. Never waits."""
        states = {slot.health.state for slot in self._slots}
        state = next((s for s in (State.READY, State.LOADING, State.STARTING, State.LOST) if s in states), State.FAILED)
        return {
            "state": "asleep" if self._sleeps else str(state),
            **self._table.status(),
            "in_flight": self._table.requests,
            "waiting": self._gate.waiting + self._dispatch.waiting,
            "replicas": self._replicas(),
        }

    # ── its parts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _front(self) -> Front:
        limits = FrontLimits(
            body_bytes=int(self._serving.max_body_mib * 2**20),
            request_timeout_s=self._serving.request_timeout_s,
            pin_ttl_s=self._serving.pin_ttl_s,
        )
        return Front(
            self._dispatch,
            self._gate,
            engine_model=self._table.served_name,
            api_key=self._spec.api_key,
            limits=limits,
            failure=self.failure,
            on_left=self._left,
            refused_fields=lambda: self._refused_fields,
            pins=lambda: self._weights == "adapter",
        )

    def _slot(self, index: int, health: Health | None = None) -> _Slot:
        if health is not None:
            health.starting()
        health = health or self._health()
        return _Slot(index, health, self._make(index, health.restarts), asyncio.get_running_loop().create_future())

    def _into_rotation(self, slot: _Slot) -> None:
        if slot.health.state is State.LOADING:
            assert slot.endpoint is not None
            slot.health.loaded()
            self._dispatch.add(slot.replica.name, slot.endpoint.url, slot.endpoint.max_model_len)

    def _lose(self, slot: _Slot, reason: str) -> None:
        """Takes a replica out of rotation at once; its keeper does the rest."""
        if not slot.lost.done():
            slot.lost.set_result(reason)
            self._dispatch.remove(slot.replica.name, reason)

    def _lose_by_name(self, name: str, reason: str) -> None:
        for slot in self._slots:
            if slot.replica.name == name and slot.is_up:
                self._lose(slot, reason)

    def _replicas(self) -> list[dict[str, Any]]:
        in_flight = self._dispatch.in_flight
        return [
            {
                "name": slot.replica.name,
                "state": str(slot.health.state),
                "restarts": slot.health.restarts,
                "reason": slot.health.reason,
                "in_flight": in_flight.get(slot.replica.name, 0),
                "held": sorted(slot.held),
                "pids": slot.endpoint.engine_pids if slot.endpoint else (),
            }
            for slot in self._slots
        ]

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(condition)

    async def _announce(self) -> None:
        async with self._news:
            self._news.notify_all()


def _can_be_asked(slot: _Slot) -> bool:
    """Returns whether its engine answers, as far as is known: a lost one is up until its keeper has seen to it."""
    return slot.is_up and not slot.lost.done()
