"""Teaches a small model to call tools: it is asked about a shop, looks the number up, and says it.

Tools and calls travel as OpenAI has them; the server's parser makes calls of what the policy wrote. The reward, from 0
to 1, is 0.2 for a call of a tool that exists, 0.4 for the right one with the right item, 0.4 for the right number at
the end. Run again, it goes on from the last complete step.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import agent

import art_ray

Kind = Literal["price", "stock"]

ITEMS = ("apple", "pear", "plum", "lemon", "melon", "peach", "cherry", "banana", "orange", "grape", "lime", "fig")
MAX_TURNS = 3
QUESTIONS: dict[Kind, str] = {"price": "What does a {} cost?", "stock": "How many {}s are there?"}
SYSTEM = "You work in a shop. Look up what you are asked, then answer with the number."
DESCRIPTIONS: dict[Kind, str] = {"price": "what one piece costs, in cents", "stock": "how many pieces are there"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
    for name, description in DESCRIPTIONS.items()
]


@dataclass(frozen=True)
class Question:
    """A scenario: what is asked about which item, in a shop of its own."""

    kind: Kind
    item: str
    seed: int

    @property
    def shop(self) -> dict[Kind, dict[str, int]]:
        """Prices in cents and pieces in stock, by item."""
        dice = random.Random(self.seed)
        return {
            "price": {item: dice.randrange(20, 400) for item in ITEMS},
            "stock": {item: dice.randrange(100) for item in ITEMS},
        }

    @property
    def text(self) -> str:
        """What the customer says."""
        return QUESTIONS[self.kind].format(self.item)

    @property
    def number(self) -> int:
        """The right answer."""
        return self.shop[self.kind][self.item]


# ── the tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


def item_in(arguments: str) -> str | None:
    """Returns the item that a call's arguments name, or None where they are no JSON object with one."""
    try:
        item = json.loads(arguments)["item"]
    except (ValueError, TypeError, KeyError):
        return None
    return item if isinstance(item, str) else None


def called(shop: dict[Any, dict[str, int]], name: str, arguments: str) -> str:
    """Returns what a tool says, which is text whatever it was called with."""
    if name not in shop:
        return f"error: there is no tool {name!r:.40}"
    item = item_in(arguments)
    if item not in shop[name]:
        return f"error: there is no item {item!r:.40}"
    return str(shop[name][item])


def number_in(answer: str) -> int | None:
    """Returns the first number in an answer."""
    found = re.search(r"\d{1,9}", answer)
    return int(found.group()) if found else None


def reward_of(question: Question, calls: list[tuple[str, str]], answer: str) -> float:
    """Returns what the first call, the best call and the final answer are worth together."""
    known = any(name in question.shop for name, _ in calls)
    right = any(name == question.kind and item_in(arguments) == question.item for name, arguments in calls)
    return 0.2 * known + 0.4 * right + 0.4 * (number_in(answer) == question.number)


# ── the agent ────────────────────────────────────────────────────────────────────────────────────────────────────────


def example(question: Question) -> art_ray.Messages:
    """Returns a conversation as it should be, with which every other begins."""
    call = {"name": question.kind, "arguments": json.dumps({"item": question.item})}
    id = f"example-{question.kind}"
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": id, "content": str(question.number)},
        {"role": "assistant", "content": str(question.number)},
    ]


async def rollout(model: art_ray.TrainableModel, question: Question) -> art_ray.Trajectory:
    """Answers one question with as many calls as the policy wants, within a limit."""
    opening = [{"role": "system", "content": SYSTEM}, *example(Question("stock", "pear", 1))]
    opening += [*example(Question("price", "melon", 2)), {"role": "user", "content": question.text}]
    trajectory = art_ray.Trajectory(opening, tools=TOOLS)
    ask: Callable[..., Any] = model.openai_client().chat.completions.create
    calls: list[tuple[str, str]] = []
    answer = ""
    for _ in range(MAX_TURNS):
        response = await ask(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=trajectory.tools, max_tokens=32
        )
        choice = response.choices[0]
        trajectory.messages_and_choices.append(choice)
        if not choice.message.tool_calls:
            answer = choice.message.content or ""
            break
        for call in choice.message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            calls.append((name, arguments))
            result = called(question.shop, name, arguments)
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": result})
    trajectory.reward = reward_of(question, calls, answer)
    trajectory.metrics.update(calls=len(calls), right_answer=number_in(answer) == question.number)
    return trajectory.finish()


def questions() -> list[Question]:
    """Returns the questions that are trained on."""
    return [Question(kind, item, seed) for seed, item in enumerate(ITEMS, start=10) for kind in QUESTIONS]


async def main() -> None:
    chosen = agent.options(__doc__).parse_args()
    model = agent.model_of(chosen, "tool-calling", agent.TOOL_ENGINE_ARGS)
    async with art_ray.RayBackend(trainer=art_ray.TrainerConfig(seed=chosen.seed)) as backend:
        await model.register(backend)
        await agent.train(model, rollout, questions(), chosen)


if __name__ == "__main__":
    asyncio.run(main())
