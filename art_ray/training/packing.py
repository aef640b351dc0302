"""Packing: the sequences of a step as prefix trees, so that every shared token is computed once.

Sequences in lexicographic order put everything that shares a prefix side by side, so that a tree is nothing but the
sorted list and the length of the prefix that each sequence shares with the one before::

    sequence       shared   new tokens in the row          path (positions in the row)
    A B C D          0      A B C D    at 0 1 2 3          0 1 2 3
    A B C E F        3      E F        at 4 5              0 1 2 4 5
    A B G            2      G          at 6                0 1 6

A row is the concatenation of the new tokens: the tree in depth-first order. There the subtree of a token is the
range from itself to `subtree_end`, and one token sees another exactly if it lies in the other's subtree::

    visible[q, k] = k <= q < subtree_end[k]

That one array is the whole block mask. Positions for the rotary embedding are depths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_ray.training.samples import TrainingSample

__all__ = ["PackedRow", "TrainingBatch", "deal", "pack", "pack_row", "shared_prefixes"]


@dataclass(frozen=True)
class PackedRow:
    """What one forward pass sees. T tokens; K targets: one for each trained token of each sequence."""

    tokens: npt.NDArray[np.int64]
    """[T], depth first."""
    positions: npt.NDArray[np.int64]
    """[T], depth in the tree: the position of the token in each of its sequences."""
    subtree_end: npt.NDArray[np.int64]
    """[T], the position in the row behind the last token that has this one before it."""
    sources: npt.NDArray[np.int64]
    """[K], the position in the row whose output predicts the target; rising."""
    targets: npt.NDArray[np.int64]
    """[K], the sampled token."""
    logprobs: npt.NDArray[np.float32]
    """[K], under the policy that sampled it; NaN: unknown, the ratio is 1."""
    temperatures: npt.NDArray[np.float32]
    """[K]"""
    advantages: npt.NDArray[np.float32]
    """[K]"""
    sequences: npt.NDArray[np.int64]
    """[K], which of the row's `num_sequences` sequences the target belongs to. A sequence is never split."""
    num_sequences: int
    num_tokens_submitted: int
    """Tokens of the row's sequences, each counted in full."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TrainingBatch:
    """What one optimizer step sees, on all ranks together."""

    rows: list[PackedRow]
    num_trained_tokens: int
    """The denominator of token losses."""
    num_sequences: int
    """The denominator of sequence losses."""
    num_tokens_submitted: int
    num_tokens_unique: int
    """Nodes of the prefix trees: what an unlimited row would compute."""

    @property
    def num_tokens_packed(self) -> int:
        """What is computed: unique tokens, and the paths that a split repeats."""
        return sum(map(len, self.rows))


def shared_prefixes(sequences: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Returns how many leading tokens each of the sorted sequences shares with the one before; 0 for the first."""
    shared = [0] * len(sequences)
    for i in range(1, len(sequences)):
        before, after = sequences[i - 1], sequences[i]
        length = min(len(before), len(after))
        differing = np.flatnonzero(before[:length] != after[:length])
        shared[i] = int(differing[0]) if len(differing) else length
    return shared


