"""Teaches a small model to play 2048, a game of many turns: slide the tiles, equal ones merge.

A game lasts a few turns. The reward, from 0 to 1, is half for legal moves and half for the largest tile; a move that
is none, or that changes nothing, ends the game. Run again, it goes on from the last complete step.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from dataclasses import dataclass

import agent

import art_ray

Board = tuple[tuple[int, ...], ...]
"""Rows from top to bottom; 0 is an empty square."""

MOVES = ("up", "down", "left", "right")
SYSTEM = (
    "You play 2048. Tiles slide as far as they can; two equal tiles that meet become one of twice the value. "
    "Answer with one word: up, down, left or right."
)
EXAMPLES = (("2 . .\n. . .\n. . 2", "left"), (". . 2\n2 . .\n. . .", "up"), ("2 2 .\n. . .\n4 . .", "right"))
"""Boards and moves that every conversation begins with: without them a small model says anything but a move."""
OPENING = agent.opening(SYSTEM, EXAMPLES)


# ── the game ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def merged(row: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a row after its tiles slid to the left. A tile merges at most once."""
    tiles, result = [tile for tile in row if tile], []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        result.append(tile)
    return (*result, *[0] * (len(row) - len(result)))


def moved(board: Board, move: str) -> Board:
    """Returns the board after a move, before a new tile appears; the same board where the move is not legal."""
    match move:
        case "left":
            return tuple(map(merged, board))
        case "right":
            return tuple(merged(row[::-1])[::-1] for row in board)
        case "up":
            return transposed(moved(transposed(board), "left"))
        case "down":
            return transposed(moved(transposed(board), "right"))
    raise ValueError(f"a move is one of {', '.join(MOVES)}; got {move!r}")


def transposed(board: Board) -> Board:
    """Returns the board with its columns as rows."""
    return tuple(zip(*board, strict=True))


def legal_moves(board: Board) -> list[str]:
    """Returns the moves that change the board; none is left when the game is over."""
    return [move for move in MOVES if moved(board, move) != board]


def with_new_tile(board: Board, dice: random.Random) -> Board:
    """Returns the board with a 2, or one time in ten a 4, on an empty square."""
    empty = [(y, x) for y, row in enumerate(board) for x, tile in enumerate(row) if not tile]
    chosen, tile = dice.choice(empty), 4 if dice.random() < 0.1 else 2
    return tuple(tuple(tile if (y, x) == chosen else old for x, old in enumerate(row)) for y, row in enumerate(board))


def started(size: int, dice: random.Random) -> Board:
    """Returns a board with two tiles."""
    empty: Board = ((0,) * size,) * size
    return with_new_tile(with_new_tile(empty, dice), dice)


def drawn(board: Board) -> str:
    """Returns the board as text, a row on each line."""
    return "\n".join(" ".join(str(tile) if tile else "." for tile in row) for row in board)


# ── the agent ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Game:
    """A scenario: where the game begins, and how long it is."""

    seed: int
    size: int
    turns: int
    goal: int
    """The largest tile for which there is the full reward."""


def move_in(answer: str) -> str | None:
    """Returns the first move that an answer names."""
    found = re.search(r"\b(up|down|left|right)\b", answer.lower())
    return found.group() if found else None


def reward_of(num_legal: int, board: Board, game: Game) -> float:
    """Returns half for the share of legal moves, and half for the largest tile on the way from 4 to the goal."""
    largest = max(map(max, board))
    reached = math.log2(max(largest, 4) / 4) / math.log2(game.goal / 4)
    return num_legal / game.turns / 2 + min(1.0, reached) / 2


async def rollout(model: art_ray.TrainableModel, game: Game) -> art_ray.Trajectory:
    """Plays one game."""
    dice = random.Random(game.seed)
    board = started(game.size, dice)
    trajectory = art_ray.Trajectory(list(OPENING))
    client, num_legal = model.openai_client(), 0
    for _ in range(game.turns):
        trajectory.messages_and_choices.append({"role": "user", "content": drawn(board)})
        response = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_tokens=6
        )
        trajectory.messages_and_choices.append(response.choices[0])
        move = move_in(response.choices[0].message.content or "")
        if move not in legal_moves(board):
            break
        board = with_new_tile(moved(board, move), dice)
        num_legal += 1
    trajectory.reward = reward_of(num_legal, board, game)
    trajectory.metrics.update(legal_moves=num_legal, largest_tile=max(map(max, board)))
    return trajectory.finish()


def games(size: int, turns: int, goal: int) -> list[Game]:
    """Returns the games that are trained on."""
    return [Game(seed, size, turns, goal) for seed in range(64)]


async def main() -> None:
    parser = agent.options(__doc__)
    parser.add_argument("--size", type=int, default=3, help="squares on a side")
    parser.add_argument("--turns", type=int, default=6, help="turns of a game")
    parser.add_argument("--goal", type=int, default=16, help="the tile for which there is the full reward")
    chosen = parser.parse_args()
    model = agent.model_of(chosen, "game-2048")
    async with art_ray.RayBackend(trainer=art_ray.TrainerConfig(seed=chosen.seed)) as backend:
        await model.register(backend)
        await agent.train(model, rollout, games(chosen.size, chosen.turns, chosen.goal), chosen)


if __name__ == "__main__":
    asyncio.run(main())
