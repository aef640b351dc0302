"""One serving replica behind Ray: an engine, and the door through which the front reaches it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ray

from art_ray.actors import calls
from art_ray.actors.placement import Placed, ended, host_for_others
from art_ray.serving.adapter import AdapterVersion, LoadedVersion
from art_ray.serving.engine import Engine
from art_ray.serving.spec import Endpoint, EngineSpec

__all__ = ["ReplicaActor", "VLLMActor"]


@ray.remote
class VLLMActor:
    """An `Engine`, reached through Ray. It decides nothing; the engine's own processes end with it."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = Engine(dataclasses.replace(spec, host=host_for_others()))

    async def start(self) -> Endpoint:
        """Starts the engine; returns where its door is once it answers."""
        return await self._engine.start()

    async def stage(self, adapter: AdapterVersion) -> None:
        """Checks a version and writes what loading it needs."""
        await self._engine.stage(adapter)

    async def load(self, adapter: AdapterVersion) -> LoadedVersion:
        """Loads a version and checks it."""
        return await self._engine.load(adapter)

    async def unload(self, step: int) -> None:
        """Unloads a version."""
        await self._engine.unload(step)

    async def probe(self) -> None:
        """Has the engine compute one token."""
        await self._engine.probe()

    async def sleep(self) -> None:
        """Gives the device's memory back."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """Takes the device's memory again."""
        await self._engine.wake()

    async def status(self) -> dict[str, Any]:
        """Returns the versions held, and the engine's health."""
        return self._engine.status()

    async def stop(self) -> None:
        """Ends the engine's processes and removes its files from shared memory."""
        await self._engine.stop()


class ReplicaActor:
    """An `art_ray.serving.fleet.ReplicaPort` whose engine is a `VLLMActor`.

    Args:
        actor: the engine's actor.
        spec: what it serves, with the deadlines of starting, loading and probing.
        stop_s: how long it may take to end by itself.
    """

    def __init__(self, actor: Placed, spec: EngineSpec, *, stop_s: float) -> None:
        self.name = actor.name
        self._actor, self._serving, self._stop_s = actor, spec.serving, stop_s

    async def start(self) -> Endpoint:
        """Starts the engine."""
        timeout_s = self._serving.start_timeout_s + self._stop_s  # the engine's own deadline tells more
        endpoint: Endpoint = await self._answer("start", "the first answer of the engine", timeout_s)
        return endpoint

    async def stage(self, version: Any) -> None:
        """Has the engine check a version, which is a reference in a tuple: nobody fetches it on the way."""
        await self._answer("stage", "a version to be checked", self._serving.load_timeout_s, *version)

    async def load(self, version: Any) -> LoadedVersion:
        """Has the engine load a version."""
        timeout_s = self._serving.load_timeout_s
        loaded: LoadedVersion = await self._answer("load", "a version to be served", timeout_s, *version)
        return loaded

    async def unload(self, step: int) -> None:
        """Has the engine unload a version."""
        await self._answer("unload", f"version {step} to be unloaded", self._serving.load_timeout_s, step)

    async def probe(self) -> None:
        """Has the engine compute one token."""
        await self._answer("probe", "one token", self._serving.probe_timeout_s)

    async def sleep(self) -> None:
        """Has the engine give its memory back."""
        await self._answer("sleep", "the engine's memory", self._serving.load_timeout_s)

    async def wake(self) -> None:
        """Has the engine take its memory again."""
        await self._answer("wake", "the engine's weights", self._serving.load_timeout_s)

    async def end(self) -> None:
        """Ends the actor with the engine's processes."""
        await ended(self._actor, self._stop_s)

    async def _answer(self, method: str, waiting_for: str, timeout_s: float, *arguments: Any) -> Any:
        ref = getattr(self._actor.handle, method).remote(*arguments)
        return await calls.answer(ref, self._actor.wait(method, waiting_for, timeout_s))
