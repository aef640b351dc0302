"""The fleet behind Ray: on the driver's node, with the replicas wherever there is room for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from art_ray.actors import calls
from art_ray.actors.placement import Placed, placed
from art_ray.actors.vllm_actor import ReplicaActor, VLLMActor
from art_ray.serving.adapter import AdapterVersion, LoadedVersion
from art_ray.serving.fleet import Address, Fleet
from art_ray.serving.spec import EngineSpec
from art_ray.training.checkpoint import newest_step, step_dir

__all__ = ["FleetActor", "FleetSpec"]


# driver -> fleet actor
@dataclass(frozen=True)
class FleetSpec:
    """What a fleet serves, and what its replicas ask of Ray."""

    name: str
    """Of the replicas' actors, before their number."""
    engine: EngineSpec
    port: int
    """Kept free by the driver, so that the fleet finds it free again if it has to be restarted."""
    checkpoints_dir: Path
    """Where a restarted fleet finds the version to serve."""
    resources: Mapping[str, float]
    """Of one replica."""
    place_s: float
    """How long a replica's place may take to be found."""
    stop_s: float
    """How long a replica may take to end by itself."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class FleetActor:
    """A `Fleet`, reached through Ray. It decides nothing.

    The replicas' actors belong to it and end with it. Started again by Ray, it starts them anew and serves the newest
    checkpoint, under the same address.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._groups: dict[int, PlacementGroup] = {}
        """Each replica's place, which its successor takes over."""
        self._fleet = Fleet(spec.engine, self._replica, port=spec.port)
        self._stopped = asyncio.Event()

    async def start(self) -> Address:
        """Starts the replicas; returns where the policy is served."""
        return await self._fleet.start()

    async def serve(self) -> None:
        """Returns when the fleet is stopped. Ray calls it again in an actor that it restarted."""
        await self._fleet.start()
        step = newest_step(self._spec.checkpoints_dir)
        if step is not None and self._fleet.status()["current"] is None:
            adapter = AdapterVersion.from_directory(step, step_dir(self._spec.checkpoints_dir, step))
            await self._fleet.publish(step, (ray.put(adapter),))
        await self._stopped.wait()

    async def publish(self, step: int, version: tuple[Any], holder: str | None = None) -> LoadedVersion:
        """Has every replica load a version; see `Fleet.publish`. `version` holds a reference to an `AdapterVersion`."""
        await self._fleet.start()
        return await self._fleet.publish(step, version, holder=holder)

    async def release(self, holder: str) -> None:
        """Ends the leases of `holder`."""
        await self._fleet.release(holder)

    async def sleep(self) -> None:
        """Has the engines give their devices' memory back."""
        await self._fleet.sleep()

    async def wake(self) -> None:
        """Has the engines take their devices' memory again."""
        await self._fleet.wake()

    async def status(self) -> dict[str, Any]:
        """Returns versions, replicas and requests."""
        return self._fleet.status()

    async def stop(self) -> None:
        """Ends the service and every replica."""
        await self._fleet.stop()
        for group in self._groups.values():
            remove_placement_group(group)
        self._stopped.set()

    def _replica(self, index: int, restarts: int) -> _PlacedReplica:
        spec = self._spec
        if index not in self._groups:
            self._groups[index] = placement_group([dict(spec.resources)], strategy="STRICT_PACK")
        is_first = restarts == 0 and not ray.get_runtime_context().was_current_actor_reconstructed
        name = f"{spec.name}:{index}" + ("" if is_first else f":{os.getpid()}.{restarts}")
        # Engines that sample with one seed would give one answer; so would one that is started again.
        engine = spec.engine.with_seed(hash((spec.engine.seed, index, restarts, is_first)))
        actor = placed(
            VLLMActor,
            name,
            engine,
            num_cpus=spec.resources["CPU"],
            num_gpus=spec.resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[index]),
        )
        return _PlacedReplica(actor, spec, self._groups[index])


class _PlacedReplica(ReplicaActor):
    """A replica whose place may have to be found first."""

    def __init__(self, actor: Placed, spec: FleetSpec, group: PlacementGroup) -> None:
        super().__init__(actor, spec.engine, stop_s=spec.stop_s)
        self._group, self._spec = group, spec

    async def start(self) -> Any:
        """Waits for the place, then starts the engine."""
        found = calls.Wait(self.name, "place", "any", f"room for {dict(self._spec.resources)}", self._spec.place_s)
        await calls.answer(self._group.ready(), found)
        return await super().start()
