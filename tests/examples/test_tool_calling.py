import json

import pytest
import tool_calling as shop

QUESTION = shop.Question("price", "apple", seed=3)


def arguments(item: str) -> str:
    return json.dumps({"item": item})


def test_a_tool_says_the_number_and_what_is_wrong_with_a_call():
    assert shop.called(QUESTION.shop, "price", arguments("apple")) == str(QUESTION.number)
    assert shop.called(QUESTION.shop, "weather", arguments("apple")) == "error: there is no tool 'weather'"
    for odd in ("", "{", "[]", "null", "{}", arguments("stone"), '{"item": ["apple"]}', '{"item": null}'):
        assert shop.called(QUESTION.shop, "price", odd).startswith("error: there is no item"), odd


def test_every_shop_has_its_own_numbers():
    assert QUESTION.shop == shop.Question("stock", "pear", seed=3).shop
    assert QUESTION.shop != shop.Question("price", "apple", seed=4).shop


@pytest.mark.parametrize(
    ("calls", "answer", "reward"),
    [
        ([], "no idea", 0.0),
        ([("weather", "{}")], "", 0.0),
        ([("stock", arguments("apple"))], "", 0.2),
        ([("price", arguments("pear"))], "", 0.2),
        ([("price", arguments("apple"))], "", 0.6),
        ([("price", arguments("apple"))], f"It costs {QUESTION.number}.", 1.0),
        ([], str(QUESTION.number), 0.4),
        ([("stock", "{"), ("price", arguments("apple"))], str(QUESTION.number), 1.0),
    ],
)
def test_the_reward_adds_up_what_was_reached(calls, answer, reward):
    assert shop.reward_of(QUESTION, calls, answer) == pytest.approx(reward)


def test_the_template_shows_tools_calls_and_results(small_model):
    import agent
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(small_model).apply_chat_template(
        [{"role": "system", "content": shop.SYSTEM}, *_as_the_engine_has_them(shop.example(QUESTION))],
        tools=shop.TOOLS,
        chat_template=agent.TOOL_TEMPLATE.read_text(),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert "price(item): what one piece costs, in cents" in text
    assert '<tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call><|im_end|>' in text
    assert f"<|im_start|>tool\n{QUESTION.number}<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def _as_the_engine_has_them(messages: list[dict]) -> list[dict]:
    """Before it renders, the engine reads the arguments of calls, which are JSON on the wire."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages
