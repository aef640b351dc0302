"""`art-ray replay`: one trajectory turn by turn, exactly as it was sampled; or asked again.

What a replay can honestly say: the ids, log-probabilities and versions are those that the engine returned and the
trainer learnt from, not a text tokenized anew. What it cannot: bring the same text about again. Sampling is random,
and an engine's batches round differently; the environment and its tools are the user's, and are not run. So with
--base-url each answer is asked for again on its own, after the messages that were before it when it was recorded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_ray.cli import output
from art_ray.cli.options import BasePath, Json, RunName, Split, Step

if TYPE_CHECKING:
    from art_ray.cli.run import Run
    from art_ray.trajectories import History, Sampling, Trajectory


def replay(
    run: RunName,
    step: Step = None,
    split: Split = "train",
    group: Annotated[int, typer.Option("--group", min=0, help="The group, counted from 0.")] = 0,
    trajectory: Annotated[int, typer.Option("--trajectory", min=0, help="The trajectory within it, from 0.")] = 0,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="An OpenAI endpoint that is asked for each answer again."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The name to ask it for. By default the run's own.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of an answer that is asked for again.")] = 512,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for each of them.")] = 120.0,
    base_path: BasePath = Path(".art"),
    as_json: Json = False,
) -> None:
    """Replay a trajectory turn by turn, token by token.

    What is shown was recorded, and is what training learns from: each sampled token with id, log-probability and
    version. With --base-url each answer is also asked for again, after the
    messages that were before it: another sample, at the recorded temperature. Tools are not run again. The endpoint's
    key is read from the environment variable OPENAI_API_KEY.

    Example: art-ray replay readme/first --step 2 --group 0 --trajectory 3
    """
    from art_ray.cli.conversation import conversations_of
    from art_ray.cli.run import find_run

    found = find_run(run, base_path)
    step, files = found.files(split, step)
    picked = _picked(found, files, group, trajectory)
    endpoint = None if base_url is None else _Endpoint(base_url, model or found.folder.name, max_tokens, timeout_s)
    conversations = conversations_of(picked)
    again = [[] if endpoint is None else _asked_again(history, endpoint) for _, history in conversations]
    if as_json:
        about = {**found.about, "split": split, "step": step, "group": group, "trajectory": trajectory}
        listed = [
            _conversation_as_json(history, texts) for (_, history), texts in zip(conversations, again, strict=True)
        ]
        output.print_json({**about, "reward": picked.reward, "conversations": listed})
        return
    reward = output.number(picked.reward) if picked.is_scored else "not scored"
    output.say(f"{found.label}, {split} step {step}, trajectory {group}.{trajectory}: reward {reward}", "bold")
    for (title, history), texts in zip(conversations, again, strict=True):
        if title:
            output.say(title, "cyan")
        _print_conversation(history, texts)


@dataclass(frozen=True)
class _Endpoint:
    base_url: str
    model: str
    max_tokens: int
    timeout_s: float


def _picked(run: Run, files: Sequence[Path], group: int, trajectory: int) -> Trajectory:
    from art_ray.cli.run import groups_in
    from art_ray.errors import ConfigError

    num_groups = 0
    for item in groups_in(files):
        if num_groups == group:
            if trajectory < len(item):
                return item.trajectories[trajectory]
            raise ConfigError(
                f"group {group} of {run.label} has {len(item)} trajectories there, counted from 0: none is "
                f"{trajectory}. {len(item.exceptions)} more failed, and left none"
            )
        num_groups += 1
    raise ConfigError(f"{run.label} has {num_groups} groups there, counted from 0: none is {group}")


def _asked_again(history: History, endpoint: _Endpoint) -> list[str]:
    """Returns one new text for each answer of a conversation, in order.

    Raises:
        ServingError: the endpoint did not answer.
    """
    import openai

    from art_ray.errors import ServingError
    from art_ray.trajectories import Choice, Sampling, messages_of

    key = os.environ.get("OPENAI_API_KEY") or "none"
    texts = []
    with openai.OpenAI(base_url=endpoint.base_url, api_key=key, timeout=endpoint.timeout_s, max_retries=0) as client:
        for position, item in enumerate(history.messages_and_choices):
            if not isinstance(item, Choice):
                continue
            sampling = Sampling.of(item)
            options: dict[str, Any] = {"tools": history.tools} if history.tools else {}
            try:
                answer = client.chat.completions.create(
                    model=endpoint.model,
                    messages=messages_of(history.messages_and_choices[:position]),
                    temperature=1.0 if sampling is None else sampling.temperature,
                    max_tokens=endpoint.max_tokens,
                    **options,
                )
            except openai.OpenAIError as error:
                raise ServingError(f"{endpoint.base_url} did not answer for message {position}: {error}") from None
            texts.append(_text_of(answer))
    return texts


def _text_of(completion: Any) -> str:
    from art_ray.cli.conversation import turns_of

    [turn] = turns_of(completion.choices[:1])
    return turn.text + "".join(f"\ncalls {call.name}({call.arguments})" for call in turn.calls)


def _conversation_as_json(history: History, again: list[str]) -> dict[str, Any]:
    from art_ray.cli.conversation import as_json, turn_as_json
    from art_ray.trajectories import Choice

    texts = iter(again)
    turns = []
    for item in history.messages_and_choices:
        turn = turn_as_json(item, with_tokens=True)
        if isinstance(item, Choice):
            turn["asked_again"] = next(texts, None)
        turns.append(turn)
    return {"tools": as_json(history.tools), "turns": turns}


def _print_conversation(history: History, again: list[str]) -> None:
    from art_ray.cli.conversation import turns_of
    from art_ray.cli.show import print_turn

    texts = iter(again)
    before: list[int] = []
    for turn in turns_of(history.messages_and_choices):
        print_turn(turn, full=True)
        if turn.sampling is not None:
            output.say(_facts(turn.sampling, before), "dim", indent=6)
            _print_tokens(turn.sampling, turn.token_texts)
            before = turn.sampling.prompt_token_ids + turn.sampling.token_ids
        if turn.is_answer and (text := next(texts, None)) is not None:
            output.say("asked again:", "yellow", indent=4)
            output.say(text, indent=6)


def _facts(sampling: Sampling, before: list[int]) -> str:
    """Returns how an answer was sampled, and whether its prompt goes on from `before`: then both are one sequence."""
    prompt = sampling.prompt_token_ids
    if not before:
        way = ""
    elif prompt[: len(before)] == before:
        way = f", {len(prompt) - len(before)} of them new"
    else:
        way = ", which do not go on from the answer before: a sequence of its own"
    restrictions = f", {sampling.restrictions}" if sampling.restrictions else ""
    return (
        f"after a prompt of {len(prompt)} tokens{way}; temperature {sampling.temperature:g}{restrictions}; "
        f"log p {sum(sampling.logprobs):.3f} in all"
    )


def _print_tokens(sampling: Sampling, texts: list[str]) -> None:
    columns = zip(texts, sampling.token_ids, sampling.logprobs, sampling.policy_versions, strict=True)
    rows = [(repr(text), token_id, f"{logprob:.4f}", version) for text, token_id, logprob, version in columns]
    output.table(("token", "id", "log p", "version"), rows)
