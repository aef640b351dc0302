import random

import pytest
import tic_tac_toe as game


@pytest.mark.parametrize(
    ("board", "result"),
    [
        ("xxx.o.o..", "x"),
        ("o..xo.x.o", "o"),
        ("x..xo.xo.", "x"),
        ("xoxxoxoxo", "draw"),
        ("xoxxoxox.", None),
        (game.EMPTY, None),
    ],
)
def test_three_in_a_line_win_and_a_full_board_is_a_draw(board, result):
    assert game.result_of(board) == result


def test_a_taken_square_cannot_be_played():
    board = game.played(game.EMPTY, 4, "x")
    assert game.free_squares(board) == [0, 1, 2, 3, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="square 4"):
        game.played(board, 4, "o")


def test_the_perfect_opponent_wins_where_it_can_and_else_defends():
    dice = random.Random(0)
    assert game.answer_of("perfect", "oo.xx...x", dice) == 2
    assert game.answer_of("perfect", "xx..o....", dice) == 2


def test_nobody_beats_the_perfect_opponent():
    assert game.value_of(game.EMPTY, "x") == game.value_of(game.EMPTY, "o") == 0
    for seed in range(200):
        dice, board = random.Random(seed), game.EMPTY
        while game.result_of(board) is None:
            board = game.played(board, dice.choice(game.free_squares(board)), "x")
            if game.result_of(board) is None:
                board = game.played(board, game.answer_of("perfect", board, dice), "o")
        assert game.result_of(board) in ("o", "draw")


def test_the_random_opponent_plays_every_free_square():
    board = "xo.xo...."
    assert {game.answer_of("random", board, random.Random(seed)) for seed in range(100)} == {2, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("answer", "square"), [("5", 4), ("I take 9.", 8), ("0 or 1", 0), ("12", None), ("five", None), ("", None)]
)
def test_the_first_number_of_a_square_counts(answer, square):
    assert game.square_in(answer) == square


def test_the_examples_in_the_prompt_are_free_squares_of_boards_as_they_are_drawn():
    for drawn, answer in game.EXAMPLES:
        board = "".join("." if mark.isdigit() else mark.lower() for mark in drawn.split())
        assert game.drawn(board) == drawn
        assert game.square_in(answer) in game.free_squares(board)
