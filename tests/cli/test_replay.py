"""`art-ray replay`: what was recorded, and a stub of an OpenAI endpoint that is asked again."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from art_ray.trajectories import Trajectory, TrajectoryGroup
from tests.cli.made import CALL, json_of, refused, succeed
from tests.ledger.made import answer, conversation, group_of, ledger_at

FIRST = answer("first", 2, prompt_token_ids=[7, 8], token_ids=[1, 2], temperature=0.5)
GOES_ON = answer("second", 2, version=3, prompt_token_ids=[7, 8, 1, 2, 9], token_ids=[3, 4])
ANEW = answer("third", 1, prompt_token_ids=[9, 9], token_ids=[5], sampling_restrictions={"top_p": 0.9})


@pytest.fixture
def base(tmp_path):
    more = {"role": "user", "content": "go on"}
    of_two = Trajectory(conversation(FIRST, more, GOES_ON, more, ANEW), reward=1.0)
    ledger_at(tmp_path).log([group_of(0.0), TrajectoryGroup([of_two, ValueError("x")])], split="train", step=3)
    return tmp_path


def replayed(base, *options):
    return ("replay", "demo/agent", "--base-path", base, "--group", 1, *options)


def test_each_answer_has_its_tokens_with_ids_log_probabilities_and_versions(base):
    found = json_of(*replayed(base))
    assert (found["step"], found["group"], found["trajectory"], found["reward"]) == (3, 1, 0, 1.0)
    turns = found["conversations"][0]["turns"]
    sampling = turns[3]["sampling"]
    assert sampling["prompt_token_ids"] == [7, 8, 1, 2, 9]
    assert sampling["token_ids"] == [3, 4]
    assert sampling["token_logprobs"] == [0.0, -0.25]
    assert sampling["token_versions"] == [3, 3]
    assert sampling["token_texts"] == ["t0", "t1"]
    assert (turns[1]["sampling"]["temperature"], turns[5]["sampling"]["restrictions"]) == (0.5, {"top_p": 0.9})
    assert turns[1]["asked_again"] is None


def test_the_terminal_says_where_a_prompt_goes_on_and_where_a_sequence_begins(base):
    printed = succeed(*replayed(base))
    assert "after a prompt of 2 tokens; temperature 0.5; log p -0.250 in all" in printed
    assert "after a prompt of 5 tokens, 1 of them new; temperature 1" in printed
    assert "after a prompt of 2 tokens, which do not go on from the answer before: a sequence of its own" in printed
    assert ["'t1'", "4", "-0.2500", "3"] in [line.split() for line in printed.splitlines()]


def test_a_group_or_trajectory_that_is_not_there_is_bad_usage(base):
    assert "has 2 groups there, counted from 0: none is 9" in refused(*replayed(base, "--group", 9))
    message = refused(*replayed(base, "--trajectory", 1))
    assert "has 1 trajectories there, counted from 0: none is 1. 1 more failed" in message


class Endpoint(HTTPServer):
    """Answers every request for a completion with its number, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.keys: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        message = {"role": "assistant", "content": f"again {len(self.server.asked)}", "tool_calls": [CALL]}
        body = json.dumps(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
             "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        ).encode()  # fmt: skip
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_answer_is_asked_for_again_after_the_messages_that_were_recorded_before_it(base, endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
    turns = json_of(*replayed(base, "--base-url", endpoint.url, "--max-tokens", 9))["conversations"][0]["turns"]
    assert [turn.get("asked_again") for turn in turns] == [
        None, 'again 1\ncalls add({"a": 1})', None, 'again 2\ncalls add({"a": 1})', None, 'again 3\ncalls add({"a": 1})'
    ]  # fmt: skip
    assert [asked["model"] for asked in endpoint.asked] == ["agent"] * 3
    assert [asked["temperature"] for asked in endpoint.asked] == [0.5, 1.0, 1.0]
    assert {asked["max_tokens"] for asked in endpoint.asked} == {9}
    assert [message["content"] for message in endpoint.asked[1]["messages"]] == ["yes or no?", "first", "go on"]
    assert set(endpoint.keys) == {"Bearer sk-of-the-test"}


def test_both_texts_stand_under_each_other(base, endpoint):
    printed = succeed(*replayed(base, "--base-url", endpoint.url, "--model", "other@4"))
    assert printed.index("first") < printed.index("again 1") < printed.index("second") < printed.index("again 2")
    assert endpoint.asked[0]["model"] == "other@4"


def test_an_endpoint_that_fails_or_is_not_there_is_a_failure_that_names_it(base, endpoint):
    endpoint.status = 500
    message = refused(*replayed(base, "--base-url", endpoint.url), status=1)
    assert f"{endpoint.url} did not answer for message 1" in message
    nobody = "http://127.0.0.1:9/v1"
    assert f"{nobody} did not answer" in refused(*replayed(base, "--base-url", nobody), status=1)
