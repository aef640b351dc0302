import math
import subprocess
import sys

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types.chat import ParsedChoice

from art_ray.errors import LedgerFormatError
from art_ray.ledger import iterate_trajectory_groups_parquet, read_trajectory_groups_parquet
from art_ray.ledger.parquet import SCHEMA
from art_ray.ledger.parquet_writer import GroupWriter
from art_ray.training.samples import Refusal, samples_of
from art_ray.trajectories import Choice, History, Trajectory, TrajectoryGroup
from tests.ledger.made import answer, conversation, group_of

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture
def back(tmp_path):
    """Returns what groups become on their way through a file."""

    def through(*groups, **options):
        path = tmp_path / "groups.parquet"
        writer = GroupWriter(path, **options)
        for group in groups:
            writer.write(group)
        writer.close({})
        return read_trajectory_groups_parquet(path)

    return through


def failure(text="boom"):
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


UNKNOWN_REASON = Choice.construct(
    finish_reason="abort", index=0, message={"role": "assistant", "content": "cut"}, logprobs=None, stop_reason=7
)
TOP = {"token": "a", "bytes": [97], "logprob": -0.5}
GROUPS = {
    "plain messages": group_of(0.0, 1.0),
    "an empty group": TrajectoryGroup([], metadata={"scenario": 3}, logs=["nothing came"]),
    "a group that failed wholly": TrajectoryGroup([failure(), failure("größer")], metrics={"difficulty": 2}),
    "failures beside a trajectory": TrajectoryGroup([Trajectory(conversation(), reward=1), failure()]),
    "an empty conversation": TrajectoryGroup([Trajectory([], reward=0.5)]),
    "not scored": TrajectoryGroup([Trajectory(conversation(), reward=math.nan), Trajectory([], reward=-math.inf)]),
    "answers with tokens": TrajectoryGroup([Trajectory(conversation(answer(), answer("no", 5, version=3)), reward=1)]),
    "answers with and without tokens": TrajectoryGroup(
        [Trajectory(conversation(answer(version=None), answer("no", 5), answer(num_tokens=0)), reward=1)]
    ),
    "log-probabilities beyond float32": TrajectoryGroup(
        [
            Trajectory(
                conversation(
                    answer(
                        logprobs={
                            "content": [{"token": "a", "bytes": None, "logprob": -0.1, "top_logprobs": []}],
                            "refusal": None,
                        },
                        token_ids=[1],
                    )
                )
            )
        ]
    ),
    "alternatives of tokens": TrajectoryGroup(
        [
            Trajectory(
                conversation(
                    answer(logprobs={"content": [{**TOP, "top_logprobs": [TOP, TOP]}], "refusal": None}, token_ids=[1])
                )
            )
        ]
    ),
    "versions per token": TrajectoryGroup(
        [Trajectory(conversation(answer(policy_versions=[2, 2, 3], sampling_restrictions={"top_p": 0.9})))]
    ),
    "ids that are no int32": TrajectoryGroup([Trajectory(conversation(answer(token_ids=[2**40, 1, 2])))]),
    "ids that do not fit their log-probabilities": TrajectoryGroup([Trajectory(conversation(answer(token_ids=[1])))]),
    "tool calls and their results": TrajectoryGroup(
        [
            Trajectory(
                conversation(
                    answer(None, message={"tool_calls": [CALL]}, finish_reason="tool_calls"),
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "assistant", "tool_calls": []},
                ),
                tools=[{"type": "function", "function": {"name": "add", "strict": True}}],
            )
        ]
    ),
    "tools that are empty, not absent": TrajectoryGroup([Trajectory([], tools=[])]),
    "reasoning": TrajectoryGroup(
        [
            Trajectory(conversation(answer(message={"reasoning_content": "hm", "reasoning": "hm"}))),
            Trajectory([{"role": "assistant", "content": "x", "reasoning_content": "y"}]),
        ]
    ),
    "multimodal content": TrajectoryGroup(
        [
            Trajectory(
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is it?"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    },
                    answer(),
                ]
            )
        ]
    ),
    "further histories": TrajectoryGroup(
        [
            Trajectory(
                conversation(answer()),
                additional_histories=[
                    History(messages_and_choices=conversation(answer("sub", 4, version=1)), tools=[CALL]),
                    History(messages_and_choices=[]),
                ],
            )
        ]
    ),
    "what an engine says beyond OpenAI's types": TrajectoryGroup([Trajectory([UNKNOWN_REASON])]),
    "messages with keys of their own": TrajectoryGroup(
        [
            Trajectory([{"role": "user", "name": "Ann", "content": "x"}, {"role": None}, {"content": ""}]),
            Trajectory([{}, {"a": (1,)}, {"role": "user", "content": "x", "$t": 1}]),
        ]
    ),
    "lone surrogates": TrajectoryGroup(
        [
            Trajectory([{"role": "user", "content": "\ud800"}, answer("a\udfff")], logs=["\ud800"]),
            Trajectory([], metadata={"\ud800": "\udbff"}, metrics={"\ud800\udc00": 1.0}),
        ],
        exceptions=[failure("\udc00")],
        logs=["\udc00", "fine"],
    ),
    "text in any script": TrajectoryGroup([Trajectory([{"role": "user", "content": "日本 – größer 🎉\x00\u2028"}])]),
    "metadata beyond JSON": TrajectoryGroup(
        [
            Trajectory(
                [],
                metadata={
                    "tuple": (1, (2, "x")), "set": {1}, "bytes": b"\x00\xff", "keys": {1: "a", (2, 3): "b"},
                    "infinity": math.inf, "large": 10**5000, "$t": "tag", "nested": {"$t": [1]},
                },
            )
        ],
        metadata={"half": (0.5,)},
    ),
    "metrics that are not finite": TrajectoryGroup(
        [Trajectory([], metrics={"up": math.inf, "down": -math.inf, "fine": 1})], metrics={"g": math.inf}
    ),
    "bools and integers as metrics": TrajectoryGroup(
        [Trajectory([], metrics={"won": True, "turns": 3, "large": 2**53 + 1, "larger": 10**308, "too": 10**308})],
        metrics={"large": -(2**70) - 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_a_group_comes_back_equal(back, group):
    assert back(group) == [group]


def test_groups_come_back_in_order_whatever_stands_between_them(back):
    groups = list(GROUPS.values())
    assert back(*groups) == groups
    assert back(*reversed(groups)) == groups[::-1]
    assert back() == []


def test_groups_come_back_equal_over_many_row_groups(back, monkeypatch, tmp_path):
    monkeypatch.setattr("art_ray.ledger.parquet_writer.ROWS_AT_ONCE", 3)
    groups = [*GROUPS.values(), *GROUPS.values()]
    assert back(*groups) == groups
    assert pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups > 10


def test_the_first_columns_are_those_that_art_reads(back, tmp_path):
    back(group_of(1.0))
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.string()), ("tool_call_id", pa.string()),
         ("trainable", pa.bool_())]
    )  # fmt: skip
    strings = pa.list_(pa.string())
    expected = [
        ("group_index", pa.int64()), ("group_metadata", pa.string()), ("group_metrics", pa.string()),
        ("group_logs", strings), ("reward", pa.float64()), ("metrics", pa.string()), ("metadata", pa.string()),
        ("tools", pa.string()), ("logs", strings), ("messages", pa.list_(message)),
    ]  # fmt: skip
    file = pq.ParquetFile(tmp_path / "groups.parquet")
    stored = [(entry.name, entry.type) for entry in file.schema_arrow]
    assert [name for name, _ in stored[:10]] == [name for name, _ in expected]
    for (_, found), (name, wanted) in zip(stored, expected, strict=False):
        assert str(found).replace("element", "item") == str(wanted).replace("element", "item"), name
    assert file.metadata.row_group(0).column(4).compression == "ZSTD"
    assert file.schema_arrow.metadata[b"art_ray.format_version"] == b"1"


