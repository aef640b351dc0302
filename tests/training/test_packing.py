"""Prefix trees and rows, without torch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from art_ray.training.packing import PackedRow, deal, pack, pack_row
from tests.training.made import sample


def ancestors(row: PackedRow, position: int) -> list[int]:
    """Positions in the row that `position` sees, itself included."""
    return [k for k in range(position + 1) if position < row.subtree_end[k]]


def test_the_example_of_the_module_packs_as_it_says():
    row = pack_row([sample([1, 2, 3, 4], [3]), sample([1, 2, 3, 5, 6], [4]), sample([1, 2, 7], [2])])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.positions.tolist() == [0, 1, 2, 3, 3, 4, 2]
    assert row.subtree_end.tolist() == [7, 7, 6, 4, 6, 6, 7]
    assert (row.sources.tolist(), row.targets.tolist()) == ([1, 2, 4], [7, 4, 6])
    assert row.sequences.tolist() == [2, 0, 1]


def test_equal_sequences_are_computed_once_and_both_trained():
    batch = pack([sample([1, 2, 3], [2], 1.0), sample([1, 2, 3], [2], -1.0)], 10)
    assert batch.num_tokens_packed == 3
    assert sorted(batch.rows[0].advantages.tolist()) == [-1.0, 1.0]
    assert batch.num_trained_tokens == 2


def test_a_sequence_that_is_the_beginning_of_another_costs_nothing():
    batch = pack([sample([1, 2, 3, 4], [3]), sample([1, 2], [1])], 10)
    assert batch.rows[0].tokens.tolist() == [1, 2, 3, 4]
    assert sorted(zip(batch.rows[0].sources.tolist(), batch.rows[0].targets.tolist(), strict=True)) == [(0, 2), (2, 4)]


def test_a_tree_larger_than_a_row_is_split_at_its_branch_and_repeats_only_the_path_above():
    stem = list(range(10))
    batch = pack([sample([*stem, 100 + i, *range(200, 204)], [11]) for i in range(4)], 20)
    assert [len(row) for row in batch.rows] == [20, 20]
    assert batch.num_tokens_unique == 30
    assert batch.num_tokens_packed == 40


def test_a_lower_branch_is_split_before_an_upper_one():
    # Two conversations of one prompt, each forked again: the lower stems stay whole.
    samples = [sample([0, 0, 10 + i, 11, 12, 20 + j, 21], [6]) for i in range(2) for j in range(2)]
    batch = pack(samples, 9)
    assert sorted(len(row) for row in batch.rows) == [9, 9]
    assert {tuple(sorted(set(row.tokens.tolist()) & {10, 11})) for row in batch.rows} == {(10, 11), (11,)}


trees = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(tokens=trees, extra=st.integers(0, 20), ranks=st.integers(1, 4), seed=st.integers(0, 1000))
def test_every_sequence_is_found_again_in_exactly_one_row(tokens, extra, ranks, seed):
    samples = [sample(t, range(1, len(t)), advantage=float(i)) for i, t in enumerate(tokens)]
    max_tokens = max(map(len, tokens)) + extra
    batch = pack(samples, max_tokens, ranks)
    found: dict[float, list[int]] = {}
    for row in batch.rows:
        assert len(row) <= max_tokens
        for number in range(row.num_sequences):
            chosen = row.sequences == number
            last_source = int(row.sources[chosen][-1])
            path = ancestors(row, last_source)
            assert row.positions[path].tolist() == list(range(len(path)))
            advantage = float(row.advantages[chosen][0])
            assert advantage not in found
            found[advantage] = [*row.tokens[path].tolist(), int(row.targets[chosen][-1])]
    assert found == {float(i): t for i, t in enumerate(tokens)}
    prefixes = {tuple(t[: i + 1]) for t in tokens for i in range(len(t))}
    assert batch.num_tokens_unique == len(prefixes)
    assert batch.num_tokens_packed >= batch.num_tokens_unique

    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    again = pack(shuffled, max_tokens, ranks)
    assert [row.tokens.tolist() for row in again.rows] == [row.tokens.tolist() for row in batch.rows]


def test_rows_are_dealt_by_tokens_the_largest_first():
    rows = [pack_row([sample(list(range(n)), [1])]) for n in (3, 9, 4, 5)]
    hands = deal(rows, 2)
    assert [[len(row) for row in hand] for hand in hands] == [[9, 3], [5, 4]]
    assert deal(rows[:1], 2)[1] == []
