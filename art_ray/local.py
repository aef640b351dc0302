"""The backend for one machine: development, a laptop, a single GPU server."""

from __future__ import annotations

from typing import Any

from art_ray.ray_backend import RayBackend

__all__ = ["LocalBackend"]


class LocalBackend(RayBackend):
    """A `RayBackend` on a local Ray instance of its own, or on the one that `ray.init()` made in this process.

    Takes what `RayBackend` takes, but for `address`.
    """

    def __init__(self, **options: Any) -> None:
        if "address" in options:
            raise TypeError("LocalBackend has no address: use RayBackend(address=…) to attach to a cluster")
        super().__init__(**options, address="local")
