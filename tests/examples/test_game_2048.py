import random

import game_2048 as game
import pytest

BOARD = ((2, 2, 0), (0, 4, 4), (8, 0, 8))


@pytest.mark.parametrize(
    ("row", "after"),
    [
        ((0, 0, 2), (2, 0, 0)),
        ((2, 2, 2), (4, 2, 0)),
        ((2, 2, 2, 2), (4, 4, 0, 0)),
        ((4, 2, 2), (4, 4, 0)),
        ((2, 0, 2), (4, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((2, 4, 8), (2, 4, 8)),
    ],
)
def test_a_tile_merges_once_with_an_equal_one_that_it_meets(row, after):
    assert game.merged(row) == after


def test_each_move_slides_its_way():
    assert game.moved(BOARD, "left") == ((4, 0, 0), (8, 0, 0), (16, 0, 0))
    assert game.moved(BOARD, "right") == ((0, 0, 4), (0, 0, 8), (0, 0, 16))
    assert game.moved(BOARD, "up") == ((2, 2, 4), (8, 4, 8), (0, 0, 0))
    assert game.moved(BOARD, "down") == ((0, 0, 0), (2, 2, 4), (8, 4, 8))
    with pytest.raises(ValueError, match="sideways"):
        game.moved(BOARD, "sideways")


def test_a_move_that_changes_nothing_is_not_legal():
    assert game.legal_moves(((2, 0), (0, 0))) == ["down", "right"]
    assert game.legal_moves(((2, 4), (4, 2))) == []


def test_a_new_tile_falls_on_an_empty_square_and_the_same_dice_fall_the_same():
    board = ((2, 0), (4, 8))
    for seed in range(50):
        after = game.with_new_tile(board, random.Random(seed))
        assert after[0][1] in (2, 4)
        assert after == ((2, after[0][1]), (4, 8))
    begun = [game.started(3, random.Random(seed)) for seed in (1, 1, 2)]
    assert begun[0] == begun[1] != begun[2]
    assert sum(tile > 0 for row in begun[0] for tile in row) == 2


@pytest.mark.parametrize(
    ("answer", "move"),
    [("left", "left"), ("I go UP, not down", "up"), ("Right.", "right"), ("upwards", None), ("", None)],
)
def test_the_first_word_that_is_a_move_counts(answer, move):
    assert game.move_in(answer) == move


def test_the_reward_is_half_for_legal_moves_and_half_for_the_largest_tile():
    of = game.Game(seed=0, size=3, turns=4, goal=16)
    small, goal, beyond = ((2, 4), (0, 0)), ((16, 0), (0, 0)), ((64, 0), (0, 0))
    assert game.reward_of(0, small, of) == 0
    assert game.reward_of(2, small, of) == 0.25
    assert game.reward_of(4, ((8, 0), (0, 0)), of) == 0.75
    assert game.reward_of(4, goal, of) == game.reward_of(4, beyond, of) == 1
    assert game.reward_of(0, ((2, 2), (0, 0)), of) == 0


def test_the_examples_in_the_prompt_are_legal_moves():
    for drawn, move in game.EXAMPLES:
        board = tuple(tuple(0 if tile == "." else int(tile) for tile in row.split()) for row in drawn.splitlines())
        assert game.drawn(board) == drawn
        assert move in game.legal_moves(board)
