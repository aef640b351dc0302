import pytest

from art_ray.rewards.verdict import UnusableVerdict, read_verdict
from tests.rewards.made import verdict


def scores(text: str, *ids: str) -> list[float]:
    return [found.score for found in read_verdict(text, ids).values()]


def test_scores_come_in_the_order_of_the_ids_with_their_explanations():
    found = read_verdict(verdict({"2": 0.25, "1": 1}), ["1", "2"])
    assert [(id, v.score, v.explanation) for id, v in found.items()] == [
        ("1", 1.0, "because of 1"),
        ("2", 0.25, "because of 2"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```json\n{}\n```",
        "<think>Is {{it}} [good]? {{</think>\n{}",
        "First I thought {} but no.\n\nFinally:\n{}\nThat is all.",
    ],
)
def test_the_last_object_counts_whatever_stands_around_it(text):
    drafts = text.count("{}") - 1
    text = text.replace("{}", verdict({"1": 0.9}), drafts).replace("{}", verdict({"1": 0.5}))
    assert scores(text, "1") == [0.5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no complete JSON object"),
        ("I cannot judge that.", "no complete JSON object"),
        (verdict({"1": 0.5, "2": 0.5})[:-20], "no complete JSON object"),
        ("[0.5, 0.5]", "no complete JSON object"),
        ("{" * 100_000, "no complete JSON object"),
        ('{"a":' * 50_000, "no complete JSON object"),
        (verdict({"1": 0.5}), "'2' is missing"),
        (verdict({"1": 0.5, "2": 0.5, "3": 0.5}), "'3' is not one of the attempts"),
        ('{"1": {"score": 0.1}, "2": {"score": 0.2}, "1": {"score": 0.9}}', "'1' is given more than once"),
        (verdict({"1": 1.5, "2": 0.5}), "1.5 is not from 0 to 1"),
        (verdict({"1": -0.01, "2": 0.5}), "-0.01 is not from 0 to 1"),
        (verdict({"1": "0.5", "2": 0.5}), "'0.5' is no number"),
        (verdict({"1": True, "2": 0.5}), "True is no number"),
        (verdict({"1": None, "2": 0.5}), "None is no number"),
        (verdict({"1": float("nan"), "2": 0.5}), "NaN is no number"),
        ('{"1": {"score": 1e999}, "2": {"score": 0}}', "inf is not from 0 to 1"),
        ('{"1": 0.5, "2": {"score": 0}}', "an object with a score is expected, not 0.5"),
        ('{"1": {"explanation": "good"}, "2": {"score": 0}}', "an object with a score is expected"),
    ],
)
def test_what_is_no_verdict_on_every_attempt_is_refused_with_what_is_wrong(text, problem):
    with pytest.raises(UnusableVerdict) as refused:
        read_verdict(text, ["1", "2"])
    assert problem in str(refused.value)


def test_of_many_problems_some_are_named_and_the_rest_counted():
    with pytest.raises(UnusableVerdict, match="and 89 more"):
        read_verdict(verdict({"1": 0.5}), [str(n) for n in range(1, 101)])
