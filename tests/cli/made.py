"""Runs for the tests of this folder, as real ledgers and the real checkpoint code make them; and how to call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from art_ray.cli.app import app
from art_ray.training import checkpoint
from art_ray.trajectories import History, Trajectory, TrajectoryGroup
from tests.ledger.made import answer, conversation, group_of, ledger_at

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\rd\x9b31me\u202ef\u2028g\x00h\x7f"
"""What a terminal would obey: a new title, an empty screen, …"""
OBEYED = set("\x1b\x07\r\x9b\u202e\u2028\x00\x7f")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def call(*arguments: object) -> Any:
    """The result of `art-ray` with `arguments`: `exit_code`, `stdout`, `stderr`."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*arguments: object) -> Any:
    """What `--json` prints, read as strictly as JSON is meant."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(succeed(*arguments, "--json"), parse_constant=refuse)


def refused(*arguments: object, status: int = 2) -> str:
    """The message of a call that must fail with `status`, and print nothing on the standard output."""
    result = call(*arguments)
    assert result.exit_code == status, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    return result.stderr


def made_run(base: Path, name: str = "agent", rewards: tuple[float, ...] = (0.25, 0.5, 1.0), **values: Any) -> Path:
    """A run of `demo/{name}` with one step of train and val per reward; returns its folder."""
    ledger = ledger_at(base, name=name, **values)
    for step, reward in enumerate(rewards):
        ledger.log([group_of(0.0, 2 * reward), group_of(reward, reward)], split="train", step=step)
        ledger.log(None, split="val", step=step, metrics={"reward": reward})
    ledger.close()
    return ledger.folder


def commit(folder: Path, step: int, content: bytes = b"weights") -> None:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(content)
        (directory / "adapter_config.json").write_text('{"r": 4}')
        (directory / "optimizer.safetensors").write_bytes(b"moments" * 100)

    checkpoint.commit(folder / "checkpoints", step, write, base_model="some/base", metrics={}, config={})


def odd_group(text: str = "plain") -> TrajectoryGroup:
    """A group of all that a conversation may hold, with `text` wherever there is one."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    call_of_text = {**CALL, "function": {"name": text, "arguments": text}}
    trajectory = Trajectory(
        [
            {"role": "system", "content": text},
            {"role": "user", "name": text, "content": [{"type": "text", "text": text}, image]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"https://example.org/{text}"}}]},
            answer(None, message={"tool_calls": [call_of_text], "reasoning": text}),
            {"role": "tool", "tool_call_id": text, "content": text},
            answer(text, num_tokens=4, version=None),
            {"role": text, "content": {"odd": [text, None, 1.5]}},
            {"role": "assistant", "content": None, "refusal": text},
        ],
        tools=[{"type": "function", "function": {"name": text}}],
        additional_histories=[History(messages_and_choices=conversation(answer(text, num_tokens=2)))],
        reward=float("nan"),
        metrics={text: 1.5},
        metadata={text: text},
        logs=[text],
    )
    return TrajectoryGroup(
        [trajectory], exceptions=[ValueError(text)], metadata={"scenario": text}, metrics={text: 2.0}, logs=[text]
    )
