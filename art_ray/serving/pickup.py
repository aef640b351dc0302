"""What whoever runs an agent of another framework holds: a URL at which the agent is recorded, and its trajectory."""

from __future__ import annotations

import uuid
from typing import Any, Self

import openai

from art_ray.errors import ServingError
from art_ray.serving.recording import Exchange, conversations
from art_ray.trajectories import History, Trajectory

__all__ = ["Recording"]


class Recording:
    """One rollout of an agent that speaks OpenAI's protocol, in any process or language, and keeps nothing itself.

    The agent is given `base_url` and `api_key`; what it is answered there is kept, with the exact tokens, and all of it
    comes from the policy version that answered first, where several are served. As a context manager it ends with its
    block.

    Args:
        base_url: of the served policy, ending in `/v1`.
        api_key: for it.

    Example:
        >>> recording = Recording("http://127.0.0.1:8000/v1", "key", id="first")
        >>> recording.base_url
        'http://127.0.0.1:8000/trajectories/first/v1'
    """

    def __init__(self, base_url: str, api_key: str, *, id: str | None = None) -> None:
        self.id = uuid.uuid4().hex if id is None else id
        self.api_key = api_key
        self._policy_url = base_url
        self._trajectory: Trajectory | None = None

    def __repr__(self) -> str:
        return f"Recording({self.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def base_url(self) -> str:
        """What the agent takes for the base URL of OpenAI's API."""
        return f"{self._policy_url.removesuffix('/v1')}/trajectories/{self.id}/v1"

    async def trajectory(self) -> Trajectory:
        """Returns what the agent said so far, and ends the recording. Again: the same trajectory.

        The conversation that began first is the trajectory's own; others, of a sub-agent or after a summary, are its
        `additional_histories`. Whoever calls gives it its reward.

        Raises:
            ServingError: nothing was recorded.
        """
        if self._trajectory is None:
            exchanges = (await self._asked("get"))["exchanges"]
            found = conversations([Exchange(**exchange) for exchange in exchanges])
            if not found:
                raise ServingError(f"nothing was recorded at {self.base_url}")
            (items, tools), *others = found
            histories = [History(messages_and_choices=items, tools=tools) for items, tools in others]
            self._trajectory = Trajectory(items, tools=tools, additional_histories=histories)
            await self.end()
        return self._trajectory

    async def end(self) -> None:
        """Forgets what was recorded, and lets the version go that was kept for it."""
        await self._asked("delete")

    async def _asked(self, method: str) -> Any:
        async with openai.AsyncOpenAI(base_url=self._policy_url, api_key=self.api_key) as client:
            try:
                return await getattr(client, method)(f"/trajectories/{self.id}", cast_to=object)
            except openai.OpenAIError as error:
                raise ServingError(f"{method} of the recording at {self.base_url} failed: {error}") from error