def pack(samples: Sequence[TrainingSample], max_tokens: int, num_rows: int = 1) -> TrainingBatch:
    """Packs the sequences of one optimizer step into rows.

    The result does not depend on the order of `samples`. A tree that is larger than a row is split at its branches,
    from the leaves up: siblings are put together largest first, each into the first bin that holds it, and what
    is left half full is offered again one branch higher. Only the path above a split is repeated.

    Args:
        samples: at least one.
        max_tokens: of a row; no sequence is longer.
        num_rows: rows wished for at least (the number of ranks), as far as that costs no balance.
    """
    ordered = sorted(samples, key=_order)
    shared = shared_prefixes([sample.tokens for sample in ordered])
    num_unique = sum(len(sample) - common for sample, common in zip(ordered, shared, strict=True))
    longest = max(map(len, ordered))
    capacity = min(max_tokens, max(longest, -(-num_unique // num_rows)))
    bins = _split(0, len(ordered), 0, [len(sample) for sample in ordered], shared, capacity)
    rows = [pack_row([ordered[i] for i in sorted(members)]) for _, members in bins]
    return TrainingBatch(
        rows=rows,
        num_trained_tokens=sum(sample.num_trained for sample in ordered),
        num_sequences=sum(sample.num_trained > 0 for sample in ordered),
        num_tokens_submitted=sum(map(len, ordered)),
        num_tokens_unique=num_unique,
    )


def _order(sample: TrainingSample) -> tuple[bytes, bytes, float]:
    # Big-endian bytes compare as the token ids do. What follows only makes the order of equal sequences definite.
    return sample.tokens.astype(">u4").tobytes(), sample.logprobs.tobytes(), sample.advantage


_Bin = tuple[int, list[int]]
"""(tokens below the branch, sequences)."""


def _split(start: int, end: int, depth: int, lengths: list[int], shared: list[int], capacity: int) -> list[_Bin]:
    """Returns bins for the subtree of the sequences [start, end), all equal up to `depth`; sizes count from there.

    Walks down iteratively while there is no branch, so that depth of recursion is the number of branches on a path.
    """
    size = lengths[start] - depth + sum(lengths[i] - shared[i] for i in range(start + 1, end))
    if depth + size <= capacity or end - start == 1:
        return [(size, list(range(start, end)))]
    branch = min(shared[start + 1 : end])  # the first depth at which they part
    cuts = [start, *(i for i in range(start + 1, end) if shared[i] == branch), end]
    pieces = [
        piece
        for first, last in itertools.pairwise(cuts)
        for piece in _split(first, last, branch, lengths, shared, capacity)
    ]
    pieces.sort(key=lambda piece: (-piece[0], piece[1][0]))
    bins: list[_Bin] = []
    for tokens, members in pieces:
        for position, (used, inside) in enumerate(bins):
            if branch + used + tokens <= capacity:
                bins[position] = (used + tokens, inside + members)
                break
        else:
            bins.append((tokens, members))
    return [(branch - depth + used, members) for used, members in bins]


def pack_row(samples: Sequence[TrainingSample]) -> PackedRow:
    """Returns the prefix trees of `samples`, which are sorted by their tokens, as one row."""
    shared = shared_prefixes([sample.tokens for sample in samples])
    num_tokens = sum(len(sample) - common for sample, common in zip(samples, shared, strict=True))
    subtree_end = np.full(num_tokens, num_tokens, dtype=np.int64)
    path = np.zeros(0, dtype=np.int64)
    sources, used = [], 0
    for sample, common in zip(samples, shared, strict=True):
        subtree_end[path[common:]] = used
        path = np.concatenate([path[:common], np.arange(used, used + len(sample) - common)])
        used += len(sample) - common
        sources.append(path[np.flatnonzero(sample.trained) - 1])
    source = np.concatenate(sources)
    order = np.argsort(source, kind="stable")
    return PackedRow(
        tokens=np.concatenate([sample.tokens[common:] for sample, common in zip(samples, shared, strict=True)]),
        positions=np.concatenate([np.arange(common, len(s)) for s, common in zip(samples, shared, strict=True)]),
        subtree_end=subtree_end,
        sources=source[order],
        targets=np.concatenate([sample.tokens[sample.trained] for sample in samples])[order],
        logprobs=np.concatenate([sample.logprobs[sample.trained] for sample in samples])[order],
        temperatures=np.concatenate([sample.temperatures[sample.trained] for sample in samples])[order],
        advantages=np.concatenate([np.full(s.num_trained, s.advantage, dtype=np.float32) for s in samples])[order],
        sequences=np.concatenate([np.full(s.num_trained, i, dtype=np.int64) for i, s in enumerate(samples)])[order],
        num_sequences=len(samples),
        num_tokens_submitted=sum(map(len, samples)),
    )


def deal(rows: Sequence[PackedRow], world_size: int) -> list[list[PackedRow]]:
    """Deals rows out to ranks: the largest first, each to the rank with the fewest tokens so far."""
    hands: list[list[PackedRow]] = [[] for _ in range(world_size)]
    for row in sorted(rows, key=len, reverse=True):
        min(hands, key=lambda hand: sum(map(len, hand))).append(row)
    return hands
