"""A real engine. Each test runs with an adapter per version and with merged weights, unless it says otherwise."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from art_ray.errors import ServingError
from art_ray.serving.adapter import AdapterVersion
from art_ray.serving.pickup import Recording
from art_ray.trajectories import Sampling
from tests.serving.adapters import adapter_of, reference_logprobs, write_adapter
from tests.serving.conftest import KEY, QUESTION, Replica, until
from tests.small_models import make_tiny_model

only_adapter = pytest.mark.parametrize("replica", ["adapter"], indirect=True)
only_merged = pytest.mark.parametrize("replica", ["merged"], indirect=True)
EXACT = 1e-4


async def ask(client: openai.AsyncOpenAI, model: str = "policy", **options: Any) -> Any:
    options = {"max_tokens": 8, "extra_body": {"ignore_eos": True}, **options}
    return await client.chat.completions.create(model=model, messages=QUESTION, **options)  # type: ignore[arg-type]


def sampling_of(choice: Any) -> Sampling:
    sampling = Sampling.of(choice)
    assert sampling is not None, "the choice carries nothing that can be trained"
    return sampling


def error_from(replica: Replica, sampling: Sampling, contents: int) -> float:
    """The largest difference to transformers' log-probabilities under the adapter of `contents`."""
    expected = reference_logprobs(
        replica.model,
        replica.adapters / str(contents),
        sampling.prompt_token_ids,
        sampling.token_ids,
        sampling.temperature,
    )
    return max(abs(a - b) for a, b in zip(sampling.logprobs, expected, strict=True))


async def test_after_a_version_is_loaded_it_answers_and_no_other(replica: Replica, client: openai.AsyncOpenAI):
    for step in (0, 1, 2):
        loaded = await replica.load(step)
        assert loaded.step == step
        assert loaded.sha256 == replica.version(step).sha256
        answer = await ask(client, temperature=0.7)
        assert answer.model == f"policy@{step}"
        sampling = sampling_of(answer.choices[0])
        assert sampling.policy_versions == [step] * 8
        assert sampling.temperature == 0.7
        assert not sampling.restrictions
        assert error_from(replica, sampling, step) < EXACT
        if step:
            assert error_from(replica, sampling, step - 1) > 100 * EXACT
        assert [model.id for model in (await client.models.list()).data] == [f"policy@{step}"]


async def test_the_same_version_again_has_no_effect_and_another_under_its_step_is_refused(
    replica: Replica, client: openai.AsyncOpenAI
):
    await replica.load(1)
    assert (await replica.load(1)).step == 1
    with pytest.raises(ServingError, match="a version never changes"):
        await replica.load(1, contents=2)
    assert error_from(replica, sampling_of((await ask(client)).choices[0]), 1) < EXACT


