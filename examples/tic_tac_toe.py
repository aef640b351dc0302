"""Teaches a small model to play tic-tac-toe against an opponent that moves at random, or perfectly.

The reward is 1 for a win, 0.7 for a draw and 0.4 for a loss; a move that is none, or on a square that is taken, ends
the game with 0.1 for each legal move before it. Run again, it goes on from the last complete step.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
from dataclasses import dataclass
from typing import Literal

import agent

import art_ray

Board = str
"""Nine squares, row by row: "x", "o", or "." where nobody has played."""
Opponent = Literal["random", "perfect"]

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
REWARDS = {"x": 1.0, "draw": 0.7, "o": 0.4}
REWARD_PER_LEGAL_MOVE = 0.1
SYSTEM = "You play tic-tac-toe as X. Free squares are shown by their number. Answer with the number of one of them."
EXAMPLES = (("1 2 3\n4 5 6\n7 8 9", "5"), ("O 2 3\n4 X 6\n7 8 9", "3"), ("O 2 X\n4 X 6\nO 8 9", "4"))
"""Boards and moves that every conversation begins with: without them a small model says anything but a number."""
OPENING = agent.opening(SYSTEM, EXAMPLES)


# ── the game ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def free_squares(board: Board) -> list[int]:
    """Returns the squares on which nobody has played, counted from 0."""
    return [square for square in range(9) if board[square] == "."]


def played(board: Board, square: int, player: str) -> Board:
    """Returns the board after a player took a free square."""
    if board[square] != ".":
        raise ValueError(f"square {square} of {board!r} is taken")
    return board[:square] + player + board[square + 1 :]


def result_of(board: Board) -> str | None:
    """Returns the winner, "draw", or None while the game goes on."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None if "." in board else "draw"


def drawn(board: Board) -> str:
    """Returns the board as text: marks, and the numbers 1 to 9 of the free squares."""
    squares = [str(n + 1) if mark == "." else mark.upper() for n, mark in enumerate(board)]
    return "\n".join(" ".join(squares[start : start + 3]) for start in (0, 3, 6))


@functools.cache
def value_of(board: Board, player: str) -> int:
    """Returns what `player`, whose turn it is, reaches against the best defence: 1 a win, 0 a draw, -1 a loss."""
    other = "o" if player == "x" else "x"
    match result_of(board):
        case None:
            return max(-value_of(played(board, square, player), other) for square in free_squares(board))
        case "draw":
            return 0
        case winner:
            return 1 if winner == player else -1


def answer_of(opponent: Opponent, board: Board, dice: random.Random) -> int:
    """Returns the square that the opponent, who plays "o", takes."""
    free = free_squares(board)
    if opponent == "perfect":
        values = {square: value_of(played(board, square, "o"), "x") for square in free}
        free = [square for square in free if values[square] == min(values.values())]
    return dice.choice(free)


# ── the agent ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Game:
    """A scenario: who the opponent is, who moves first, and how the opponent's dice fall."""

    seed: int
    opponent: Opponent

    @property
    def opponent_begins(self) -> bool:
        """Every other game."""
        return self.seed % 2 == 1


def square_in(answer: str) -> int | None:
    """Returns the square, counted from 0, whose number 1 to 9 stands first in an answer."""
    found = re.search(r"\b[1-9]\b", answer)
    return int(found.group()) - 1 if found else None


async def rollout(model: art_ray.TrainableModel, game: Game) -> art_ray.Trajectory:
    """Plays one game."""
    dice = random.Random(game.seed)
    board = played(EMPTY, answer_of(game.opponent, EMPTY, dice), "o") if game.opponent_begins else EMPTY
    trajectory = art_ray.Trajectory(list(OPENING))
    client, num_legal, result = model.openai_client(), 0, None
    while result is None:
        trajectory.messages_and_choices.append({"role": "user", "content": drawn(board)})
        response = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=6
        )
        trajectory.messages_and_choices.append(response.choices[0])
        square = square_in(response.choices[0].message.content or "")
        if square not in free_squares(board):
            break
        num_legal += 1
        board = played(board, square, "x")
        if result_of(board) is None:
            board = played(board, answer_of(game.opponent, board, dice), "o")
        result = result_of(board)
    trajectory.reward = REWARDS[result] if result else REWARD_PER_LEGAL_MOVE * num_legal
    trajectory.metrics.update(won=result == "x", finished=result is not None, legal_moves=num_legal)
    trajectory.metadata["end"] = drawn(board)
    return trajectory.finish()


def games(opponent: Opponent) -> list[Game]:
    """Returns the games that are trained on."""
    return [Game(seed, opponent) for seed in range(64)]


async def main() -> None:
    parser = agent.options(__doc__)
    parser.add_argument("--opponent", choices=("random", "perfect"), default="random")
    chosen = parser.parse_args()
    model = agent.model_of(chosen, "tic-tac-toe")
    async with art_ray.RayBackend(trainer=art_ray.TrainerConfig(seed=chosen.seed)) as backend:
        await model.register(backend)
        await agent.train(model, rollout, games(chosen.opponent), chosen)


if __name__ == "__main__":
    asyncio.run(main())
