"""Trains an agent that is written with LangGraph and knows nothing of art_ray: it speaks OpenAI's protocol to a URL.

The agent solves sums with tools. Each rollout gets a URL of its own from `model.recording()`; what was said there is
picked up afterwards as a trajectory, with the exact tokens that were sampled. The reward, from 0 to 1, is half for the
right call and half for the right number at the end. Run again, it goes on from the last complete step.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import agent
from langchain_core.messages import AnyMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

import art_ray

MAX_NODES = 6
"""Of the graph, that one rollout visits: three answers, and the tools in between."""
SYSTEM = "You solve sums with tools, then answer with the number."
SIGNS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("plus", operator.add),
    "multiply": ("times", operator.mul),
}


# ── the agent, as anyone may have written it ─────────────────────────────────────────────────────────────────────────


@tool
def add(a: int, b: int) -> int:
    """Returns the sum of two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Returns the product of two numbers."""
    return a * b


def graph_of(chat: ChatOpenAI) -> Any:
    """Returns an agent that calls tools until it answers without a call."""
    thinker = chat.bind_tools([add, multiply])

    async def think(state: MessagesState) -> dict[str, list[AnyMessage]]:
        return {"messages": [await thinker.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add, multiply]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


# ── its training ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sum:
    """A scenario."""

    tool: str
    a: int
    b: int

    @property
    def text(self) -> str:
        """What the agent is asked."""
        return f"What is {self.a} {SIGNS[self.tool][0]} {self.b}?"

    @property
    def number(self) -> int:
        """The right answer."""
        return SIGNS[self.tool][1](self.a, self.b)


def example(of: Sum) -> art_ray.Messages:
    """Returns a conversation as it should be, with which every other begins."""
    call = {"name": of.tool, "arguments": json.dumps({"a": of.a, "b": of.b})}
    id = f"example-{of.tool}"
    return [
        {"role": "user", "content": of.text},
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": id, "content": str(of.number)},
        {"role": "assistant", "content": str(of.number)},
    ]


def reward_of(of: Sum, messages: art_ray.Messages) -> float:
    """Returns half for a call that computes the sum, and half for a last answer that ends with it."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    right = any(call["name"] == of.tool and arguments_in(call["arguments"]) == {"a": of.a, "b": of.b} for call in calls)
    last = messages[-1]
    answer = "" if last["role"] != "assistant" or last.get("tool_calls") else last["content"] or ""
    return 0.5 * right + 0.5 * (numbers_in(answer)[-1:] == [of.number])


def arguments_in(text: str) -> Any:
    """Returns a call's arguments, or None where they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def numbers_in(text: str) -> list[int]:
    """Returns the whole numbers in a text."""
    return [int(number) for number in re.findall(r"\d{1,9}", text)]


async def rollout(model: art_ray.TrainableModel, of: Sum) -> art_ray.Trajectory:
    """Runs the agent on one sum."""
    recording = model.recording()
    chat = ChatOpenAI(
        base_url=recording.base_url,
        api_key=SecretStr(recording.api_key),
        model=model.get_inference_name(),
        temperature=1.0,
        max_completion_tokens=48,
    )
    opening = [{"role": "system", "content": SYSTEM}, *example(Sum("multiply", 3, 6)), *example(Sum("add", 12, 30))]
    messages = [*opening, {"role": "user", "content": of.text}]
    complete = True
    try:
        await graph_of(chat).ainvoke({"messages": messages}, {"recursion_limit": MAX_NODES})
    except GraphRecursionError:  # it went on calling tools: what it did so far is judged
        complete = False
    trajectory = await recording.trajectory()
    own = trajectory.messages()[len(messages) :]
    trajectory.reward = reward_of(of, own)
    trajectory.metrics.update(calls=sum(message["role"] == "tool" for message in own), complete=complete)
    return trajectory.finish()


def sums() -> list[Sum]:
    """Returns the sums that are trained on."""
    return [Sum(name, a, b) for name in SIGNS for a in range(7, 40, 8) for b in range(3, 30, 7)]


async def main() -> None:
    chosen = agent.options(__doc__).parse_args()
    model = agent.model_of(chosen, "langgraph-agent", agent.TOOL_ENGINE_ARGS)
    async with art_ray.RayBackend(trainer=art_ray.TrainerConfig(seed=chosen.seed)) as backend:
        await model.register(backend)
        await agent.train(model, rollout, sums(), chosen)


if __name__ == "__main__":
    asyncio.run(main())