async def test_a_version_that_is_not_held_is_a_404_that_names_those_held(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    for model in ("policy@0", "policy@7", str(replica.model), "(no version)", "gpt-4"):
        with pytest.raises(openai.NotFoundError, match="held: policy@1"):
            await ask(client, model)


async def test_a_cached_prompt_is_not_served_to_the_next_version(replica: Replica, client: openai.AsyncOpenAI):
    question = [{"role": "user", "content": "A prompt of several blocks. " * 30}]
    for step in (1, 2):
        await replica.load(step)
        for _ in range(2):  # the second time from the cache
            answer = await client.chat.completions.create(model="policy", messages=question, max_tokens=4)  # type: ignore[arg-type]
            assert error_from(replica, sampling_of(answer.choices[0]), step) < EXACT


async def test_an_altered_adapter_is_refused_and_the_current_version_goes_on(
    replica: Replica, client: openai.AsyncOpenAI
):
    await replica.load(1)
    version = replica.version(2)
    other = replica.version(3)
    with pytest.raises(ServingError, match="altered on its way"):
        await replica.publish(dataclasses.replace(version, files=other.files))
    assert (await ask(client)).model == "policy@1"


async def test_an_adapter_that_does_not_fit_is_refused_and_the_current_version_goes_on(
    replica: Replica, client: openai.AsyncOpenAI, tmp_path: Path
):
    await replica.load(1)
    other = make_tiny_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(ServingError, match="made for another base model"):
        await replica.publish(adapter_of(other, tmp_path, step=7))
    if replica.endpoint.weights == "adapter":
        with pytest.raises(ServingError, match=r"policy@8 cannot be loaded: .*rank"):
            await replica.publish(
                AdapterVersion.from_directory(8, write_adapter(replica.model, tmp_path / "8", seed=8, rank=64))
            )
    answer = await ask(client)
    assert answer.model == "policy@1"
    assert error_from(replica, sampling_of(answer.choices[0]), 1) < EXACT
    assert replica.status()["state"] == "ready"


async def test_a_streaming_client_gets_everything_that_training_needs(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    stream = await ask(client, stream=True, temperature=0.9)
    last, logprobs, texts = None, [], []
    async for chunk in stream:
        assert chunk.model == "policy@1"
        for choice in chunk.choices:
            logprobs += [entry.logprob for entry in (choice.logprobs.content if choice.logprobs else None) or []]
            texts.append(choice.delta.content or "")
            last = choice
    assert len(texts) > 3
    extra = last.model_extra
    sampling = Sampling(extra["prompt_token_ids"], extra["all_token_ids"], logprobs, [1] * 8, extra["temperature"])
    assert extra["policy_version"] == 1
    assert error_from(replica, sampling, 1) < EXACT


async def test_a_stream_read_by_openais_own_accumulator_is_a_trainable_choice(
    replica: Replica, client: openai.AsyncOpenAI
):
    await replica.load(1)
    state = ChatCompletionStreamState()
    async for chunk in await ask(client, stream=True):
        state.handle_chunk(chunk)
    sampling = sampling_of(state.current_completion_snapshot.choices[0])
    assert len(sampling.token_ids) == 8
    assert error_from(replica, sampling, 1) < EXACT


async def test_a_text_completion_says_who_sampled_it(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    answer = await client.completions.create(model="policy", prompt="Yes or no?", max_tokens=4)
    extra = answer.choices[0].model_extra or {}
    assert (answer.model, extra["policy_version"]) == ("policy@1", 1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    sampling = Sampling(extra["prompt_token_ids"], extra["token_ids"], logprobs.token_logprobs or [], [1] * 4, 1.0)  # type: ignore[arg-type]
    assert error_from(replica, sampling, 1) < EXACT


async def test_restricted_sampling_is_marked(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    answer = await ask(client, top_p=0.5, extra_body={"top_k": 3})
    assert sampling_of(answer.choices[0]).restrictions == {"top_p": 0.5, "top_k": 3}


@only_adapter
async def test_log_probabilities_of_the_prompt_would_kill_the_engine_and_are_refused(
    replica: Replica, client: openai.AsyncOpenAI
):
    await replica.load(1)
    running = asyncio.create_task(ask(client, max_tokens=64))
    await until(lambda: replica.status()["in_flight"] == 1)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        await ask(client, extra_body={"prompt_logprobs": 1})
    with pytest.raises(openai.BadRequestError, match="echo"):
        await client.completions.create(model="policy", prompt="Yes", echo=True)
    assert (await running).model == "policy@1"


async def test_a_bad_request_gets_the_engines_own_error_and_harms_nobody(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    good = asyncio.gather(*(ask(client, max_tokens=32) for _ in range(8)))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "long " * 2000}], max_tokens=4
        )
    with pytest.raises(openai.BadRequestError):
        await ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="policy", messages="no list")  # type: ignore[arg-type]
    assert [answer.model for answer in await good] == ["policy@1"] * 8


async def test_a_client_that_leaves_frees_the_engine(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    leaving = [asyncio.create_task(ask(client, max_tokens=400)) for _ in range(4)]
    await until(lambda: replica.status()["in_flight"] == 4)
    for task in leaving:
        task.cancel()
    await until(lambda: replica.status()["in_flight"] == 0)
    assert (await ask(client)).model == "policy@1"


@only_adapter
async def test_three_versions_at_once_under_load_never_mix(replica: Replica, client: openai.AsyncOpenAI):
    for step in (1, 2):
        await replica.load(step)
        await replica.load(step, holder="evaluation")
    await replica.load(3)
    models = ["policy@1", "policy@2", "policy"] * 8
    answers = await asyncio.gather(*(ask(client, model, n=2) for model in models))
    for model, answer in zip(models, answers, strict=True):
        step = {"policy@1": 1, "policy@2": 2, "policy": 3}[model]
        assert answer.model == f"policy@{step}"
        for choice in answer.choices:
            assert error_from(replica, sampling_of(choice), step) < EXACT
    await replica.fleet.release("evaluation")
    assert list(replica.status()["versions"]) == [3]


@only_adapter
async def test_a_version_stays_until_its_last_request_is_done(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(1)
    running = asyncio.create_task(ask(client, max_tokens=300))
    await until(lambda: replica.status()["in_flight"] == 1)
    await replica.load(2)
    assert list(replica.status()["versions"]) == [1, 2]
    answer = await running
    assert answer.model == "policy@1"
    assert error_from(replica, sampling_of(answer.choices[0]), 1) < EXACT
    await until(lambda: list(replica.status()["versions"]) == [2])


@only_adapter
async def test_a_version_is_loaded_beside_the_current_one_for_its_holder(replica: Replica, client: openai.AsyncOpenAI):
    await replica.load(3)
    await replica.load(2, holder="evaluation")
    assert (await ask(client)).model == "policy@3"
    assert (await ask(client, "policy@2")).model == "policy@2"
    await replica.fleet.release("evaluation")
    with pytest.raises(openai.NotFoundError):
        await ask(client, "policy@2")


@only_adapter
async def test_a_trajectory_stays_on_the_version_it_began_with(replica: Replica):
    await replica.load(1)
    async with replica.client(default_headers={"x-art-trajectory-id": "t1"}) as trajectory:
        assert (await ask(trajectory)).model == "policy@1"
        await replica.load(2)
        assert (await ask(trajectory)).model == "policy@1"
        await replica.fleet.release("t1")
        assert (await ask(trajectory)).model == "policy@2"
        await replica.fleet.release("t1")


@only_merged
async def test_merged_weights_wait_for_running_requests_and_new_requests_for_the_weights(
    replica: Replica, client: openai.AsyncOpenAI
):
    await replica.load(1)
    running = [asyncio.create_task(ask(client, max_tokens=200)) for _ in range(4)]
    await until(lambda: replica.status()["in_flight"] == 4)
    loading = asyncio.create_task(replica.load(2))
    answers = []
    while not loading.done():
        answers.append(await ask(client))
    await loading
    answers += [*await asyncio.gather(*running), await ask(client)]
    assert {answer.model for answer in answers} == {"policy@1", "policy@2"}
    for answer in answers:
        version = int(answer.model.removeprefix("policy@"))
        assert error_from(replica, sampling_of(answer.choices[0]), version) < EXACT


@only_merged
async def test_merged_weights_keep_no_second_version(replica: Replica):
    await replica.load(1)
    for step in (1, 2):
        with pytest.raises(ServingError, match="one version at a time"):
            await replica.load(step, holder="evaluation")


async def test_nothing_of_a_version_stays_in_shared_memory_once_it_is_unloaded(replica: Replica):
    for step in (1, 2):
        await replica.load(step)
    (directory,) = Path("/dev/shm").glob(f"art_ray-{os.getpid()}-*")  # noqa: ASYNC240 - memory, not a disk
    kept = ["version-2"] if replica.endpoint.weights == "adapter" else []
    assert sorted(path.name for path in directory.glob("version-*")) == kept


def test_everything_listens_on_loopback_only(replica: Replica):
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    front = f":{httpx.URL(replica.base_url).port}"  # by its port: this process may listen for others, too
    ours = [
        line.split()[3]
        for line in listening
        if line.split()[3].endswith(front) or any(f"pid={pid}," in line for pid in replica.endpoint.engine_pids)
    ]
    assert any(address.endswith(front) for address in ours)
    assert all(address.startswith("127.0.0.1:") for address in ours)


async def test_a_place_for_a_version_is_awaited_until_the_deadline(replica: Replica):
    if replica.endpoint.weights == "merged":
        pytest.skip("merged weights have one place")
    await replica.load(3)
    for step in (1, 2):
        await replica.load(step, holder="evaluation")
    loading = asyncio.create_task(replica.load(4))
    done, _ = await asyncio.wait([loading], timeout=0.5)
    assert not done
    await replica.fleet.release("evaluation")
    assert (await loading).step == 4


CURL = """
curl -sSN "$BASE_URL/chat/completions" -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
  -d '{{"model": "policy", "max_tokens": 6, "stream": {streamed}, "messages": [{{"role": "user", "content": "Yes?"}}]}}'
"""


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_curl_command_with_a_trajectory_in_its_url_leaves_a_trainable_conversation(
    replica: Replica, client: openai.AsyncOpenAI, streamed: bool
):
    await replica.load(1)
    recording = Recording(replica.base_url, KEY)
    command = CURL.format(streamed=str(streamed).lower())
    environment = {**os.environ, "BASE_URL": recording.base_url, "KEY": recording.api_key}
    curl = await asyncio.create_subprocess_shell(command, env=environment, stdout=asyncio.subprocess.PIPE)
    await curl.communicate()
    assert curl.returncode == 0
    trajectory = await recording.trajectory()
    items = trajectory.messages_and_choices
    assert items[0] == {"role": "user", "content": "Yes?"}
    assert error_from(replica, sampling_of(items[-1]), 1) < EXACT
    assert await recording.trajectory() is trajectory
    with pytest.raises(openai.NotFoundError):  # it was forgotten once it was picked up
        await client.get(f"/trajectories/{recording.id}", cast_to=object)
    assert KEY not in repr(recording)
