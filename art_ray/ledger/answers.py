"""Conversations as columns: what people query lies in typed columns, the rest of each message in a compact residue.

A residue is what the columns do not say about a message. Its `c` says where the content is: "s" the content column
holds the text, "j" the content column holds it as JSON, "x" it is in the residue itself, "-" the message has none. A
choice has `f`, its fields; with `t` its sampled tokens lie in the typed columns: 1, they alone say them; 0, they are
there for queries, and the choice's own fields, which differ, are in `f`; with `p` it is one that OpenAI's client put
together from a stream. No residue: the message is a dict with `role`, `content`, and `tool_calls` and `tool_call_id`
where their columns are not null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import pydantic
from openai.types.chat import ParsedChoice

from art_ray.ledger.codec import decoded, encoded, is_encodable_text, json_text, readable, shown
from art_ray.trajectories import Choice, Message, MessagesAndChoices, Sampling

__all__ = [
    "NO_TOKENS",
    "Columns",
    "TokenReader",
    "Tokens",
    "conversation_columns",
    "decode_message",
    "encode_message",
    "plain_conversation",
]

MessageColumns = tuple[str | None, str | None, str | None, str | None, bool]
"""role, content, tool_calls, tool_call_id, trainable: the fields of the `messages` column."""
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


@dataclass
class Tokens:
    """The sampled tokens of one trajectory, answer after answer: first its own, then those of further histories."""

    prompt_token_ids: list[np.ndarray] = field(default_factory=list)
    """Per answer, [P] int32."""
    token_ids: list[np.ndarray] = field(default_factory=list)
    """Per answer, [T] int32."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """Per answer, [T] float32."""
    versions: list[int] = field(default_factory=list)
    """Per answer, the lowest version that sampled a token of it."""
    finish_reason: str | None = None
    """Of the last answer."""
    num_answers: int = 0
    num_unknown: int = 0
    """Answers of which the tokens are not known exactly, so that they are in none of the lists."""

    @property
    def can_be_trained(self) -> bool:
        """Whether all answers are known, and one of their tokens follows another: what a trainer asks for, too."""
        lengths = [(len(prompt), len(ids)) for prompt, ids in zip(self.prompt_token_ids, self.token_ids, strict=True)]
        return not self.num_unknown and any(sampled and before + sampled > 1 for before, sampled in lengths)


NO_TOKENS = Tokens()
"""Of a trajectory without any answer; shared, and never added to."""


def encode_message(item: Choice | Message, tokens: Tokens, where: str) -> tuple[MessageColumns, Any]:
    """Returns the columns of a message and its residue (None: the columns say it all); adds its tokens to `tokens`.

    Raises:
        TypeError: something in it could not be read back.
    """
    if isinstance(item, Choice):
        return _encode_choice(item, tokens, where)
    if len(item) == 2:  # by far the most common shape, and this is called for every message
        role, content = item.get("role"), item.get("content")
        if type(role) is str and type(content) is str and is_encodable_text(content) and is_encodable_text(role):
            return (role, content, None, None, False), None
    return _encode_dict(item, where)


def _encode_dict(item: Message, where: str) -> tuple[MessageColumns, Any]:
    message = encoded(item, where)
    if not (isinstance(message, dict) and "$t" not in message):
        return (None, None, None, None, False), {"c": "x", "m": message}
    content, place = _content(message)
    calls = message.get("tool_calls")
    role, call_id = _text(message.get("role")), _text(message.get("tool_call_id"))
    columns = (role, content, json_text(readable(calls)) if calls else None, call_id, False)
    in_columns = {name for name, value in (("role", role), ("tool_call_id", call_id)) if value is not None}
    if calls and readable(calls) == calls:
        in_columns.add("tool_calls")
    rest = {key: value for key, value in message.items() if key not in in_columns}
    if place != "x":
        rest.pop("content", None)
    if not rest and place == "s" and "role" in message:
        return columns, None
    return columns, {"c": place, "m": rest}


def _content(message: dict[str, Any]) -> tuple[str | None, str]:
    """Returns the content column, and where the exact content is to be found."""
    if "content" not in message:
        return None, "-"
    content = message["content"]
    if content is None:
        return None, "s"
    if isinstance(content, str):
        return (content, "s") if is_encodable_text(content) else (_replaced(content), "x")
    column = readable(content)
    return json_text(column), "j" if column == content else "x"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and is_encodable_text(value) else None


def _replaced(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _encode_choice(choice: Choice, tokens: Tokens, where: str) -> tuple[MessageColumns, Any]:
    fields: dict[str, Any] = choice.model_dump(exclude_unset=True, exclude={"logprobs": {"content"}}, warnings=False)
    residue: dict[str, Any] = {"p": 1} if isinstance(choice, ParsedChoice) else {}
    _take_tokens(choice, tokens, residue)
    if residue.get("t"):
        fields.pop("token_ids"), fields.pop("prompt_token_ids")
    if choice.logprobs is not None and "lp" not in residue and "content" in choice.logprobs.model_fields_set:
        scored = choice.logprobs.content
        fields["logprobs"]["content"] = (
            None if scored is None else [token.model_dump(exclude_unset=True, warnings=False) for token in scored]
        )
    tokens.num_answers += 1
    reason = fields.get("finish_reason")
    tokens.finish_reason = reason if isinstance(reason, str) else None
    coded = encoded(fields, where)
    message = coded.get("message")
    message = message if isinstance(message, dict) else {}
    content, place = _content(message)
    if place in "sj" and content is not None:
        message.pop("content")
    else:
        place = "x"
    calls = message.get("tool_calls")
    columns = (_text(message.get("role")), content, json_text(readable(calls)) if calls else None, None, True)
    return columns, {"c": place, "f": coded, **residue}


def _take_tokens(choice: Choice, tokens: Tokens, residue: dict[str, Any]) -> None:
    """Moves ids and log-probabilities into `tokens`; what is left of them into `residue`."""
    sampling = Sampling.of(choice)
    if sampling is None:
        tokens.num_unknown += 1
        return
    extra = choice.model_extra or {}
    exact = np.asarray(sampling.logprobs, dtype=np.float64)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    tokens.prompt_token_ids.append(np.asarray(sampling.prompt_token_ids, np.int32))
    tokens.token_ids.append(np.asarray(sampling.token_ids, np.int32))
    tokens.logprobs.append(rounded)
    tokens.versions.append(min(sampling.policy_versions, default=int(extra["policy_version"])))
    # An answer that a client put together from a stream may name its ids beside the log-probabilities alone.
    residue["t"] = int(
        _is_same(extra.get("token_ids"), sampling.token_ids)
        and _is_same(extra.get("prompt_token_ids"), sampling.prompt_token_ids)
    )
    content = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    texts = [getattr(token, "token", None) for token in content]
    if (
        all(type(text) is str and is_encodable_text(text) for text in texts)
        and (shape := _token_bytes(content)) is not None
    ):
        residue["lp"] = texts
        if shape:
            residue["b"] = shape
        if not np.array_equal(rounded.astype(np.float64), exact, equal_nan=True):
            residue["x"] = encoded(sampling.logprobs, "a log-probability")


def _token_bytes(content: list[Any]) -> int | None:
    """Returns 1 if every token has the bytes of its text, 0 if none has any; None where a token says more than that."""
    kinds = set()
    for token in content:
        if token.model_extra or not token.model_fields_set >= {"top_logprobs", "bytes"} or token.top_logprobs != []:
            return None
        if token.bytes is None:
            kinds.add(0)
        elif is_encodable_text(token.token) and token.bytes == list(token.token.encode()):
            kinds.add(1)
        else:
            return None
    return kinds.pop() if len(kinds) == 1 else None if kinds else 0


def _is_same(field: Any, values: list[int]) -> bool:
    return type(field) is list and field == values


@dataclass
class Columns:
    """The fields of one message, as they are in the `messages` column."""

    role: str | None
    content: str | None
    tool_calls: str | None
    tool_call_id: str | None
    trainable: bool


class TokenReader:
    """Gives back the tokens of one trajectory, answer after answer."""

    def __init__(
        self, prompts: list[list[int]], lengths: list[int], token_ids: list[int], logprobs: list[float]
    ) -> None:
        self._prompts, self._lengths, self._token_ids, self._logprobs = prompts, lengths, token_ids, logprobs
        self._answer = 0
        self._token = 0

    def next(self) -> tuple[list[int], list[int], list[float]]:
        """Returns prompt ids, sampled ids and log-probabilities of the next answer."""
        start, end = self._token, self._token + self._lengths[self._answer]
        prompt = self._prompts[self._answer]
        self._answer, self._token = self._answer + 1, end
        return list(prompt), list(self._token_ids[start:end]), list(self._logprobs[start:end])


def decode_message(columns: Columns, residue: Any, tokens: TokenReader) -> Choice | Message:
    """Returns the message that `encode_message` was given."""
    if residue is None:
        message: Message = {"role": columns.role, "content": columns.content}
        if columns.tool_calls:
            message["tool_calls"] = json.loads(columns.tool_calls)
        if columns.tool_call_id is not None:
            message["tool_call_id"] = columns.tool_call_id
        return message
    if "f" in residue:
        return _decode_choice(columns, residue, tokens)
    rest = residue["m"]
    if not isinstance(rest, dict) or "$t" in rest:
        return decoded(rest)
    message = {}
    for name, value in (("role", columns.role), ("tool_call_id", columns.tool_call_id)):
        if value is not None and name not in rest:
            message[name] = value
    if columns.tool_calls and "tool_calls" not in rest:
        message["tool_calls"] = json.loads(columns.tool_calls)
    if residue["c"] in "sj":
        message["content"] = _column_content(columns, residue["c"])
    return {**message, **decoded(rest)}


def _column_content(columns: Columns, place: str) -> Any:
    return json.loads(columns.content) if place == "j" and columns.content is not None else columns.content


def _decode_choice(columns: Columns, residue: dict[str, Any], tokens: TokenReader) -> Choice:
    fields = decoded(residue["f"])
    if residue["c"] in "sj":
        fields["message"]["content"] = _column_content(columns, residue["c"])
    if "t" in residue:
        prompt, ids, logprobs = tokens.next()
        if residue["t"]:
            fields["prompt_token_ids"], fields["token_ids"] = prompt, ids
        if "lp" in residue:
            exact = decoded(residue["x"]) if "x" in residue else logprobs
            has_bytes = residue.get("b", 0)
            fields["logprobs"]["content"] = [
                {
                    "token": text,
                    "bytes": list(text.encode()) if has_bytes else None,
                    "logprob": logprob,
                    "top_logprobs": [],
                }
                for text, logprob in zip(residue["lp"], exact, strict=True)
            ]
    kind = ParsedChoice if "p" in residue else Choice
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError:
        # Servers send values beyond OpenAI's types ("finish_reason": "abort"); its client takes them unchecked, too.
        return kind.construct(**fields)


def conversation_columns(
    items: MessagesAndChoices, tokens: Tokens, where: str
) -> tuple[list[MessageColumns], dict[str, Any]]:
    """Returns the columns of each message of a conversation, and the residues by position."""
    columns, residues = [], {}
    for position, item in enumerate(items):
        if not isinstance(item, (Choice, dict)):
            raise TypeError(f"{where}: message {position} must be a dict or a Choice, got {shown(item)}")
        fields, residue = encode_message(item, tokens, where)
        columns.append(fields)
        if residue is not None:
            residues[str(position)] = residue
    return columns, residues


def plain_conversation(items: MessagesAndChoices) -> tuple[list[str], list[str], int] | None:
    """Returns roles, contents and their total length, where every message is a dict of just these two; otherwise None.

    What `conversation_columns` would find, message by message, for most conversations without sampled answers: this is
    many times faster, and such messages come by the ten thousand.
    """
    try:
        num_keys = sum(map(len, items))  # type: ignore[arg-type]
        roles = list(map(_ROLE, items))  # type: ignore[arg-type]
        contents = list(map(_CONTENT, items))  # type: ignore[arg-type]
        text = "".join(contents)
        is_plain = num_keys == 2 * len(items) and _ROLES.issuperset(roles)
    except (KeyError, TypeError):  # a Choice, other keys, or something that is no text
        return None
    return (roles, contents, len(text)) if is_plain and is_encodable_text(text) else None
