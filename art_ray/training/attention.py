"""Attention over prefix trees, as an attention function that transformers calls in every layer.

transformers lets a program register attention functions by name and hands further keyword arguments of the forward pass
on to them. So the model stays unchanged, and the tree travels as the argument `tree`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from art_ray.errors import ConfigError

__all__ = ["NAME", "Tree", "register", "visible"]

NAME = "art_ray_tree"
"""Under which the function is registered."""


@dataclass
class Tree:
    """The structure of one packed row, on the model's device."""

    positions: Tensor
    """int64 [T], depths."""
    subtree_end: Tensor
    """int64 [T], see `art_ray.training.packing`."""

    def __post_init__(self) -> None:
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """Returns the bool mask [1, 1, T, T] for a sliding window (None: none), built once per row and window."""
        if window not in self._masks:
            self._masks[window] = visible(self.positions, self.subtree_end, window)[None, None]
        return self._masks[window]


def visible(positions: Tensor, subtree_end: Tensor, window: int | None) -> Tensor:
    """Returns a bool mask [T, T]: whether token q (row) sees token k (column).

    That is: k is q or before it on its path, and, with a sliding window, fewer than `window` tokens before it.
    """
    index = torch.arange(len(positions), device=positions.device)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
    if window is not None:
        mask &= positions[:, None] - positions[None, :] < window
    return mask


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer. query [1, heads, T, D]; key, value [1, key heads, T, D]; returns [1, T, heads, D].

    Raises:
        ConfigError: the architecture asks for something that this function does not compute.
    """
    del module, attention_mask, unused
    if softcap is not None or s_aux is not None or dropout:
        raise ConfigError("capped attention scores, attention sinks and attention dropout cannot be trained here")
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=tree.mask(sliding_window), scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return output.transpose(1, 2), None


def register() -> str:
    """Makes the function known to transformers; returns its name. Repeating it changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    return NAME
