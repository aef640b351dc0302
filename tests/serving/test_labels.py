from __future__ import annotations

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import ChatCompletion

from art_ray.serving.labels import StreamLabels, label_answer, prepare_request, restrictions_of
from art_ray.trajectories import Sampling


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 1}, {"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"min_p": 0.0}, {"logit_bias": {}},
     {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0}, {"temperature": 0.3},
     {"response_format": {"type": "text"}}, {"tools": [{}], "tool_choice": "auto"}, {"stop": ["x"], "seed": 3},
     {"top_p": None, "bad_words": [], "min_tokens": 0, "structured_outputs": None, "tool_choice": "none"}],
)  # fmt: skip
def test_plain_sampling_has_no_restrictions(options: dict):
    assert restrictions_of(options) == {}


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -1},
     {"repetition_penalty": 1.1}, {"logit_bias": {"5": -100}}, {"bad_words": ["no"]}, {"allowed_token_ids": []},
     {"min_tokens": 4}, {"temperature": 0}, {"temperature": 0.0}, {"response_format": {"type": "json_object"}},
     {"tools": [{}], "tool_choice": "required"}, {"structured_outputs": {"choice": ["a"]}}, {"use_beam_search": True},
     {"thinking_token_budget": 10}],
)  # fmt: skip
def test_whatever_bends_the_distribution_is_named(options: dict):
    assert set(restrictions_of(options)) == set(options) - {"tools"}


def test_a_request_gets_what_training_needs_and_keeps_what_it_asked_for():
    request = {"model": "policy", "messages": [], "logprobs": False, "top_p": 0.5, "unknown": {"a": 1}}
    prepared = prepare_request(request, "policy@3", is_chat=True)
    assert prepared == {**request, "model": "policy@3", "logprobs": True, "return_token_ids": True}
    assert request["logprobs"] is False  # the caller's own is left alone


def test_a_text_completion_asks_for_the_sampled_tokens_log_probability():
    assert prepare_request({"prompt": "a"}, "m", is_chat=False)["logprobs"] == 0
    assert prepare_request({"prompt": "a", "logprobs": 3}, "m", is_chat=False)["logprobs"] == 3


def entry(token: str, logprob: float) -> dict:
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}


def test_a_labelled_answer_is_a_trainable_choice():
    answer = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "internal",
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "yes"},
                "token_ids": [7, 8],
                "logprobs": {"content": [entry("y", -0.5), entry("es", -0.25)]},
            }
        ],
    }
    labelled = label_answer(answer, {"temperature": 0.7, "top_k": 4}, version=3, served_name="policy@3")
    completion = ChatCompletion.model_validate(labelled)
    assert completion.model == "policy@3"
    assert Sampling.of(completion.choices[0]) == Sampling([1, 2], [7, 8], [-0.5, -0.25], [3, 3], 0.7, {"top_k": 4})


def chunk(choice: dict, **fields: object) -> dict:
    base = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "internal"}
    return {**base, **fields, "choices": [choice]}


def test_a_stream_read_by_openais_own_accumulator_carries_everything():
    labels = StreamLabels({}, version=3, served_name="policy@3")
    chunks = [
        chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2]),
        chunk({"index": 0, "delta": {"content": "y"}, "token_ids": [7], "logprobs": {"content": [entry("y", -0.5)]}}),
        chunk(
            {
                "index": 0,
                "delta": {"content": "es"},
                "token_ids": [8, 9],
                "logprobs": {"content": [entry("es", -0.25), entry("", -0.125)]},
                "finish_reason": "stop",
            }
        ),
    ]
    state = ChatCompletionStreamState()
    labelled = [labels.label(each) for each in chunks]
    for each in labelled:
        state.handle_chunk(ChatCompletionChunk.model_validate(each))
    choice = state.get_final_completion().choices[0]
    assert Sampling.of(choice) == Sampling([1, 2], [7, 8, 9], [-0.5, -0.25, -0.125], [3, 3, 3], 1.0)
    assert labelled[-1]["choices"][0]["all_token_ids"] == [7, 8, 9]


def test_choices_of_one_stream_are_labelled_each_on_their_own():
    labels = StreamLabels({}, version=3, served_name="policy@3")
    labels.label(chunk({"index": 0, "delta": {}}, prompt_token_ids=[1]))
    first = labels.label(chunk({"index": 1, "delta": {}, "token_ids": [5]}))["choices"][0]
    assert first["policy_version"] == 3
    assert first["prompt_token_ids"] == [1]
    last = labels.label(chunk({"index": 0, "delta": {}, "token_ids": [6], "finish_reason": "stop"}))["choices"][0]
    assert last["all_token_ids"] == [6]
