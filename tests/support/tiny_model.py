"""A random model with a byte tokenizer, small enough for a test, as any Hugging Face directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from byte_tokenizer import byte_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def tiny_model(directory: Path) -> None:
    """Write it to `directory`."""
    torch = pytest.importorskip("torch", reason="the demo computes with torch")
    transformers = pytest.importorskip("transformers", reason="the demo uses its models")
    tokenizer = byte_tokenizer()
    names = {"pad_token": "<pad>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(
        directory
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.4,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
