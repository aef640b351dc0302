import json

import langgraph_agent as sums
import pytest
from langchain_openai import ChatOpenAI

from art_ray.serving.recording import Exchange, conversations
from art_ray.trajectories import messages_of
from tests.stub_openai import StubOpenAI

OF = sums.Sum("multiply", 17, 4)


def call(name: str, arguments: str) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


RIGHT = call("multiply", '{"b": 4, "a": 17}')
RESULT = {"role": "tool", "tool_call_id": "c", "content": "68"}


@pytest.mark.parametrize(
    ("messages", "reward"),
    [
        ([{"role": "assistant", "content": "I do not know."}], 0.0),
        ([{"role": "assistant", "content": "17 * 4 = 68"}], 0.5),
        ([call("add", '{"a": 17, "b": 4}')], 0.0),
        ([call("multiply", '{"a": 17')], 0.0),
        ([RIGHT], 0.5),
        ([RIGHT, RESULT], 0.5),
        ([RIGHT, RESULT, {"role": "assistant", "content": "It is 68."}], 1.0),
        ([RIGHT, RESULT, {"role": "assistant", "content": "It is 86."}], 0.5),
    ],
)
def test_the_reward_is_half_for_the_call_and_half_for_the_answer(messages, reward):
    assert sums.reward_of(OF, messages) == reward


def test_the_tools_compute_what_the_sums_ask_for():
    for of in sums.sums():
        computed = {"add": sums.add, "multiply": sums.multiply}[of.tool].invoke({"a": of.a, "b": of.b})
        assert computed == of.number
        [asked, called, *_] = sums.example(of)
        assert sums.numbers_in(asked["content"]) == [of.a, of.b]
        assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"a": of.a, "b": of.b}


async def test_what_the_agent_sends_and_is_answered_makes_one_conversation():
    """As the server recorded it, whose answers the agent's library writes in its own way when it sends them back."""

    def answer(body):
        last = body["messages"][-1]
        if last["role"] != "user":
            return f"It is {last['content']}."
        message = {"role": "assistant", "content": None, "tool_calls": RIGHT["tool_calls"]}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return 200, {"id": "stub", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}

    exchanges = []

    def recorded(body):
        said = answer(body)
        text = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        choice = said[1]["choices"][0] if isinstance(said, tuple) else text
        exchanges.append(Exchange(body["messages"], body["tools"], choice))
        return said

    question = [*sums.example(sums.Sum("add", 1, 2)), {"role": "user", "content": OF.text}]
    with StubOpenAI(recorded) as stub:
        chat = ChatOpenAI(base_url=stub.base_url, api_key="of the run", model="policy")
        await sums.graph_of(chat).ainvoke({"messages": question}, {"recursion_limit": sums.MAX_NODES})
    [(conversation, tools)] = conversations(exchanges)
    assert [tool["function"]["name"] for tool in tools] == ["add", "multiply"]
    own = messages_of(conversation)[len(question) :]
    assert [message["role"] for message in own] == ["assistant", "tool", "assistant"]
    assert sums.reward_of(OF, own) == 1.0
