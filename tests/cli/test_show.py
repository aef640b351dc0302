"""`art-ray show`, in the terminal and as a page."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest

from art_ray.cli import page
from art_ray.trajectories import Trajectory, TrajectoryGroup
from tests.cli.made import HOSTILE, OBEYED, json_of, odd_group, refused, succeed
from tests.ledger.made import answer, conversation, group_of, ledger_at


def shown(base, *options):
    return ("show", "demo/agent", "--base-path", base, *options)


def test_the_newest_step_is_shown_with_rewards_messages_and_a_summary(base):
    lines = succeed(*shown(base)).splitlines()
    assert lines[:6] == [
        "group 0  rewards 0, 2",
        "  trajectory 0.0  reward 0",
        "    user",
        "      yes or no?",
        "    assistant  (3 tokens, version 2, stop)",
        "      yes",
    ]
    assert "group 1  rewards 1, 1  (all equal: nothing to prefer)" in lines
    assert lines[-1] == "demo/agent, train step 2: 2 groups, 4 trajectories, 0 failed, mean reward 1"


def test_json_has_the_groups_as_they_were_logged(base):
    ledger_at(base).log([group_of(1.0, metadata={"scenario": "s"}, logs=["line"])], split="val", step=7)
    found = json_of(*shown(base, "--split", "val", "--step", 7))
    assert found["summary"] == {"groups": 1, "trajectories": 1, "scored": 1, "failures": 0, "mean_reward": 1.0}
    assert found["files"] == [str(base / "demo/models/agent/trajectories/val/0007.parquet")]
    [group] = found["groups"]
    assert (group["group"], group["metadata"], group["logs"]) == (0, {"scenario": "s"}, ["line"])
    question, said = group["trajectories"][0]["messages"]
    assert question == {"message": {"role": "user", "content": "yes or no?"}}
    assert said["message"]["content"] == "yes"
    assert (said["finish_reason"], said["sampling"]["tokens"], said["sampling"]["versions"]) == ("stop", 3, [2])
    assert math.isclose(said["sampling"]["logprob"], -0.75)


def test_json_of_odd_values_is_json_with_null_where_a_number_is_none(tmp_path):
    ledger_at(tmp_path).log([odd_group()], split="train", step=0)
    found = json_of(*shown(tmp_path))["groups"][0]
    assert found["trajectories"][0]["reward"] is None
    assert found["failures"][0]["type"] == "ValueError"
    assert len(found["trajectories"][0]["additional_histories"]) == 1


def test_failures_tools_images_and_further_conversations_are_shown(tmp_path):
    ledger_at(tmp_path).log([odd_group("it")], split="train", step=0)
    lines = [line.strip() for line in succeed(*shown(tmp_path)).splitlines()]
    for line in (
        "failed: ValueError: it",
        "trajectory 0.0  reward not scored",
        "user (it)",
        "[image_url] https://example.org/it",
        "calls it(it)  as c1",
        "(reasoning) it",
        "tool (result of it)",
        "assistant  (tokens unknown)",
        "[refusal] it",
        "additional history 0",
        "log it",
    ):
        assert line in lines, line


def test_a_step_that_was_logged_twice_is_shown_as_one(base):
    ledger_at(base).log([group_of(5.0)], split="train", step=2)
    found = json_of(*shown(base, "--step", 2))
    assert [group["group"] for group in found["groups"]] == [0, 1, 2]
    assert len(found["files"]) == 2
    assert [group["group"] for group in json_of(*shown(base, "--group", 2))["groups"]] == [2]
    assert "group 2  rewards 5" in succeed(*shown(base, "--group", 2))


def test_what_is_not_printed_is_counted(base):
    lines = succeed(*shown(base, "--limit", 1)).splitlines()
    assert lines[-2] == "3 more trajectories: --limit 0 prints all, --group N those of one group"
    assert "4 trajectories" in lines[-1]
    assert "more trajectories" not in succeed(*shown(base, "--limit", 0))


def test_long_texts_are_cut_and_say_so(tmp_path):
    long = "\n".join(f"line {i}" for i in range(50))
    ledger_at(tmp_path).log([TrajectoryGroup([Trajectory(conversation(answer(long)))])], split="train", step=0)
    cut = succeed(*shown(tmp_path))
    assert f"line 7 … (--full shows all {len(long)} characters)" in cut
    assert "line 8\n" not in cut
    assert "line 49\n" in succeed(*shown(tmp_path, "--full"))


def test_an_unknown_split_step_or_group_is_bad_usage_and_those_there_are_named(base):
    assert "no trajectories of split 'tran' (nearest: 'train'). There are: train." in refused(
        *shown(base, "--split", "tran")
    )
    assert "no trajectories of step 9 in split 'train'. There are: 0–2." in refused(*shown(base, "--step", 9))
    assert "no group 9 at step 2 of split 'train'" in refused(*shown(base, "--group", 9))


def test_where_a_file_is_missing_the_steps_that_are_left_are_named(base):
    (base / "demo/models/agent/trajectories/train/0001.parquet").unlink()
    assert "There are: 0, 2." in refused(*shown(base, "--step", 1))


def test_a_split_is_a_folder_of_the_run_and_no_way_out_of_it(base):
    assert "contains a path separator" in refused(*shown(base, "--split", "../trajectories/train"))


class Page(HTMLParser):
    """Every element and attribute of a page; fails where one is not closed."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.text += text


