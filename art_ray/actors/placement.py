"""Where actors go, and whether the cluster can hold them at all: asked first, so that nobody waits for ever."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from art_ray.actors import calls
from art_ray.actors.calls import Wait
from art_ray.errors import ActorError, ConfigError, DeadlineError, ResourcesError

__all__ = ["Placed", "driver_node", "ended", "host_for_others", "num_gpus", "placed", "require"]

logger = logging.getLogger(__name__)


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


def host_for_others() -> str:
    """Returns the address to listen on here: loopback on a cluster of one node, otherwise the node's own."""
    alone = sum(node["Alive"] for node in ray.nodes()) == 1
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())


def num_gpus() -> float:
    """Returns how many GPUs the cluster has."""
    return float(ray.cluster_resources().get("GPU", 0))


def placed(actor: Any, name: str, *arguments: Any, node: str = "?", **options: Any) -> Placed:
    """Creates a named actor of this job.

    Args:
        actor: the actor's class, as `ray.remote` made it.
        name: unique among the job's living actors; the Ray dashboard shows it.
        arguments: of its constructor.
        node: where it will run, if that is known.
        options: of Ray, such as `num_cpus`.

    Raises:
        ConfigError: an actor of that name lives: a model of the same project and name is registered in this process.
    """
    try:
        return Placed(actor.options(name=name, **options).remote(*arguments), name, node)
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise ConfigError(
            f"there is an actor {name!r} already: a model of this project and name is registered with another backend "
            "of this process, or under another base path. Use that one, close its backend, or take another name"
        ) from error


async def ended(actor: Placed, stop_s: float) -> None:
    """Has an actor stop by itself, and ends it if it has not after `stop_s` seconds. Never raises."""
    try:
        wait = actor.wait("stop", "its processes to end", stop_s)
        await calls.answer(actor.handle.stop.remote(), wait)
    except (ActorError, DeadlineError) as error:
        logger.debug("%s did not stop by itself: %s", actor.name, error)
    finally:
        ray.kill(actor.handle)


def require(
    asked: Mapping[str, Mapping[str, float]], beside: Sequence[Mapping[str, Mapping[str, float]]] = ()
) -> dict[str, str]:
    """Checks that each actor fits on some node, beside those that were fitted before it.

    Args:
        asked: for each actor's name, its resources, such as `{"CPU": 1, "GPU": 1}`.
        beside: the same of actors that stay.

    Returns:
        The address of a node for each actor. Ray may choose another one.

    Raises:
        ResourcesError: says for each resource how much is asked for, present and missing, and by whom; or which actor
            fits on no single node.
    """
    nodes = {node["NodeManagerAddress"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    asked = {name: resources for group in (*beside, asked) for name, resources in group.items()}
    _require_sum(asked, nodes)
    placed_on: dict[str, str] = {}
    for name, resources in sorted(asked.items(), key=lambda item: -sum(item[1].values())):
        for address, free in nodes.items():
            if all(free.get(resource, 0) >= amount for resource, amount in resources.items()):
                for resource, amount in resources.items():
                    free[resource] -= amount
                placed_on[name] = address
                break
        else:
            left = "; ".join(f"{address}: {_shown(free)}" for address, free in nodes.items())
            raise ResourcesError(
                f"{name} asks for {_shown(resources)} on one node, and no node has that left beside the other actors "
                f"({left}). Add a larger node, or ask for less per actor (ServingConfig(tensor_parallel=…))."
            )
    return placed_on


def _require_sum(asked: Mapping[str, Mapping[str, float]], nodes: Mapping[str, Mapping[str, float]]) -> None:
    present, total = Counter[str](), Counter[str]()
    for resources in nodes.values():
        present.update(resources)
    for resources in asked.values():
        total.update(resources)
    short = {name: amount for name, amount in total.items() if amount > present[name]}
    if not short:
        return
    lines = [
        f"  {name}: asked {amount:g}, present {present[name]:g}, missing {amount - present[name]:g} "
        f"({', '.join(f'{who} {r[name]:g}' for who, r in asked.items() if name in r)})"
        for name, amount in short.items()
    ]
    raise ResourcesError(
        "the cluster cannot hold the actors:\n"
        + "\n".join(lines)
        + "\nAdd nodes, or ask for fewer ranks (TrainerConfig) or devices (ServingConfig), where that is more than one."
    )


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU") if name in resources)
