"""The OpenAI client that asks the served policy for what training needs."""

from __future__ import annotations

from typing import Any

import openai
from openai._models import FinalRequestOptions

__all__ = ["PolicyClient"]


class PolicyClient(openai.AsyncOpenAI):
    """An `AsyncOpenAI` whose chat completions always carry token ids and log-probabilities.

    `response.choices[0]`, appended to a trajectory as it is, holds the exact tokens, how likely each was, the sampling
    temperature and the version that sampled them; `art_ray.trajectories.Sampling.of(choice)` reads them.
    """

    async def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        options = await super()._prepare_options(options)
        if options.url.rstrip("/").endswith("/chat/completions") and isinstance(options.json_data, dict):
            wanted: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
            options.json_data = {**options.json_data, **wanted}
        return options
