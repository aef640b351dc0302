"""Where actors go, and whether the cluster can hold them at all: asked first, so that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from art_ray.actors.calls import Wait
from art_ray.errors import ConfigError, ResourcesError

__all__ = ["Placed", "driver_node", "placed", "require", "with_gpus"]


@dataclass(frozen=True)
class Placed:
    """An actor and where it runs."""

    handle: Any
    name: str
    node: str = "?"

    def wait(self, method: str, waiting_for: str, timeout_s: float) -> Wait:
        """Returns the description of a wait for `method` of this actor."""
        return Wait(self.name, method, self.node, waiting_for, timeout_s)


def driver_node() -> NodeAffinitySchedulingStrategy:
    """Returns the strategy that pins an actor to the node of the caller."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def with_gpus() -> bool:
    """Returns whether any node of the cluster has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def placed(actor: Any, name: str, *arguments: Any, node: str = "?", **options: Any) -> Placed:
    """Creates a named actor of this job.

    Args:
        actor: the actor's class, as `ray.remote` made it.
        name: unique among the job's living actors; the Ray dashboard shows it.
        arguments: of its constructor.
        node: where it will run, if that is known.
        options: of Ray, such as `num_cpus`.

    Raises:
        ConfigError: an actor of that name lives: the same model is registered with another backend of this job.
    """
    try:
        return Placed(actor.options(name=name, **options).remote(*arguments), name, node)
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise ConfigError(
            f"there is an actor {name!r} already: the model is registered with another backend of this process. "
            "Use that backend, close it first, or give the model another name"
        ) from error


def require(asked: Mapping[str, Mapping[str, float]]) -> None:
    """Checks that the cluster as a whole has what the actors ask for.

    Args:
        asked: for each actor's name, its resources, such as `{"CPU": 1, "GPU": 1}`.

    Raises:
        ResourcesError: says for each resource how much is asked for, present and missing, and by whom.
    """
    present = ray.cluster_resources()
    total: dict[str, float] = {}
    for resources in asked.values():
        for resource, amount in resources.items():
            total[resource] = total.get(resource, 0) + amount
    short = {name: amount for name, amount in total.items() if amount > present.get(name, 0)}
    if not short:
        return
    lines = [
        f"  {name}: asked {amount:g}, present {present.get(name, 0):g}, missing {amount - present.get(name, 0):g} "
        f"({', '.join(f'{who} {r[name]:g}' for who, r in asked.items() if name in r)})"
        for name, amount in short.items()
    ]
    raise ResourcesError(
        "the cluster cannot hold the actors:\n"
        + "\n".join(lines)
        + "\nAdd nodes, or ask for less (RayBackend(serving=ServingConfig(replicas=…, tensor_parallel=…)))."
    )
