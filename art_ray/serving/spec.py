"""What an engine is told, and what it answers when it is up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from art_ray.serving.config import ServingConfig

__all__ = ["Endpoint", "EngineSpec"]


# backend ──EngineSpec──> replica
@dataclass(frozen=True)
class EngineSpec:
    """Everything one engine needs to know before its first version."""

    base_model: str
    """A folder, or a hub id; the untrained weights."""
    name: str
    """The policy's name, which requests carry as `model`."""
    api_key: str = field(repr=False)
    """What clients send as bearer token. Made at random for the run."""
    max_lora_rank: int
    """Largest rank of the adapters to come."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    host: str | None = "127.0.0.1"
    """Address to listen on. None: the one by which other machines reach this one."""
    sleeps: bool = False
    """Whether it gives its device's memory back while the trainer works."""
    seed: int = 0
    """Of the engine's sampling. Replicas need different ones, and so does an engine that is started again."""

    def with_seed(self, seed: int) -> EngineSpec:
        """Returns the same with another seed, of which 31 bits count."""
        return replace(self, seed=seed % 2**31)


# replica ──Endpoint──> fleet
@dataclass(frozen=True)
class Endpoint:
    """Where a started engine is reached, and the processes that it consists of."""

    url: str
    """Address of its door, without a path."""
    pid: int
    """The process that holds the door."""
    engine_pids: tuple[int, ...]
    """The processes that it started and that die with it."""
    weights: str
    """How versions are served: "adapter" or "merged"."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    refused_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of a request that would harm the engine, each with the reason."""