def test_what_is_empty_is_null(back, tmp_path):
    back(group_of(1.0))
    row = pq.read_table(tmp_path / "groups.parquet").to_pylist()[0]
    for name in ("group_metadata", "group_metrics", "group_logs", "metrics", "metadata", "tools", "logs", "duration"):
        assert row[name] is None, name


def test_what_people_query_lies_in_typed_columns(back, tmp_path):
    back(
        TrajectoryGroup(
            [
                Trajectory(conversation(answer("a", 2, version=5), answer("b", 3, version=4, finish_reason="length")),
                           reward=1.0, metrics={"duration": 2.5}),
                Trajectory(conversation({"role": "assistant", "content": "x"}), reward=0.0),
                failure(),
            ]
        )
    )  # fmt: skip
    frame = polars.read_parquet(tmp_path / "groups.parquet")
    assert frame.schema["token_ids"] == polars.List(polars.Int32)
    assert frame.schema["logprobs"] == polars.List(polars.Float32)
    assert frame["token_ids"].to_list() == [[100, 101, 100, 101, 102], None]
    assert frame["logprobs"].to_list() == [[0.0, -0.25, 0.0, -0.25, -0.5], None]
    assert frame["answer_lengths"].to_list() == [[2, 3], None]
    assert frame["prompt_token_ids"].to_list() == [[[7, 8, 9], [7, 8, 9]], None]
    assert frame["policy_version"].to_list() == [4, None]
    assert frame["finish_reason"].to_list() == ["length", None]
    assert frame["duration"].to_list() == [2.5, None]
    assert frame["num_answers"].to_list() == [2, 0]
    assert frame["group_exceptions"][0][0]["type"] == "ValueError"
    assert "raise ValueError" in frame["group_exceptions"][0][0]["traceback"]


