"""200 malformed or odd inputs: each is logged right, or refused clearly with nothing of it on disk."""

import array
import dataclasses
import decimal
import enum
import json
import math
import uuid
from datetime import UTC, date, datetime
from pathlib import PurePosixPath

import numpy as np
import pydantic
import pytest

from art_ray.errors import ArtRayError
from art_ray.ledger import read_trajectory_groups_parquet
from art_ray.trajectories import Choice, History, RolloutFailure, Trajectory, TrajectoryGroup, as_groups
from tests.ledger.made import answer, conversation, group_of, ledger_at, lines_of, parquet_files


class Odd:
    """A value of a class that no file can bring back."""


class Hostile:
    """Whose every look at it fails."""

    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


class Color(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int = 1


class Shape(pydantic.BaseModel):
    size: int = 1


class BrokenError(Exception):
    def __str__(self):
        raise ValueError("even its text is broken")


def cyclic():
    value = {"self": None}
    value["self"] = value
    return value


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def torch_scalar(value, dtype="float32"):
    torch = pytest.importorskip("torch")
    return torch.tensor(value, dtype=getattr(torch, dtype))


def one(trajectory, **values):
    return [TrajectoryGroup([trajectory], **values)]


def changed(**fields):
    """A group whose trajectory was changed after it was made, past all validation."""
    trajectory = Trajectory(conversation(), reward=0.5)
    for name, value in fields.items():
        object.__setattr__(trajectory, name, value)
    return [TrajectoryGroup([trajectory, Trajectory([], reward=1.0)])]


def group_changed(**fields):
    group = group_of(0.0, 1.0)
    for name, value in fields.items():
        object.__setattr__(group, name, value)
    return [group]


def metadata(value):
    return one(Trajectory([], metadata={"x": value}))


def metric(value):
    trajectory = Trajectory([], reward=0.5)
    trajectory.metrics["x"] = value
    return one(trajectory)


def message(**fields):
    return one(Trajectory([fields]))


def choice_with(**fields):
    made = answer()
    for name, value in fields.items():
        (made.model_extra if name in made.model_extra else made.__dict__)[name] = value
    return one(Trajectory([made]))


TOKEN = {"token": "a", "bytes": None, "top_logprobs": []}

# What comes back must be equal to what was logged: (name, groups).
LOGGED = {
    # rewards
    "reward nan": lambda: one(Trajectory([], reward=math.nan)),
    "reward infinite": lambda: one(Trajectory([], reward=math.inf)),
    "reward minus infinite": lambda: one(Trajectory([], reward=-math.inf)),
    "reward minus zero": lambda: one(Trajectory([], reward=-0.0)),
    "reward denormal": lambda: one(Trajectory([], reward=5e-324)),
    "reward largest": lambda: one(Trajectory([], reward=1.7976931348623157e308)),
    "rewards whose sum overflows": lambda: [group_of(1.7e308, 1.7e308)],
    "rewards far apart": lambda: [group_of(-1.7e308, 1.7e308)],
    "reward integer": lambda: one(Trajectory([], reward=3)),
    "reward bool": lambda: one(Trajectory([], reward=True)),
    "reward numpy float32": lambda: one(Trajectory([], reward=np.float32(0.5))),
    "reward numpy int": lambda: one(Trajectory([], reward=np.int8(1))),
    "reward numpy bool": lambda: one(Trajectory([], reward=np.bool_(True))),
    "reward numpy array of one": lambda: one(Trajectory([], reward=np.array([0.5]))),
    "reward torch": lambda: one(Trajectory([], reward=torch_scalar(0.5))),
    "reward torch bfloat16": lambda: one(Trajectory([], reward=torch_scalar(0.5, "bfloat16"))),
    "reward changed to an integer": lambda: changed(reward=1),
    # metrics
    "metric nan": lambda: metric(math.inf),
    "metric bool": lambda: metric(True),
    "metric zero-dimensional array": lambda: one(Trajectory([], metrics={"x": np.array(2.5)})),
    "metric torch int": lambda: one(Trajectory([], metrics={"x": torch_scalar(2, "int64")})),
    "metric with an empty name": lambda: one(Trajectory([], metrics={"": 1})),
    "metric with a slash": lambda: one(Trajectory([], metrics={"a/b": 1})),
    "metric with a newline": lambda: one(Trajectory([], metrics={"a\nb": 1})),
    "metric with a quote": lambda: one(Trajectory([], metrics={'a"b': 1})),
    "metric with a surrogate": lambda: one(Trajectory([], metrics={"\ud800": 1})),
    "metric named step": lambda: one(Trajectory([], metrics={"step": 99})),
    "metric named recorded_at": lambda: one(Trajectory([], metrics={"recorded_at": 1})),
    "metric named reward": lambda: one(Trajectory([], metrics={"reward": 99})),
    "metric named like a group's": lambda: one(Trajectory([], metrics={"group_x": 1}), metrics={"x": 2}),
    "a thousand metrics": lambda: one(Trajectory([], metrics={f"m{i}": i for i in range(1000)})),
    "group metric infinite": lambda: [group_of(0.0, metrics={"x": math.inf})],
    "duration infinite": lambda: one(Trajectory([], metrics={"duration": math.inf})),
    # metadata
    "metadata numpy scalar": lambda: metadata(np.float64(0.5)),
    "metadata tuple": lambda: metadata((1, "a")),
    "metadata set": lambda: metadata({1, 2}),
    "metadata frozenset": lambda: metadata(frozenset("ab")),
    "metadata bytes": lambda: metadata(b"\xff\x00"),
    "metadata datetime": lambda: metadata(datetime(2026, 1, 1, tzinfo=UTC)),
    "metadata date": lambda: metadata(date(2026, 1, 1)),
    "metadata decimal": lambda: metadata(decimal.Decimal("0.1")),
    "metadata uuid": lambda: metadata(uuid.UUID(int=7)),
    "metadata path": lambda: metadata(PurePosixPath("/a/b")),
    "metadata string enumeration": lambda: metadata(Color.RED),
    "metadata integer enumeration": lambda: metadata(Level.HIGH),
    "metadata integer keys": lambda: metadata({1: 2, None: 3, (1, 2): 4}),
    "metadata our own tag": lambda: metadata({"$t": "tuple", "v": 1}),
    "metadata nan inside": lambda: metadata([1.0, math.inf]),
    "metadata huge integer": lambda: metadata(-(10**6000)),
    "metadata integer beyond 64 bits": lambda: metadata(2**70),
    "metadata empty containers": lambda: metadata([{}, [], "", None]),
    "metadata nested 90 deep": lambda: metadata(nested(90)),
    "metadata none": lambda: metadata(None),
    "metadata empty key": lambda: one(Trajectory([], metadata={"": 1})),
    "metadata surrogate": lambda: metadata("\ud83d"),
    "metadata surrogate pair": lambda: metadata("\ud83d\ude00"),
    "metadata nul": lambda: metadata("a\x00b"),
    "metadata of 10 MB": lambda: metadata("x" * 10_000_000),
    "metadata of 10,000 keys": lambda: one(Trajectory([], metadata={str(i): i for i in range(10_000)})),
    "group metadata nested": lambda: [group_of(0.0, metadata={"a": {"b": [1, (2,)]}})],
    # messages
    "message empty": lambda: message(),
    "message without role": lambda: message(content="x"),
    "message role none": lambda: message(role=None, content="x"),
    "message role integer": lambda: message(role=1, content="x"),
    "message role surrogate": lambda: message(role="\ud800", content="x"),
    "message without content": lambda: message(role="user"),
    "message content none": lambda: message(role="user", content=None),
    "message content integer": lambda: message(role="user", content=3),
    "message content dict": lambda: message(role="user", content={"a": 1}),
    "message content empty list": lambda: message(role="user", content=[]),
    "message content parts": lambda: message(role="user", content=[{"type": "text", "text": "x"}]),
    "message content tuple": lambda: message(role="user", content=("a",)),
    "message content bytes": lambda: message(role="user", content=b"x"),
    "message content surrogate": lambda: message(role="user", content="\udfff"),
    "message content of 10 MB": lambda: message(role="user", content="ä" * 10_000_000),
    "message content like JSON": lambda: message(role="user", content='[{"type": "text"}]'),
    "message content infinite": lambda: message(role="user", content=math.inf),
    "message tool calls none": lambda: message(role="assistant", content="x", tool_calls=None),
    "message tool calls text": lambda: message(role="assistant", content="x", tool_calls="call"),
    "message tool calls empty": lambda: message(role="assistant", content="x", tool_calls=[]),
    "message tool call id integer": lambda: message(role="tool", content="x", tool_call_id=3),
    "message tool call id none": lambda: message(role="tool", content="x", tool_call_id=None),
    "message tool call id empty": lambda: message(role="tool", content="x", tool_call_id=""),
    "message unknown keys": lambda: message(role="user", content="x", cache={"ttl": 3}),
    "message keys of our residue": lambda: message(c="s", f={}, m={}, t=1),
    "message like a choice": lambda: one(Trajectory([{"finish_reason": "x", "index": 0, "message": {"role": "a"}}])),
    "message of 1,000 keys": lambda: message(**{f"k{i}": i for i in range(1000)}),
    "10,000 messages": lambda: one(Trajectory([{"role": "user", "content": str(i)} for i in range(10_000)])),
    # answers
    "answer without content": lambda: one(Trajectory([answer(None)])),
    "answer without tokens": lambda: one(Trajectory([answer(num_tokens=0)])),
    "answer with text ids": lambda: choice_with(token_ids=["a", "b", "c"]),
    "answer with float ids": lambda: choice_with(token_ids=[1.5, 2.0, 3.0]),
    "answer with negative ids": lambda: choice_with(token_ids=[-1, 2, 3]),
    "answer with huge ids": lambda: choice_with(token_ids=[2**63, 2, 3]),
    "answer with nested ids": lambda: choice_with(token_ids=[[1], [2], [3]]),
    "answer with uneven ids": lambda: choice_with(token_ids=[[1], [2, 3], 4]),
    "answer with ids that are a number": lambda: choice_with(token_ids=3),
    "answer with too few ids": lambda: choice_with(token_ids=[1]),
    "answer with prompt ids none": lambda: choice_with(prompt_token_ids=None),
    "answer with version text": lambda: choice_with(policy_version="two"),
    "answer with version huge": lambda: choice_with(policy_version=2**80),
    "answer with version negative": lambda: choice_with(policy_version=-1),
    "answer with temperature none": lambda: choice_with(temperature=None),
    "answer with log-probabilities none": lambda: choice_with(logprobs=None),
    "answer with log-probability minus infinity": lambda: one(
        Trajectory([answer(logprobs={"content": [{**TOKEN, "logprob": -math.inf}], "refusal": None}, token_ids=[1])])
    ),
    "answer with finish reason of an engine": lambda: one(
        Trajectory([Choice.construct(finish_reason="abort", index=0, message={"role": "assistant", "content": "x"})])
    ),
    "answer with little in it": lambda: one(Trajectory([Choice.construct(message={"role": "assistant"})])),
    "answer with content parts": lambda: one(
        Trajectory([Choice.construct(finish_reason="stop", index=0, message={"role": "x", "content": [{"a": 1}]})])
    ),
    "answer with a refusal": lambda: one(Trajectory([answer(None, message={"refusal": "no"})])),
    "answer with surrogates": lambda: one(Trajectory([answer("\ud800\udc00")])),
    "answer with fields of its own": lambda: one(Trajectory([answer(stop_reason=7, more={"a": (1,)})])),
    # tools, logs, histories
    "tools empty": lambda: one(Trajectory([], tools=[])),
    "tools of one empty dict": lambda: one(Trajectory([], tools=[{}])),
    "tools with a tuple": lambda: one(Trajectory([], tools=[{"a": (1,)}])),
    "logs with surrogates": lambda: one(Trajectory([], logs=["\ud800", "\ud800\udc00", ""])),
    "logs of 10 MB": lambda: one(Trajectory([], logs=["x" * 10_000_000])),
    "100,000 log lines": lambda: one(Trajectory([], logs=["x"] * 100_000)),
    "history empty": lambda: one(Trajectory([], additional_histories=[History(messages_and_choices=[])])),
    "histories with answers": lambda: one(
        Trajectory([answer()], additional_histories=[History(messages_and_choices=[answer(), {"a": math.inf}])] * 2)
    ),
    # groups and failures
    "group empty": lambda: [TrajectoryGroup([])],
    "a hundred empty groups": lambda: [TrajectoryGroup([], metadata={"i": i}) for i in range(100)],
    "group of failures": lambda: [TrajectoryGroup([ValueError("x"), KeyError("y")])],
    "failure without words": lambda: [TrajectoryGroup([Exception()])],
    "failure whose text is broken": lambda: [TrajectoryGroup([BrokenError()])],
    "failure with surrogates": lambda: [TrajectoryGroup([ValueError("\ud800\udc00")])],
    "failure of 10 MB": lambda: [TrajectoryGroup([ValueError("x" * 10_000_000)])],
    "failure as a record": lambda: [
        TrajectoryGroup([], exceptions=[RolloutFailure(type="", message="", traceback="")])
    ],
    "base exception": lambda: [TrajectoryGroup([], exceptions=[SystemExit(3)])],
    "a thousand trajectories in a group": lambda: [group_of(*map(float, range(1000)))],
    "a thousand groups of one": lambda: [group_of(float(i)) for i in range(1000)],
    "the same group twice": lambda: [group_of(0.0, 1.0)] * 2,
    "the same trajectory twice": lambda: [TrajectoryGroup([Trajectory([answer()], reward=1.0)] * 2)],
}  # fmt: skip

# What is refused: (name, groups, words of the message).
REFUSED = {
    "reward text": (lambda: changed(reward="high"), "group 0, trajectory 0: reward must be a number, got str"),
    "reward none": (lambda: changed(reward=None), "reward must be a number, got NoneType"),
    "reward list": (lambda: changed(reward=[1.0]), "reward must be a number, got list"),
    "reward complex": (lambda: changed(reward=1j), "reward must be a number, got complex"),
    "reward array of two": (lambda: changed(reward=np.zeros(2)), "reward must be a number, got ndarray"),
    "reward tensor of two": (lambda: changed(reward=torch_scalar([0.0, 1.0])), "reward must be a number, got Tensor"),
    "reward meta tensor": (lambda: changed(reward=torch_scalar(0.0).to("meta")), "gives no number"),
    "reward integer beyond doubles": (lambda: changed(reward=10**400), "beyond the range of a double"),
    "reward hostile": (lambda: changed(reward=Hostile()), "reward must be a number, got Hostile"),
    "metric text": (lambda: metric("high"), "metrics['x'] must be a number, got str"),
    "metric none": (lambda: metric(None), "metrics['x'] must be a number, got NoneType"),
    "metric dict": (lambda: metric({}), "must be a number, got dict"),
    "metric array": (lambda: metric(np.zeros(3)), "must be a number, got ndarray"),
    "metric decimal": (lambda: metric(decimal.Decimal("0.1")), "must be a number, got Decimal"),
    "metric integer beyond doubles": (lambda: metric(10**400), "beyond the range of a double"),
    "metric hostile": (lambda: metric(Hostile()), "must be a number, got Hostile"),
    "metric name integer": (lambda: changed(metrics={1: 2.0}), "must be a text, got int"),
    "metrics none": (lambda: changed(metrics=None), "metrics must map names to numbers, got NoneType"),
    "metrics list": (lambda: changed(metrics=[1]), "metrics must map names to numbers, got list"),
    "group metric text": (lambda: group_changed(metrics={"x": "y"}), "group 0: metrics['x'] must be a number"),
    "group metrics none": (lambda: group_changed(metrics=None), "group 0: metrics must map names"),
    "metadata cyclic": (lambda: metadata(cyclic()), "levels deep, or contains itself"),
    "metadata cyclic list": (lambda: metadata((lambda x: (x.append(x), x)[1])([])), "contains itself"),
    "metadata nested too deep": (lambda: metadata(nested(5000)), "levels deep, or contains itself"),
    "metadata object": (lambda: metadata(Odd()), "metadata['x'] is a tests.ledger.test_malformed.Odd"),
    "metadata object deep": (lambda: metadata({"a": [Odd()]}), "metadata['x']['a'] is a"),
    "metadata hostile": (lambda: metadata(Hostile()), "Hostile, which could not be read back"),
    "metadata function": (lambda: metadata(len), "could not be read back"),
    "metadata generator": (lambda: metadata(x for x in "ab"), "could not be read back"),
    "metadata dataclass": (lambda: metadata(Point()), "could not be read back"),
    "metadata pydantic model": (lambda: metadata(Shape()), "model_dump()"),
    "metadata complex": (lambda: metadata(1j), "could not be read back"),
    "metadata exception": (lambda: metadata(ValueError()), "could not be read back"),
    "metadata meta tensor": (lambda: metadata(torch_scalar([1.0]).to("meta")), "gives no numbers"),
    "metadata object as key": (lambda: metadata({Odd(): 1}), "could not be read back"),
    "metadata list": (lambda: changed(metadata=[1]), "metadata must be a dict, got list"),
    "metadata as none": (lambda: changed(metadata=None), "metadata must be a dict, got NoneType"),
    "group metadata object": (lambda: group_changed(metadata={"x": Odd()}), "group 0: metadata['x'] is a"),
    "group metadata text": (lambda: group_changed(metadata="x"), "group 0: metadata must be a dict, got str"),
    "message object": (lambda: message(role="user", content=Odd()), "['content'] is a"),
    "message cyclic": (lambda: message(role="user", content="x", more=cyclic()), "contains itself"),
    "messages none": (lambda: changed(messages_and_choices=None), "messages_and_choices must be a list, got NoneType"),
    "messages of texts": (lambda: changed(messages_and_choices=["x"]), "message 0 must be a dict or a Choice, got str"),
    "messages of none": (lambda: changed(messages_and_choices=[None]), "message 0 must be a dict or a Choice"),
    "answer with an object": (lambda: choice_with(temperature=Odd()), "['temperature'] is a"),
    "tools object": (lambda: one(Trajectory([], tools=[{"f": Odd()}])), "tools"),
    "tools cyclic": (lambda: one(Trajectory([], tools=[cyclic()])), "contains itself"),
    "logs text": (lambda: changed(logs="abc"), "logs must be a list of texts, got str"),
    "logs of numbers": (lambda: changed(logs=[1]), "a line of logs must be a text, got int"),
    "logs none": (lambda: changed(logs=None), "logs must be a list of texts, got NoneType"),
    "group logs of bytes": (lambda: group_changed(logs=[b"x"]), "group 0: a line of logs must be a text, got bytes"),
    "history object": (
        lambda: one(Trajectory([], additional_histories=[History(messages_and_choices=[{"a": Odd()}])])), "history 0",
    ),
    "a trajectory among groups": (lambda: [group_of(1.0), Trajectory([])], "group 1 is Trajectory"),
    "none among groups": (lambda: [group_of(1.0), None], "group 1 is NoneType"),
    "text among groups": (lambda: [group_of(1.0), "group"], "group 1 is str"),
    "the second of two": (lambda: [group_of(1.0), *changed(reward="x")], "group 1, trajectory 0: reward"),
    "the last of many row groups": (lambda: [*[group_of(*[0.5] * 500)] * 6, *changed(reward="x")], "group 6"),
    "a generator that fails": (lambda: (group_of(1.0) if i < 3 else 1 / 0 for i in range(5)), "division by zero"),
}  # fmt: skip

# Values of `metrics=`: the number in the history, None for null, or a refusal.
GIVEN = {
    "integer": (3, 3), "float": (0.5, 0.5), "bool": (True, 1), "numpy float32": (np.float32(0.5), 0.5),
    "numpy int64": (np.int64(3), 3), "numpy bool": (np.bool_(True), 1), "numpy half": (np.float16(0.5), 0.5),
    "array of none": (np.array(2), 2), "array of one": (np.array([2.0]), 2.0), "nan": (math.nan, None),
    "infinity": (math.inf, None), "numpy nan": (np.float32("nan"), None), "large": (2**60, float(2**60)),
    "negative zero": (-0.0, 0.0), "denormal": (5e-324, 5e-324), "integer enumeration": (Level.HIGH, 3),
    "torch": (lambda: torch_scalar(0.5), 0.5), "torch bool": (lambda: torch_scalar(True, "bool"), 1),
    "torch nan": (lambda: torch_scalar(math.nan), None),
    "text": ("0.5", TypeError), "none": (None, TypeError), "list": ([1], TypeError), "dict": ({}, TypeError),
    "array of two": (np.zeros(2), TypeError), "array of text": (array.array("u", "ab"), TypeError),
    "complex": (1j, TypeError), "bytes": (b"1", TypeError), "function": (len, TypeError), "huge": (10**400, TypeError),
    "numpy text": (np.str_("x"), TypeError), "numpy date": (np.datetime64("2026-01-01"), TypeError),
}  # fmt: skip

MIXED = {
    "groups and trajectories": (lambda: [group_of(1.0), Trajectory([])], "a mixture"),
    "groups and exceptions": (lambda: [group_of(1.0), ValueError()], "a mixture"),
    "text": (lambda: "abc", "expected trajectory groups"),
    "number": (lambda: 3, "got int"),
    "dict": (lambda: {"a": 1}, "item 0 is str"),
    "list of none": (lambda: [None], "item 0 is NoneType"),
    "nested lists": (lambda: [[group_of(1.0)]], "item 0 is list"),
    "generator of numbers": (lambda: (i for i in range(3)), "item 0 is int"),
    "classes": (lambda: [TrajectoryGroup], "item 0 is"),
}


def test_there_are_at_least_200_of_them():
    assert len(LOGGED) + len(REFUSED) + len(GIVEN) + len(MIXED) >= 200


@pytest.fixture
def ledger(tmp_path):
    """With a call before, which nothing may harm."""
    ledger = ledger_at(tmp_path)
    ledger.log([group_of(0.0, 1.0)], split="val", step=0)
    return ledger


def untouched(ledger, path=None):
    """Whether only the first call is on disk, readable."""
    files = [file for file in ledger.folder.rglob("*") if file.is_file() and not file.name.endswith(".lock")]
    assert sorted(file.name for file in files) == ["0000.parquet", "history.jsonl", "model.json"]
    assert len(lines_of(ledger)) == 1
    return read_trajectory_groups_parquet(parquet_files(ledger)[0]) == [group_of(0.0, 1.0)]


@pytest.mark.parametrize("make", LOGGED.values(), ids=LOGGED.keys())
def test_odd_input_is_logged_as_it_is(ledger, make):
    groups = make()
    receipt = ledger.log(groups, split="val", step=1)
    assert read_trajectory_groups_parquet(receipt.parquet_path) == groups
    line = lines_of(ledger)[1]
    assert line["step"] == 1
    assert all(value is None or isinstance(value, (int, float)) for key, value in line.items() if "/" in key)


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_logged_is_refused_and_leaves_nothing(ledger, make, words):
    groups = make()
    with pytest.raises((TypeError, ArtRayError, ZeroDivisionError)) as refusal:
        ledger.log(groups, split="val", step=1)
    assert words in str(refusal.value)
    assert untouched(ledger)
    ledger.log([group_of(0.5)], split="val", step=1)  # and the next call works
    assert len(lines_of(ledger)) == len(parquet_files(ledger)) == 2


@pytest.mark.parametrize(("value", "expected"), GIVEN.values(), ids=GIVEN.keys())
def test_a_given_metric_becomes_a_number_or_is_refused(ledger, value, expected):
    if getattr(value, "__name__", "") == "<lambda>":
        value = value()
    if expected is TypeError:
        with pytest.raises(TypeError, match=r"metrics\['x'\]"):
            ledger.log([group_of(1.0)], split="val", step=1, metrics={"x": value})
        assert untouched(ledger)
        return
    ledger.log(None, split="val", step=1, metrics={"x": value})
    written = (ledger.folder / "history.jsonl").read_text().splitlines()[1]
    found = json.loads(written, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["val/x"]
    assert (found, type(found)) == (expected, type(expected)) or found == expected


@pytest.mark.parametrize("metrics", [[("x", 1)], "x", 3, {1: 2}, {None: 1}, {("a",): 1}], ids=repr)
def test_metrics_that_map_no_names_to_numbers_are_refused(ledger, metrics):
    with pytest.raises(TypeError, match="metrics"):
        ledger.log(None, split="val", step=1, metrics=metrics)
    assert untouched(ledger)


@pytest.mark.parametrize(("make", "words"), MIXED.values(), ids=MIXED.keys())
def test_what_is_neither_groups_nor_trajectories_is_refused(make, words):
    with pytest.raises(TypeError, match=words):
        as_groups(make())
