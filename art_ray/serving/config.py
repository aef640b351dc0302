"""How the policy is served. One class; every option works or is refused with the reason."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic

from art_ray.types import FrozenConfig

__all__ = ["REFUSED_ENGINE_ARGS", "ServingConfig"]

Weights = Literal["auto", "adapter", "merged"]

_RANGE = r"\d+(-\d+)?"
_CORES = rf"{_RANGE}(,{_RANGE})*"
_OURS = "it is set by ServingConfig: use its field `{}`"
REFUSED_ENGINE_ARGS: dict[str, str] = {
    "api_key": "the front checks the key; the engine's own check guards only some",
    "host": "the backend chooses the interface, and announces the address after binding it",
    "port": "the port is bound before it is announced, so that two engines never choose the same one",
    "uds": "the engine is reached over TCP",
    "model": "the base model belongs to the trainable model",
    "tokenizer": "sampled and trained token ids must come from the base model's own tokenizer",
    "served_model_name": "requests name a policy version; the base model is never served",
    "generation_config": "the base model's defaults for temperature, top-p and top-k would change the distribution "
    "that is trained",
    "override_generation_config": "as for generation_config: ask for temperature in each request",
    "logprobs_mode": "training needs the log-probabilities after the temperature",
    "enable_lora": _OURS.format("weights"),
    "lora_modules": "versions are loaded under `{name}@{step}` by the backend",
    "enable_sleep_mode": "sleep is driven by the backend",
    "max_loras": _OURS.format("max_versions"),
    "max_cpu_loras": _OURS.format("max_versions"),
    "max_lora_rank": "it follows from the LoRA configuration of the trainable model",
    "tensor_parallel_size": _OURS.format("tensor_parallel"),
    "data_parallel_size": _OURS.format("replicas"),
    "dtype": _OURS.format("dtype"),
    "max_model_len": _OURS.format("max_model_len"),
    "max_num_seqs": _OURS.format("max_num_seqs"),
    "kv_cache_memory_bytes": _OURS.format("kv_cache_gib"),
    "gpu_memory_utilization": _OURS.format("gpu_memory_utilization"),
    "enable_log_requests": "prompts would be written to the log",
    "enable_log_outputs": "answers would be written to the log",
    "middleware": "nothing may stand between the front and the engine",
    "enable_request_id_headers": "the engine's request ids stay inside",
    "root_path": "the front knows the routes by their paths",
    "ssl_keyfile": "TLS is ended before the front",
    "ssl_certfile": "TLS is ended before the front",
    "headless": "the engine is always served",
    "api_server_count": "one server per replica; use `replicas`",
    "distributed_executor_backend": "the engine's workers are its own processes on one node",
    "worker_extension_cls": "it belongs to the backend",
    "weight_transfer_config": "weights arrive as adapters, with a hash",
    "config": "give each argument by name",
    "allow_credentials": "browsers are no clients of this server",
    "allowed_origins": "browsers are no clients of this server",
}
"""Arguments of vLLM's server that `engine_args` may not carry, each with the reason."""


class ServingConfig(FrozenConfig):
    """How one trainable model is served.

    Raises:
        ConfigError: a value out of range, or an engine argument that would break a guarantee of this package.
    """

    replicas: int = pydantic.Field(default=1, ge=1)
    """Engines that serve the same policy side by side."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """Devices (GPUs, or groups of cores) over which one engine splits its weights."""
    weights: Weights = "auto"
    """"adapter": one LoRA adapter per version, several versions at once. "merged": the adapter is added into the
    weights, one version at a time. "auto": merged on CPU, where sampling with an adapter is slower; adapter on GPU."""
    sleeps: bool | None = None
    """Whether engine and trainer share one GPU: the engine gives its memory back while the trainer works. None: where
    the cluster has a single GPU. `gpu_memory_utilization` must leave the trainer's weights their room."""
    max_versions: int = pydantic.Field(default=4, ge=2, le=64)
    """Adapter weights only: versions that are held at once (the current one, and those still leased)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the engine's weights and arithmetic. "auto": on CPU the type the base model is stored in; on GPU the
    same, but 16 bits where that is float32."""
    max_model_len: int | None = pydantic.Field(default=None, ge=16)
    """Longest prompt plus answer, in tokens; None: what the base model allows."""
    max_num_seqs: int = pydantic.Field(default=128, ge=1)
    """Sequences that the engine advances together; further ones queue inside it."""
    max_requests: int = pydantic.Field(default=1024, ge=1)
    """Requests that the front holds at once, queued ones included; one more is answered with status 503."""
    kv_cache_gib: float | None = pydantic.Field(default=None, gt=0)
    """GiB of memory for the key-value cache. None: 1 GiB on CPU; on GPU, what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = pydantic.Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that the engine may take, weights included. Without effect on CPU."""
    compile: bool | None = None
    """Whether the engine compiles the model (and captures graphs on GPU): faster sampling after a longer start. None:
    on GPU, but not on CPU."""
    cpu_cores: str | None = pydantic.Field(default=None, pattern=rf"^{_CORES}(\|{_CORES})*$")
    """Cores that compute, as "0-3,6"; with tensor_parallel, one list per worker, separated by "|". None: all that
    this process may use. Without effect on GPU."""
    start_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Seconds that an engine has from its start to the first answer."""
    load_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Seconds that loading a version may take, waiting for a place or for running requests included."""
    queue_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Seconds that a request may wait for a replica with room, or for one to come back; then status 503."""
    probe_interval_s: float = pydantic.Field(default=15.0, gt=0)
    """Seconds between two looks at a replica that has shown no fault."""
    probe_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Seconds that a replica has to compute one token, whatever else it does, before it is taken to stand still."""
    request_timeout_s: float = pydantic.Field(default=1800.0, gt=0)
    """Seconds after which a request that has not ended is cut off with status 504."""
    pin_ttl_s: float = pydantic.Field(default=240.0, gt=0)
    """Seconds for which a trajectory or another named holder keeps its version after it last used it. Shorter than
    `load_timeout_s`, so that a client that died cannot hold up a new version."""
    max_body_mib: float = pydantic.Field(default=32.0, gt=0)
    """Largest request body, in MiB; a larger one is answered with status 413."""
    show_engine_log: bool = False
    """Whether what the engine's processes write goes to standard error. Its last lines are kept for errors anyway; the
    environment variable VLLM_LOGGING_LEVEL says how much it writes."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's server, by their Python names, such as {"tool_call_parser": "hermes",
    "enable_auto_tool_choice": True}. A name that vLLM does not have is refused when the engine starts."""

    @pydantic.field_validator("pin_ttl_s")
    @classmethod
    def _shorter_than_a_load(cls, value: float, info: pydantic.ValidationInfo) -> float:
        if value >= info.data.get("load_timeout_s", math.inf):
            raise ValueError(
                f"must be shorter than load_timeout_s ({info.data['load_timeout_s']:g}), so that a client that died "
                "cannot hold up a new version until loading it has failed"
            )
        return value

    @pydantic.field_validator("engine_args")
    @classmethod
    def _no_refused_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            key = name.lstrip("-").replace("-", "_").removeprefix("no_")
            if reason := REFUSED_ENGINE_ARGS.get(key):
                raise ValueError(f"engine_args may not carry {name!r}: {reason}")
        return value

    def weights_on(self, device: str) -> Literal["adapter", "merged"]:
        """Returns how versions are served on `device` ("cpu" or another vLLM device type)."""
        if self.weights != "auto":
            return self.weights
        return "merged" if device == "cpu" else "adapter"