def outcomes_of(path):
    return polars.read_parquet(path)["outcome"].to_list()


def test_a_row_says_what_became_of_the_rollout(back, tmp_path):
    silent = Trajectory(conversation({"role": "assistant", "content": "x"}), reward=0.25)
    unscored = Trajectory(conversation(answer()), reward=math.nan)
    mixed = TrajectoryGroup([*group_of(0.0, 1.0), silent, unscored, failure()])
    residue = group_of(0.1, 0.1, 0.1 + 1e-12)
    back(mixed, residue, for_training=True)
    assert outcomes_of(tmp_path / "groups.parquet") == [
        "scored", "scored", "no_logprobs", "not_scored", "no_spread", "no_spread", "no_spread",
    ]  # fmt: skip
    back(mixed, residue)
    assert outcomes_of(tmp_path / "groups.parquet") == ["scored"] * 3 + ["not_scored"] + ["scored"] * 3


def streamed(**sampled):
    """An answer as OpenAI's client puts it together from our stream: ids beside the log-probabilities."""
    fields = answer().model_dump(exclude_unset=True)
    for entry, token_id in zip(fields["logprobs"]["content"], fields.pop("token_ids"), strict=True):
        entry["token_id"] = token_id
    return ParsedChoice.model_validate({**fields, **sampled})


@pytest.mark.parametrize("sampled", [{}, {"token_ids": [102]}, {"token_ids": None}, {"token_ids": (100, 101, 102)}])
def test_a_streamed_answer_comes_back_equal_and_its_tokens_lie_in_typed_columns(back, tmp_path, sampled):
    group = TrajectoryGroup([Trajectory(conversation(streamed(**sampled), answer(num_tokens=2)))])
    [read] = back(group)
    assert read == group
    assert type(read.trajectories[0].messages_and_choices[1]) is ParsedChoice
    frame = polars.read_parquet(tmp_path / "groups.parquet")
    assert frame["token_ids"].to_list() == [[100, 101, 102, 100, 101]]
    assert frame["answer_lengths"].to_list() == [[3, 2]]


