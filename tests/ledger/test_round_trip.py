"""Random groups come back equal, whatever they are made of."""

import json
import math
import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ParsedChoice

from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.ledger.codec import decoded, encoded, json_text
from art_ray.ledger.parquet_writer import GroupWriter
from art_ray.trajectories import Choice, History, RolloutFailure, Trajectory, TrajectoryGroup

texts = st.one_of(
    st.text(string.ascii_letters + " $", max_size=12), st.text(max_size=12)
)  # surrogates among the latter
any_text = st.one_of(texts, st.text(st.characters(categories=["Cs", "Lu", "Cc"]), max_size=4))
finite = st.floats(allow_nan=False)
json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), finite, any_text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=8,
)
values = st.one_of(
    json_like, st.binary(max_size=5), st.datetimes(), st.decimals(allow_nan=False), st.uuids(),
    st.frozensets(st.integers()),
    st.dictionaries(st.integers(), json_like, max_size=2),
)  # fmt: skip
metrics = st.dictionaries(any_text, st.one_of(st.booleans(), st.integers(-(2**70), 2**70), finite), max_size=3)
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": any_text}),
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": json_like},
        optional={
            "tool_call_id": any_text,
            "tool_calls": st.lists(json_like, max_size=2),
            "name": any_text,
            "$t": json_like,
        },
    ),
    st.dictionaries(any_text, values, max_size=3),
)


@st.composite
def answers(draw):
    message = {"role": "assistant", "content": draw(st.one_of(st.none(), any_text))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(any_text)
    if draw(st.booleans()):
        message["tool_calls"] = [
            {
                "id": draw(any_text),
                "type": "function",
                "function": {"name": draw(any_text), "arguments": draw(any_text)},
            }
        ]
    fields = {"finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"])), "index": 0, "message": message}
    if draw(st.booleans()):
        n = draw(st.integers(0, 4))
        width = draw(st.sampled_from([32, 64]))
        with_bytes, named = draw(st.booleans()), draw(st.booleans())
        tokens = draw(st.lists(any_text, min_size=n, max_size=n))
        fields["logprobs"] = {
            "refusal": None,
            "content": [
                {
                    "token": token,
                    "bytes": list(token.encode("utf-8", "replace")) if with_bytes else None,
                    "logprob": draw(st.floats(max_value=0, allow_nan=False, width=width)),
                    "top_logprobs": [],
                    **({"token_id": draw(st.integers(0, 9))} if named else {}),
                }
                for token in tokens
            ],
        }
        if draw(st.booleans()):
            fields["token_ids"] = draw(st.lists(st.integers(0, 2**32), max_size=n + 1))
        fields["prompt_token_ids"] = draw(st.lists(st.integers(0, 200_000), max_size=4))
        fields["policy_version"] = draw(st.integers(0, 100))
    if draw(st.booleans()):
        fields["extra"] = draw(values)
    return draw(st.sampled_from([Choice, ParsedChoice])).model_validate(fields)


conversations = st.lists(st.one_of(messages, answers()), max_size=4)
tools = st.one_of(st.none(), st.lists(st.dictionaries(any_text, json_like, max_size=2), max_size=2))
trajectories = st.builds(
    Trajectory,
    conversations,
    tools=tools,
    additional_histories=st.lists(st.builds(History, messages_and_choices=conversations, tools=tools), max_size=1),
    reward=st.floats(),
    metrics=metrics,
    metadata=st.dictionaries(any_text, values, max_size=3),
    logs=st.lists(any_text, max_size=2),
)
failures = st.builds(RolloutFailure, type=any_text, message=any_text, traceback=any_text)
groups = st.builds(
    TrajectoryGroup,
    st.lists(trajectories, max_size=3),
    exceptions=st.lists(failures, max_size=2),
    metadata=st.dictionaries(any_text, values, max_size=2),
    metrics=metrics,
    logs=st.lists(any_text, max_size=2),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(st.lists(groups, max_size=3))
def test_any_groups_come_back_equal(tmp_path_factory, written):
    path = tmp_path_factory.getbasetemp() / "random.parquet"
    writer = GroupWriter(path)
    for group in written:
        writer.write(group)
    writer.close({})
    assert read_trajectory_groups_parquet(path) == written


@quick
@given(values)
def test_any_value_comes_back_equal_and_of_the_same_type(value):
    again = decoded(json.loads(json_text(encoded(value, "value"))))
    assert again == value
    assert type(again) is type(value)


def test_nan_comes_back_as_nan():
    assert math.isnan(decoded(encoded(math.nan, "value")))
