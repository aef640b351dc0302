"""Adapters for the tests, saved by PEFT as the trainer saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art_ray.serving.adapter import AdapterVersion


def write_adapter(base_model: Path, path: Path, *, seed: int, rank: int = 4) -> Path:
    """Saves a LoRA adapter for all linear layers; seed 0 is untrained (B = 0), any other moves the answers clearly."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name and seed:
                parameter.data.normal_(0, 0.1)
    model.save_pretrained(path)
    return path


def adapter_of(base_model: Path, directory: Path, *, step: int, seed: int | None = None) -> AdapterVersion:
    """Returns version `step`, with weights of `seed` (the step itself where not given)."""
    return AdapterVersion.from_directory(
        step, write_adapter(base_model, directory / str(step), seed=step if seed is None else seed)
    )


def reference_logprobs(
    base_model: Path, adapter: Path | None, prompt: list[int], sampled: list[int], temperature: float = 1.0
) -> list[float]:
    """Returns the log-probability of each sampled id by transformers and PEFT, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()
