"""vLLM itself: its engine, and its own OpenAI application behind our front. The only module that imports vLLM.

Everything here runs in the serving thread's event loop. vLLM is imported on the first call, after `environment` was
applied: it reads its environment variables on import.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from art_ray.errors import ConfigError, EngineError, ServingError
from art_ray.serving.adapter import AdapterVersion
from art_ray.serving.asgi import Application
from art_ray.serving.merge import MergingWorker
from art_ray.serving.spec import EngineSpec
from art_ray.types import nearest

__all__ = ["VLLMServer", "environment", "event_loop"]

_GIB = 2**30
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NO_VERSION = "(no version)"
"""Name of weights that are no version: the front asks for none of that name."""
_CANARY_TOKENS = 32
_CPU_BLOCK_SIZE = 32
_RESET_TRIES = 250


def environment(spec: EngineSpec) -> dict[str, str | None]:
    """Returns the environment variables that vLLM and its processes need; None means unset."""
    return {
        # One node: the engine's processes talk over loopback or through files, whatever interfaces there are.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        # A forked engine would inherit this process's sockets and threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_SERVER_DEV_MODE": None,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": None,
        "VLLM_LORA_RESOLVER_CACHE_DIR": None,
        "VLLM_API_KEY": None,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(spec.serving.start_timeout_s) + 1),
        # By default vLLM keeps a core for its front, which is half of a machine of two.
        "VLLM_CPU_OMP_THREADS_BIND": spec.serving.cpu_cores or _all_cores(spec.serving.tensor_parallel),
        # Process titles are written over the environment otherwise, by which a run's processes are found.
        "SPT_NOENV": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _all_cores(workers: int) -> str:
    """Returns this process's cores, one list per worker, in vLLM's notation; of threads that share a core, one."""
    cores = [core for core in sorted(os.sched_getaffinity(0)) if core == _first_thread_of(core)]
    share = max(1, len(cores) // workers)
    lists = [cores[i * share : (i + 1) * share] or cores[-1:] for i in range(workers)]
    return "|".join(",".join(map(str, part)) for part in lists)


def _first_thread_of(core: int) -> int:
    """Returns the first hardware thread that shares a physical core with `core` and that this process may use."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return core
    bounds = [tuple(map(int, part.split("-"))) for part in text.strip().split(",")]
    siblings = {thread for bound in bounds for thread in range(bound[0], bound[-1] + 1)}
    return min(siblings & os.sched_getaffinity(0), default=core)