def test_a_row_never_calls_scored_what_the_trainer_refuses_for_its_tokens(back, tmp_path):
    """The rule is written twice, by fields and by columns: both must say the same of any trajectory."""
    without = answer(version=None)
    conversations = [
        [answer()],
        [answer(), without],
        [answer(), streamed()],
        [answer(), {"role": "assistant", "content": "by hand"}],
        [{"role": "assistant", "content": "by hand"}],
        [answer(num_tokens=0)],
        [answer(num_tokens=1, prompt_token_ids=[])],
        [answer(num_tokens=1, prompt_token_ids=[]), answer(num_tokens=1, prompt_token_ids=[100, 5])],
        [answer(num_tokens=2, prompt_token_ids=[])],
        [answer(token_ids=[1])],
        [answer(temperature="hot")],
    ]
    trajectories = [Trajectory(items, reward=float(i)) for i, items in enumerate(conversations)]
    history = History(messages_and_choices=[without])
    trajectories.append(Trajectory([answer()], additional_histories=[history], reward=-1.0))
    back(TrajectoryGroup(trajectories), for_training=True)
    for row, trajectory in zip(outcomes_of(tmp_path / "groups.parquet"), trajectories, strict=True):
        found = samples_of(trajectory, max_tokens=100)
        assert row == (found.outcome if isinstance(found, Refusal) else "scored"), trajectory


def test_numpy_scalars_and_arrays_come_back_as_numbers_and_lists(back):
    trajectory = Trajectory([], reward=np.float32(0.5), metrics={"a": np.int64(3)}, metadata={"x": np.arange(3)})
    trajectory.metrics["b"] = np.float32(0.25)  # set later, past validation
    [[read]] = back(TrajectoryGroup([trajectory]))
    assert (read.reward, read.metrics, read.metadata) == (0.5, {"a": 3, "b": 0.25}, {"x": [0, 1, 2]})


def test_a_file_of_a_newer_version_is_refused_with_both_versions(tmp_path):
    table = pa.table({"reward": [1.0]}).replace_schema_metadata({"art_ray.format_version": "7"})
    pq.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(LedgerFormatError, match=r"version 7.* up to 1"):
        read_trajectory_groups_parquet(tmp_path / "new.parquet")


def test_what_holds_no_trajectories_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(LedgerFormatError, match="holds no trajectories"):
        read_trajectory_groups_parquet(tmp_path / "other.parquet")
    with pytest.raises(LedgerFormatError, match="is no parquet file"):
        read_trajectory_groups_parquet(tmp_path / "torn.parquet")
    with pytest.raises(FileNotFoundError):
        read_trajectory_groups_parquet(tmp_path / "absent.parquet")


def test_columns_that_a_later_version_adds_are_passed_over(back, tmp_path):
    back(group_of(1.0))
    path = tmp_path / "groups.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("more", pa.array([1])).replace_schema_metadata(table.schema.metadata), path)
    assert read_trajectory_groups_parquet(path) == [group_of(1.0)]
    assert [entry.name for entry in SCHEMA][:3] == ["group_index", "group_metadata", "group_metrics"]


_STREAMED = """
import re, sys
from pathlib import Path
from art_ray.ledger import iterate_trajectory_groups_parquet
from art_ray.ledger.parquet_writer import GroupWriter
from tests.ledger.made import Trajectory, TrajectoryGroup

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def group(i):
    text = f"{i:04d} " * 20_000
    return TrajectoryGroup([Trajectory([{"role": "user", "content": text + str(t)}], reward=t) for t in range(10)])

path = Path(sys.argv[1])
writer = GroupWriter(path)
for i in range(60):
    writer.write(group(i))
writer.close({})
sum(1 for _ in iterate_trajectory_groups_parquet(path))
settled = peak()
writer = GroupWriter(path)
for i in range(int(sys.argv[2])):
    writer.write(group(i))
writer.close({})
count = sum(len(g) for g in iterate_trajectory_groups_parquet(path))
print(count, peak() - settled)
"""


def test_five_times_the_groups_need_no_more_memory(tmp_path):
    answered = subprocess.run(
        [sys.executable, "-c", _STREAMED, str(tmp_path / "x.parquet"), "300"],
        capture_output=True,
        text=True,
        check=True,
    )
    count, additional_mib = answered.stdout.split()
    assert int(count) == 3000  # 300 MB of text
    assert float(additional_mib) < 160


def test_reading_is_a_stream(back, tmp_path):
    back(*[group_of(0.0, 1.0)] * 20)
    groups = iterate_trajectory_groups_parquet(tmp_path / "groups.parquet")
    assert next(groups) == group_of(0.0, 1.0)
    assert sum(1 for _ in groups) == 19
