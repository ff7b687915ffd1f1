"""A tokenizer of one token a byte, so that what a text becomes can be counted."""

from __future__ import annotations

from typing import Any

WORDS = ["<pad>", "<end>"]


def byte_tokenizer() -> Any:
    """A `tokenizers.Tokenizer`; save() writes the file that --tokenizer takes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
