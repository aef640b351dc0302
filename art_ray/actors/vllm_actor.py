"""One serving replica behind Ray: an engine and its OpenAI endpoint in the actor's event loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import ray

from art_ray.serving.adapter import AdapterVersion, LoadedVersion
from art_ray.serving.engine import Engine
from art_ray.serving.spec import Endpoint, EngineSpec

__all__ = ["VLLMActor"]


@ray.remote
class VLLMActor:
    """An `Engine`, reached through Ray. It decides nothing; the engine's own processes end with it."""

    def __init__(self, spec: EngineSpec) -> None:
        # On one machine nobody else has to reach the engine; on several, rollouts run on other nodes.
        alone = len(ray.nodes()) == 1
        host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._engine = Engine(dataclasses.replace(spec, host=host))

    async def start(self) -> Endpoint:
        """Starts the engine; returns where its API is once it answers."""
        return await self._engine.start()

    async def load(self, adapter: AdapterVersion) -> LoadedVersion:
        """Loads a version, checks it, and makes it the current one."""
        return await self._engine.load(adapter)

    async def status(self) -> dict[str, Any]:
        """Returns the versions held, the requests in flight, and the engine's health."""
        return self._engine.status()

    async def stop(self) -> None:
        """Ends the engine's processes and removes its files from shared memory."""
        await self._engine.stop()
