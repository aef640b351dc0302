"""Several trainers that share a step: thin words for torch.distributed, and the same words for one trainer alone."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from art_ray.errors import ArtRayError, TrainingError
from art_ray.training.config import RankSettings

__all__ = ["Ranks", "open_group", "served_store"]

T = TypeVar("T")


class Ranks:
    """The place of this process among the trainers of one policy.

    Every method is a meeting: all ranks call it in the same order, and one that waits longer than the deadline raises.
    """

    def __init__(self, place: RankSettings, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._device = device
        if self.world_size == 1:
            return
        open_group(place, device, timeout_s)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks, in one message; all of one dtype and device."""
        tensors = list(tensors)
        if self.world_size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._meet("summing", lambda: dist.all_reduce(flat))
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def on_first(self, work: Callable[[], T]) -> T:
        """Does `work` on the first rank alone; returns its value, which pickles, or raises its error, on all.

        Among several ranks an error that is none of ours arrives as a `TrainingError`, which pickles.
        """
        if self.world_size == 1:
            return work()
        box: list[T | ArtRayError | None] = [None]
        if self.is_first:
            try:
                box = [work()]
            except ArtRayError as error:
                box = [error]
            except Exception as error:  # raised here alone, it would leave the others waiting
                failure = TrainingError(f"rank 0 failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                box = [failure]
        self._meet("a broadcast", lambda: dist.broadcast_object_list(box, src=0, device=self._device))
        if isinstance(box[0], ArtRayError):
            raise box[0]
        return cast(T, box[0])

    def gathered(self, value: T) -> list[T]:
        """Returns every rank's `value`, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        self._meet("a gathering", lambda: dist.all_gather_object(values, value))
        return values

    def close(self) -> None:
        """Leaves the group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _meet(self, what: str, meeting: Callable[[], object]) -> None:
        try:
            meeting()
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self.rank} of {self.world_size} lost the others in {what}; a rank died or is stuck: {error}"
            ) from error


def open_group(place: RankSettings, device: torch.device, timeout_s: float) -> None:
    """Joins the group of ranks, through which tensors of the CPU travel as well as those of `device`.

    Raises:
        TrainingError: the others were not found in time.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            **_meeting(str(place.init_method), timeout),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # DistError and its kin are RuntimeErrors
        raise TrainingError(
            f"rank {place.rank} of {place.world_size} did not find the others at {place.init_method}: {error}"
        ) from error


def served_store(host: str) -> dist.TCPStore:
    """Returns a store that listens on a free port of `host` (`.port`), for ranks to meet at `store://host:port`.

    The port is bound before anybody is told, so that no other process can take it in between.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _meeting(init_method: str, timeout: datetime.timedelta) -> dict[str, Any]:
    if not init_method.startswith("store://"):
        return {"init_method": init_method}
    host, port = init_method.removeprefix("store://").rsplit(":", 1)
    return {"store": dist.TCPStore(host, int(port), is_master=False, timeout=timeout)}