MARKUP = "</pre></details><script src=https://example.org/x.js>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"


@pytest.mark.parametrize("text", [MARKUP, HOSTILE])
def test_a_page_is_complete_in_itself_and_texts_are_texts_in_it(tmp_path, text):
    ledger_at(tmp_path).log([odd_group(text), group_of(0.0, 1.0)], split="train", step=0)
    path = tmp_path / "page.html"
    printed = succeed(*shown(tmp_path, "--html", path))
    assert f"written to {path}" in printed
    content = path.read_text()
    assert not OBEYED & set(content)
    found = Page(content)
    kinds = {tag for tag, _ in found.elements}
    assert kinds <= {"html", "head", "meta", "title", "style", "body", "header", "h1", "p", "b", "details", "summary",
                     "div", "pre", "span", "img"}  # fmt: skip
    for _, attributes in found.elements:
        assert set(attributes) <= {
            "lang",
            "charset",
            "http-equiv",
            "content",
            "name",
            "class",
            "open",
            "title",
            "src",
            "alt",
        }
    assert [attributes["src"] for tag, attributes in found.elements if tag == "img"] == [
        "data:image/png;base64,iVBORw0KGgo="
    ]
    if text == MARKUP:
        assert found.text.count(MARKUP) > 10
    assert "default-src 'none'" in content


def test_a_page_says_of_each_sampled_token_how_likely_it_was(base, tmp_path):
    succeed(*shown(base, "--html", tmp_path / "page.html"))
    tokens = [a for tag, a in Page((tmp_path / "page.html").read_text()).elements if tag == "span" and "title" in a]
    assert len(tokens) == 12
    assert tokens[:3] == [
        {"class": "c0", "title": "id 100, log p -0.000, version 2"},
        {"class": "c1", "title": "id 101, log p -0.250, version 2"},
        {"class": "c1", "title": "id 102, log p -0.500, version 2"},
    ]


def test_a_page_with_more_tokens_than_a_browser_likes_holds_the_rest_as_text(base, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_TOKENS", 4)
    succeed(*shown(base, "--html", tmp_path / "page.html"))
    found = Page((tmp_path / "page.html").read_text())
    assert sum("title" in attributes for _, attributes in found.elements) == 3
    assert found.text.count("yes") == 8


def test_a_page_that_fails_leaves_the_old_one_and_nothing_beside_it(base, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "page.html").write_text("old")
    path = base / "demo/models/agent/trajectories/train/0002.parquet"
    content = bytearray(path.read_bytes())
    content[4 : len(content) // 3] = bytes(len(content) // 3 - 4)
    path.write_bytes(content)
    refused(*shown(base, "--html", folder / "page.html"), status=1)
    assert (folder / "page.html").read_text() == "old"
    assert [found.name for found in folder.iterdir()] == ["page.html"]


def test_a_page_in_no_folder_is_bad_usage(base, tmp_path):
    assert "there is no folder" in refused(*shown(base, "--html", tmp_path / "none/page.html"))
    assert "is a folder" in refused(*shown(base, "--html", tmp_path))


def test_a_page_and_json_together_say_where_the_page_is(base, tmp_path):
    found = json_of(*shown(base, "--html", tmp_path / "page.html"))
    assert (found["html"], found["groups"], found["summary"]["groups"]) == (str(tmp_path / "page.html"), None, 2)
