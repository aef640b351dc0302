"""What the front adds to a request, so that its answer can be trained, and to the answer, so that it says who gave it.

Pure functions on parsed JSON.
"""

from __future__ import annotations

from typing import Any

__all__ = ["StreamLabels", "label_answer", "prepare_request", "restrictions_of"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
    "structured_outputs": (None,),
    "structural_tag": (None,),
    "thinking_token_budget": (None,),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
}
"""Options that change the sampling distribution, each with the values that leave it as softmax(logits/temperature)."""


def restrictions_of(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a request under which its tokens are no samples of softmax(logits / temperature)."""
    found = {name: request[name] for name, neutral in _NEUTRAL.items() if request.get(name) not in neutral}
    if request.get("temperature") == 0:
        found["temperature"] = 0
    response_format = request.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        found["response_format"] = response_format
    if request.get("tools") and request.get("tool_choice") not in (None, "none", "auto"):
        found["tool_choice"] = request["tool_choice"]  # a forced call is generated under a grammar
    return found


def prepare_request(request: dict[str, Any], engine_model: str, is_chat: bool) -> dict[str, Any]:
    """Returns the request as the engine gets it: its own model name, and token ids with log-probabilities asked for."""
    prepared = {**request, "model": engine_model, "return_token_ids": True}
    if not is_chat:
        if request.get("logprobs") is None:
            prepared["logprobs"] = 0  # of the sampled token alone
    elif not request.get("logprobs"):
        prepared["logprobs"] = True
    # Otherwise a reasoning parser would drop ids and log-probabilities together with the reasoning.
    if is_chat and request.get("include_reasoning") is False:
        prepared.pop("include_reasoning")
    return prepared


def label_answer(answer: dict[str, Any], request: dict[str, Any], version: int, served_name: str) -> dict[str, Any]:
    """Returns an answer whose choices say what `Sampling.of` reads: prompt, version, temperature, restrictions."""
    labels = _labels(request, version)
    prompt_token_ids = answer.get("prompt_token_ids")
    choices = []
    for choice in answer.get("choices") or []:
        choice = {**choice, **labels}
        if prompt_token_ids is not None:
            choice["prompt_token_ids"] = prompt_token_ids
        _name_tokens(choice, choice.get("token_ids"))
        choices.append(choice)
    return {**answer, "model": served_name, "choices": choices}


class StreamLabels:
    """Labels a streamed answer chunk by chunk.

    The first chunk of each choice carries the prompt's ids and the labels, which is where accumulating clients look;
    each token's id stands beside its log-probability, which such clients collect; and the last chunk of each choice
    carries `all_token_ids` for clients that look at the end only.
    """

    def __init__(self, request: dict[str, Any], version: int, served_name: str) -> None:
        self._labels = _labels(request, version)
        self._served_name = served_name
        self._prompt_token_ids: list[int] | None = None
        self._token_ids: dict[int, list[int]] = {}

    def label(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Returns `chunk` with its labels."""
        if chunk.get("prompt_token_ids") is not None:
            self._prompt_token_ids = chunk["prompt_token_ids"]
        choices = []
        for choice in chunk.get("choices") or []:
            choice, index = dict(choice), choice.get("index", 0)
            first = index not in self._token_ids
            seen = self._token_ids.setdefault(index, [])
            token_ids = choice.get("token_ids") or []
            _name_tokens(choice, token_ids)
            seen.extend(token_ids)
            if choice.get("prompt_token_ids") is not None:
                self._prompt_token_ids = choice["prompt_token_ids"]
            if first or choice.get("finish_reason"):
                choice.update(self._labels)
                if self._prompt_token_ids is not None:
                    choice["prompt_token_ids"] = self._prompt_token_ids
            if choice.get("finish_reason"):
                choice["all_token_ids"] = seen
            choices.append(choice)
        return {**chunk, "model": self._served_name, "choices": choices}


def _labels(request: dict[str, Any], version: int) -> dict[str, Any]:
    temperature = request.get("temperature")
    return {
        "policy_version": version,
        "temperature": 1.0 if temperature is None else float(temperature),
        "sampling_restrictions": restrictions_of(request),
    }


def _name_tokens(choice: dict[str, Any], token_ids: list[int] | None) -> None:
    """Writes each sampled id beside its log-probability, where both lists are there and agree."""
    content = (choice.get("logprobs") or {}).get("content")
    if content and token_ids and len(content) == len(token_ids):
        named = [{**entry, "token_id": token_id} for entry, token_id in zip(content, token_ids, strict=True)]
        choice["logprobs"] = {**choice["logprobs"], "content": named}
