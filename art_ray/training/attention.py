"""Attention over prefix trees, as an attention function that transformers calls in every layer.

transformers lets a program register attention functions by name and hands further keyword arguments of the forward pass
on to them. So the model stays unchanged, and the tree travels as the argument `tree`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from art_ray.errors import ConfigError

__all__ = ["NAME", "Block", "Tree", "register", "visible"]

NAME = "art_ray_tree"
"""Under which the function is registered."""


_BLOCK_TOKENS = 128
"""Queries of one block on a CPU. Measured on 2 cores (2026-12-01), SmolLM2-135M in float32, a row of 636 tokens in 4
trees: forward and backward of a layer take 18 ms with one mask over the row, 4.6 ms in blocks of 128. Other sizes were
not compared."""


@dataclass(frozen=True)
class Block:
    """Queries that are neighbours in the row, and all the keys that any of them sees."""

    start: int
    end: int
    keys: slice | Tensor
    """Positions in the row: a slice where they are contiguous, otherwise int64 [S]."""
    bias: Tensor
    """[1, 1, end - start, S]: 0 where the query sees the key, -inf elsewhere; in the dtype of the queries."""


class Tree:
    """The structure of one packed row, on the model's device. What layers share is computed once."""

    def __init__(self, positions: Tensor, subtree_end: Tensor, *, use_flex: bool = False) -> None:
        self.use_flex = use_flex
        """FlexAttention in place of blocks of CPU kernels."""
        self.positions = positions
        """int64 [T], depths."""
        self.subtree_end = subtree_end
        """int64 [T], see `art_ray.training.packing`."""
        self.windows_seen: set[int | None] = set()
        """Sliding windows that layers have asked for; None is full attention."""
        self._blocks: dict[tuple[int | None, torch.dtype], list[Block]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """Returns blocks that cover the row, for a sliding window (None: none)."""
        self.windows_seen.add(window)
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = [
                self._block(start, end, window, dtype) for start, end in _cuts(self.positions.tolist())
            ]
        return self._blocks[window, dtype]

    def block_mask(self, window: int | None) -> BlockMask:
        """Returns the same for FlexAttention."""
        self.windows_seen.add(window)
        if window not in self._block_masks:
            positions, subtree_end = self.positions, self.subtree_end

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                del batch, head
                seen = (key <= query) & (query < subtree_end[key])
                return seen if window is None else seen & (positions[query] - positions[key] < window)

            length = len(positions)
            self._block_masks[window] = create_block_mask(sees, 1, 1, length, length, device=positions.device)
        return self._block_masks[window]

    def _block(self, start: int, end: int, window: int | None, dtype: torch.dtype) -> Block:
        mask = visible(self.positions, self.subtree_end, window, start, end)
        keys = mask.any(0).nonzero()[:, 0]
        first, last = int(keys[0]), int(keys[-1])
        mask = mask[:, keys]
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))[None, None]
        contiguous = last - first + 1 == len(keys)
        return Block(start, end, slice(first, last + 1) if contiguous else keys, bias)


def _cuts(positions: list[int]) -> list[tuple[int, int]]:
    """Cuts a row where a tree begins, and where a block is full: at the last fork inside it, if there is one."""
    forks = [i for i, depth in enumerate(positions) if i == 0 or depth != positions[i - 1] + 1]
    cuts, start = [], 0
    for end in [*(i for i in forks if i and positions[i] == 0), len(positions)]:
        while end - start > _BLOCK_TOKENS:
            inside = [fork for fork in forks if start < fork <= start + _BLOCK_TOKENS]
            cut = inside[-1] if inside else start + _BLOCK_TOKENS
            cuts.append((start, cut))
            start = cut
        cuts.append((start, end))
        start = end
    return cuts


def visible(
    positions: Tensor, subtree_end: Tensor, window: int | None, start: int = 0, end: int | None = None
) -> Tensor:
    """Returns a bool mask [Q, end]: whether token q (row) of the queries [start, end) sees token k (column).

    That is: k is q or before it on its path, and, with a sliding window, fewer than `window` tokens before it.
    """
    end = len(positions) if end is None else end
    query = torch.arange(start, end, device=positions.device)[:, None]
    key = torch.arange(end, device=positions.device)[None, :]
    mask = (key <= query) & (query < subtree_end[None, :end])
    if window is not None:
        mask &= positions[start:end, None] - positions[None, :end] < window
    return mask


class _BlockAttention(torch.autograd.Function):
    """Torch's CPU flash kernels, block by block, so that no time goes to pairs of blocks that do not see each other."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block], scale: float) -> Tensor:
        _, heads, num_tokens, size = query.shape
        output = query.new_empty(1, num_tokens, heads, size)
        normalizers = []
        for block in blocks:
            part, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, block.start : block.end],
                key[:, :, block.keys],
                value[:, :, block.keys],
                attn_mask=block.bias,
                scale=scale,
            )
            output[:, block.start : block.end] = part.transpose(1, 2)
            normalizers.append(normalizer)
        ctx.save_for_backward(query, key, value, output, *normalizers)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, *normalizers = ctx.saved_tensors
        dtype = query.dtype
        # In float32 whatever the dtype: the kernel's own bfloat16 backward is 3 to 5 times slower.
        query, key, value = query.float(), key.float(), value.float()
        output, grad = output.float().transpose(1, 2), grads[0].float().transpose(1, 2)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block, normalizer in zip(ctx.blocks, normalizers, strict=True):
            own = slice(block.start, block.end)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, own],
                query[:, :, own],
                key[:, :, block.keys],
                value[:, :, block.keys],
                output[:, :, own],
                normalizer,
                0.0,
                False,
                attn_mask=block.bias.float(),
                scale=ctx.scale,
            )
            grad_query[:, :, own] = parts[0]
            for total, part in zip((grad_key, grad_value), parts[1:], strict=True):
                if isinstance(block.keys, slice):
                    total[:, :, block.keys] += part
                else:
                    total.index_add_(2, block.keys, part)
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), None, None


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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree.use_flex:
        # Heads [1, heads, T, D] -> [1, T, heads, D], which the projection after it flattens.
        attended: Tensor = _flex(query.is_cuda)(
            query, key, value, block_mask=tree.block_mask(sliding_window), scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2), None
    output: Tensor = _BlockAttention.apply(query, key, value, tree.blocks(sliding_window, query.dtype), scale)
    return output, None


@cache
def _flex(compiled: bool) -> Any:
    # Uncompiled, as on a CPU, it computes all pairs, and has no backward pass: for tests of the forward pass alone.
    return torch.compile(flex_attention) if compiled else flex_attention


def register() -> str:
    """Makes the function known to transformers; returns its name. Repeating it changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    return NAME