class VLLMServer:
    """One vLLM engine. It knows adapters by name; which of them may be asked for is decided elsewhere.

    Args:
        spec: what to serve.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: Any = None
        self._models: Any = None
        self._requests: dict[int, Any] = {}
        """LoRA requests by step."""
        self._ids = itertools.count(1)
        self._canaries = itertools.count()
        self.weights: str = ""
        """How versions are served: "adapter" or "merged"; known after `start_engine`."""
        self.device: str = ""

    def start_engine(self) -> None:
        """Starts the engine's processes; blocks until they are ready.

        Raises:
            ConfigError: an engine argument that vLLM does not have or does not accept.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self.device = current_platform.device_type
        self.weights = self._spec.serving.weights_on(self.device)
        self._args = _parsed_arguments(self._arguments())
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(self._args))

    async def application(self) -> Application:
        """Returns vLLM's OpenAI application on the started engine."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await self._engine.get_supported_tasks()
        if "generate" not in tasks:
            raise ConfigError(f"{self._spec.base_model} generates no text; it supports {sorted(tasks)}")
        app = build_app(self._args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, self._args, tasks)
        # vLLM ends its server when the engine dies; ours stays, to say why.
        app.state.server = SimpleNamespace(should_exit=False)
        self._models = app.state.openai_serving_models
        application: Application = app
        return application

    def engine_model(self, step: int) -> str:
        """Returns the name under which vLLM knows a loaded version."""
        return f"{self._spec.name}@{step}"

    def call_weights(self, step: int | None) -> None:
        """Gives the engine's own weights the name of a version, so that they answer for it and for no other."""
        [weights] = self._models.base_model_paths
        name = _NO_VERSION if step is None else self.engine_model(step)
        self._models.base_model_paths[0] = type(weights)(name=name, model_path=weights.model_path)

    @property
    def refused_fields(self) -> dict[str, str]:
        """Fields of a request that would harm the engine, each with the reason."""
        if self.weights == "merged":
            return {}
        reason = "log-probabilities of the prompt cannot be computed while adapters are served (vllm #16668)"
        return {"prompt_logprobs": reason, "prompt_logprob_token_ids": reason, "echo": reason}

    async def add(self, adapter: AdapterVersion, directory: Path) -> None:
        """Loads an adapter that lies in `directory`, under a name that was never used before.

        Raises:
            ServingError: vLLM refuses it; in its words.
        """
        from vllm.lora.request import LoRARequest

        name = self.engine_model(adapter.step)
        request = LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=str(directory))
        try:
            added = await self._engine.add_lora(request)
        except Exception as error:
            raise ServingError(f"{name} cannot be loaded: {_first_line(error)}") from error
        if not added:
            raise ServingError(f"{name} cannot be loaded: the engine did not take it")
        self._requests[adapter.step] = request
        self._models.lora_requests[name] = request

    async def remove(self, step: int) -> None:
        """Unloads an adapter; no effect where it is not loaded."""
        request = self._requests.pop(step, None)
        if request is not None:
            self._models.lora_requests.pop(request.lora_name, None)
            await self._engine.remove_lora(request.lora_int_id)

    def base_folder(self) -> Path:
        """Returns the folder that the base model's weights were loaded from."""
        path = Path(self._spec.base_model)
        if path.is_dir():
            return path
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self._spec.base_model, local_files_only=True))

    async def merge(self, adapter: AdapterVersion, directory: Path) -> None:
        """Puts the base weights plus an adapter that lies in `directory` in the weights' place, and drops what was
        cached under the old ones.

        No request may be running.

        Raises:
            EngineError: the old weights' cache could not be dropped; the engine must not answer any more.
        """
        self.call_weights(None)
        arguments = (str(self.base_folder()), adapter.step, str(directory), adapter.sha256)
        await self._engine.collective_rpc("load_merged", args=arguments)
        for _ in range(_RESET_TRIES):
            # Refused while a block is in use: an aborted request frees its blocks a moment after it was answered.
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.02)
        raise EngineError("the prefix cache of the old weights could not be dropped: a request is still running")

    async def canary(self, step: int | None) -> list[float]:
        """Returns log-probabilities of some tokens after a fixed prompt, under an adapter or the engine's weights."""
        from vllm import SamplingParams

        # Log-probabilities of the prompt itself would be simpler, but with an adapter vLLM computes them by the wrong
        # mapping, and dies if other requests run (vllm #16668; seen with 0.32).
        vocabulary = self._engine.model_config.get_vocab_size()
        count = min(_CANARY_TOKENS, self._engine.model_config.max_model_len - 1)
        token_ids = [(7919 * i + 13) % vocabulary for i in range(count)]
        final = None
        async for output in self._engine.generate(
            {"prompt_token_ids": token_ids},
            SamplingParams(max_tokens=1, temperature=1.0, logprob_token_ids=token_ids, detokenize=False),
            f"canary-{next(self._canaries)}",
            lora_request=None if step is None else self._requests[step],
        ):
            final = output
        assert final is not None
        (position,) = final.outputs[0].logprobs
        return [position[token_id].logprob for token_id in token_ids]

    async def sleep(self) -> None:
        """Moves the weights to the host and drops the cache."""
        await self._engine.sleep(level=1)

    async def wake(self) -> None:
        """Moves the weights back and makes an empty cache."""
        await self._engine.wake_up()
        await self._engine.reset_prefix_cache()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return int(self._engine.model_config.max_model_len)

    @property
    def dtype(self) -> str:
        """Type of the engine's weights and arithmetic, such as "bfloat16"."""
        return str(self._engine.model_config.dtype).removeprefix("torch.")

    def failure(self) -> str | None:
        """Returns how the engine's processes ended, or None while they live."""
        if self._engine is None or not self._engine.errored:
            return None
        manager = self._engine.engine_core.resources.engine_manager
        ended: dict[str, int] = manager.finished_procs() if manager else {}
        return "; ".join(f"{name} ended {_exit(code)}" for name, code in ended.items()) or "the engine stopped"

    def shut_down(self) -> None:
        """Asks the engine's processes to end."""
        if self._engine is not None:
            self._engine.shutdown(timeout=5)
            self._engine = self._models = None

    def _wanted_dtype(self) -> str:
        """Returns the type to ask vLLM for, whose own "auto" turns float32 into 16 bits, on a CPU too."""
        if self._spec.serving.dtype != "auto" or self.device != "cpu":
            return self._spec.serving.dtype
        from transformers import AutoConfig

        stored = AutoConfig.from_pretrained(self._spec.base_model).get_text_config().dtype
        return str(stored).removeprefix("torch.") if stored is not None else "auto"

    def _arguments(self) -> dict[str, Any]:
        spec, serving = self._spec, self._spec.serving
        kv_cache_gib = serving.kv_cache_gib or (1.0 if self.device == "cpu" else None)
        arguments: dict[str, Any] = {
            "model": spec.base_model,
            "served_model_name": [_NO_VERSION],
            "dtype": self._wanted_dtype(),
            "seed": spec.seed,
            "tensor_parallel_size": serving.tensor_parallel,
            "max_num_seqs": serving.max_num_seqs,
            "gpu_memory_utilization": serving.gpu_memory_utilization,
            "enforce_eager": not (self.device != "cpu" if serving.compile is None else serving.compile),
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "enable_log_requests": False,
            "disable_fastapi_docs": True,
            "max_logprobs": 20,
        }
        if serving.max_model_len is not None:
            arguments["max_model_len"] = serving.max_model_len
        if self.device == "cpu":
            # vLLM's own 128 would leave prompts shorter than that out of the prefix cache, and compute a group's prompt
            # once per completion.
            arguments["block_size"] = _CPU_BLOCK_SIZE
        if self.weights == "merged":
            arguments["worker_extension_cls"] = f"{MergingWorker.__module__}.{MergingWorker.__qualname__}"
        if spec.sleeps:
            arguments["enable_sleep_mode"] = True
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * _GIB)
        if self.weights == "adapter":
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": next((rank for rank in _LORA_RANKS if rank >= spec.max_lora_rank), spec.max_lora_rank),
                "max_loras": serving.max_versions,
                "max_cpu_loras": serving.max_versions,
            }
        return arguments | serving.engine_args


def _parsed_arguments(arguments: dict[str, Any]) -> Any:
    """Returns vLLM's own namespace of server arguments, each checked by vLLM's own parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigError(f"vLLM refuses its arguments: {message}")

    parser = make_arg_parser(Parser())
    known = set(vars(parser.parse_args([])))
    line: list[str] = []
    for name, value in arguments.items():
        key = name.lstrip("-").replace("-", "_")
        if key not in known:
            raise ConfigError(f"engine_args: vLLM has no argument {name!r}{nearest(key, sorted(known))}")
        line += _option(key, value)
    args = parser.parse_args(line)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses its arguments: {error}") from error
    return args


def _option(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag] if value else ["--no-" + flag[2:]]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]


def _exit(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory?)" if code == -9 else ""
    return f"by signal {-code}{hint}"


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that vLLM's own server runs in."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
