from __future__ import annotations

from typing import Any

import pytest

from art_ray.serving.labels import StreamLabels
from art_ray.serving.recording import Exchange, Recorder, StreamedAnswer, conversations
from art_ray.trajectories import Choice, Sampling
from tests.serving.test_labels import chunk, entry

USER = {"role": "user", "content": "Yes or no?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def choice(content: str | None, **message: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": "stop",
        "logprobs": None,
        "message": {"role": "assistant", "content": content, **message},
    }


def exchange(messages: list[dict[str, Any]], answer: dict[str, Any], tools: Any = None) -> Exchange:
    return Exchange(messages, tools, answer)


def texts(items: list[Any]) -> list[str]:
    return [item.message.content if isinstance(item, Choice) else item["content"] for item in items]


def test_turns_that_repeat_the_conversation_continue_it():
    first = exchange([USER], choice("yes"))
    second = exchange(
        [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}], choice("no")
    )
    ((items, tools),) = conversations([first, second])
    assert texts(items) == ["Yes or no?", "yes", "Sure?", "no"]
    assert [isinstance(item, Choice) for item in items] == [False, True, False, True]
    assert tools is None


def test_libraries_may_write_what_is_empty_in_their_own_way():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    first = exchange(
        [{"role": "user", "content": [{"type": "text", "text": "Look."}]}], choice(None, tool_calls=[call]), TOOLS
    )
    second = exchange(
        [
            {"role": "user", "content": "Look.", "name": None},
            {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": "seen"},
        ],
        choice("done"),
        TOOLS,
    )
    ((items, tools),) = conversations([first, second])
    assert len(items) == 4
    assert tools == TOOLS


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": "Another"}], None),
        ([USER], None),
        ([USER, {"role": "assistant", "content": "no"}, {"role": "user", "content": "Sure?"}], None),
        ([USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Sure?"}], TOOLS),
    ],
    ids=["other question", "a second sample", "another answer", "other tools"],
)
def test_anything_else_begins_a_conversation_of_its_own(messages: list[dict[str, Any]], tools: Any):
    found = conversations([exchange([USER], choice("yes")), exchange(messages, choice("end"), tools)])
    assert [texts(items)[-1] for items, _ in found] == ["yes", "end"]


def test_a_recorder_drops_what_was_used_longest_ago_when_it_is_full():
    recorder = Recorder(capacity_bytes=10)
    for name in ("a", "b"):
        recorder.record(name, [exchange([USER], choice("yes"))], 4)
    recorder.record("a", [exchange([USER], choice("no"))], 4)
    assert recorder.exchanges("b") is None
    assert [each.choice["message"]["content"] for each in recorder.exchanges("a") or []] == ["yes", "no"]
    assert recorder.dropped == 1


def test_a_recorder_forgets_what_nobody_used_for_its_time():
    now = [0.0]
    recorder = Recorder(ttl_s=10, clock=lambda: now[0])
    recorder.record("a", [], 1)
    now[0] = 11
    recorder.record("b", [], 1)
    assert recorder.exchanges("a") is None
    assert recorder.exchanges("b") == []


def test_forgetting_makes_room():
    recorder = Recorder(capacity_bytes=10)
    for name in "abcdef":
        recorder.record(name, [], 9)
        recorder.forget(name)
        recorder.forget(name)
    assert recorder.dropped == 0


def test_a_streamed_answer_becomes_the_choice_that_was_not_streamed():
    labels, streamed = StreamLabels({"temperature": 0.5}, version=3, served_name="policy@3"), StreamedAnswer()
    for each in (
        chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2]),
        chunk({"index": 0, "delta": {"content": "y"}, "token_ids": [7], "logprobs": {"content": [entry("y", -0.5)]}}),
        chunk({"index": 0, "delta": {"content": "es"}, "token_ids": [8], "logprobs": {"content": [entry("es", -1)]},
               "finish_reason": "stop"}),
    ):  # fmt: skip
        streamed.add(labels.label(each))
    (whole,) = streamed.choices()
    assert whole["token_ids"] == [7, 8]
    assert "all_token_ids" not in whole
    answer = Choice.model_validate(whole)
    assert answer.message.content == "yes"
    assert Sampling.of(answer) == Sampling([1, 2], [7, 8], [-0.5, -1.0], [3, 3], 0.5)


def test_a_stream_that_was_cut_gives_no_choice():
    streamed = StreamedAnswer()
    streamed.add(chunk({"index": 0, "delta": {"content": "y"}, "token_ids": [7]}))
    assert streamed.choices() == []
    assert StreamedAnswer().choices() == []
