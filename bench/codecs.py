"""Codecs on KV that SmolLM2 really computed: size, speed, and what the model says afterwards.

For each prompt, pages of the first tokens go through a codec and back; the model then reads the
next tokens over that cache. Beside the exact cache, token by token: KL of the next-token
distributions, and whether the most likely token is the same. Text: docstrings of Python's library.

The KV is computed as engines do, in bfloat16; the reading after it in float32. Read in bfloat16,
two prompts (16 tokens) gave int8 0.0021 nats and fp8 0.0028: above int8's budget. That this is the
arithmetic's rounding and not the codec's error is likely, but no run has shown it apart.

    lossless_ratio >= 1.35, bit-exact     int8_kl <= 0.001     int4_kl <= 0.02     nats, mean

    python bench/codecs.py [--json] [--tiny] [--prompts 50] [--prefix 128] [--next 32] [--model DIR]
"""

from __future__ import annotations

import argparse
import ast
import random
import statistics
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from paired import json_line, machine

from kvstore.engine_adapter.demo_model import convert
from kvstore.tiers import codec_lossless
from kvstore.tiers.codec import LOSSY_CODECS, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_TOKENS = 64
BUDGETS = {"lossless_ratio": (1.35, True), "int8_kl": (0.001, False), "int4_kl": (0.02, False)}


@dataclass
class Score:
    """What was seen of one codec, over all prompts."""

    raw_bytes: int = 0
    encoded_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)  # a GB, page by page
    decode_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # mean magnitude, page by page
    error_max: float = 0.0
    kl: list[float] = field(default_factory=list)  # of each token
    same: list[bool] = field(default_factory=list)
    exact: bool = True

    def row(self) -> dict[str, float | bool]:
        return {
            "ratio": round(self.raw_bytes / self.encoded_bytes, 4),
            "encode_gb_s": round(1 / statistics.median(self.encode_s), 3),
            "decode_gb_s": round(1 / statistics.median(self.decode_s), 3),
            "bit_exact": self.exact,
            "error_max": round(self.error_max, 5),
            "error_mean": round(statistics.fmean(self.errors), 6),
            "kl_mean": round(statistics.fmean(self.kl), 7),
            "kl_max": round(max(self.kl), 6),
            "greedy_agreement": round(statistics.fmean(self.same), 5),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="two short prompts: a test of it")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prefix", type=int, default=128, help="tokens that go through the codec")
    parser.add_argument("--next", type=int, default=32, help="tokens that are read after them")
    parser.add_argument("--model", type=Path, help="a model's directory; default: the demo's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tiny:
        options.prompts, options.prefix, options.next = 2, 64, 8
    if options.prefix % PAGE_TOKENS:
        parser.error(f"--prefix: whole pages of {PAGE_TOKENS} tokens are needed")
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model
        if directory is None:
            directory = Path(scratch) / "model"
            convert(directory)
        scores = Bench(directory, options).run()
    rows = {name: score.row() for name, score in scores.items()}
    results = {"lossless_ratio": rows["lossless"]["ratio"]}
    results |= {f"{name}_kl": rows[name]["kl_mean"] for name in ("fp8", "int8", "int4")}
    if options.json:
        tokens = options.prompts * options.next
        print(json_line({}, options.seed, **results, codecs=rows, prompts=options.prompts,
                        prefix_tokens=options.prefix, tokens_compared=tokens))  # fmt: skip
        return
    print(f"{machine()}; seed {options.seed}; {options.prompts} prompts of {options.prefix} tokens")
    for name, row in rows.items():
        print(f"{name:9}" + "  ".join(f"{key} {value}" for key, value in row.items()))
    for key, (budget, at_least) in BUDGETS.items():
        kept = (results[key] >= budget) == at_least or results[key] == budget
        print(f"{key:15} {results[key]}  budget {'>=' if at_least else '<='} {budget}: "
              + ("kept" if kept else "MISSED"))  # fmt: skip


class Bench:
    """The model, its prompts, and a score for each codec."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.options = options
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(directory, dtype=torch.bfloat16).eval()
        self.reader = load(directory, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.prompts = prompts(tokenizer, options)
        config = self.model.config
        head_dim = getattr(config, "head_dim", None)
        shape = KvShape(
            "bfloat16",
            config.num_hidden_layers,
            2,
            config.num_key_value_heads,
            PAGE_TOKENS,
            head_dim or config.hidden_size // config.num_attention_heads,
        )
        self.shape = shape
        self.codecs: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
            "raw": (bytes, copied),
            "lossless": (codec_lossless.encode, codec_lossless.decode),
        }
        for name, make in LOSSY_CODECS.items():
            codec = make(shape)
            self.codecs[name] = codec.encode, codec.decode
        self.scores = {name: Score() for name in self.codecs}

    @torch.no_grad()
    def run(self) -> dict[str, Score]:
        """All prompts; the codecs' order moves on, so that none is always measured first."""
        names = list(self.codecs)
        for number, tokens in enumerate(self.prompts):
            prefix, rest = tokens[:, : self.options.prefix], tokens[:, self.options.prefix :]
            pages = self.pages_of(self.model(prefix, use_cache=True).past_key_values)
            exact = self.log_probabilities(pages, rest)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                decoded = self.through(name, pages)
                found = self.log_probabilities(decoded, rest)
                kl = (exact.exp() * (exact - found)).sum(-1)
                self.scores[name].kl += kl.tolist()
                self.scores[name].same += (exact.argmax(-1) == found.argmax(-1)).tolist()
        return self.scores

    def pages_of(self, cache: Any) -> list[torch.Tensor]:
        """The cache as the store has it: [layers, 2, heads, tokens, dim] a page."""
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        return [part.contiguous() for part in torch.stack(layers).split(PAGE_TOKENS, 3)]

    def log_probabilities(self, pages: list[torch.Tensor], rest: torch.Tensor) -> torch.Tensor:
        """Of the token after each of `rest`, read over a cache of these pages; float64."""
        whole = torch.cat(pages, 3).float()
        cache = transformers.DynamicCache()
        for layer in range(self.shape.layers):
            cache.update(whole[layer, 0][None].clone(), whole[layer, 1][None].clone(), layer)
        logits = self.reader(rest, past_key_values=cache, use_cache=True).logits[0]
        return logits.double().log_softmax(-1)

    def through(self, name: str, pages: list[torch.Tensor]) -> list[torch.Tensor]:
        """The pages after the codec, there and back, timed."""
        encode, decode = self.codecs[name]
        score, decoded = self.scores[name], []
        for page in pages:
            raw = page.view(torch.uint8).numpy().reshape(-1)
            out = bytearray(raw.nbytes)
            begin = time.perf_counter()
            encoded = encode(raw.data)
            middle = time.perf_counter()
            decode(encoded, out)
            end = time.perf_counter()
            score.encode_s.append((middle - begin) / raw.nbytes * 1e9)
            score.decode_s.append((end - middle) / raw.nbytes * 1e9)
            score.raw_bytes += raw.nbytes
            score.encoded_bytes += len(encoded)
            score.exact &= out == raw.tobytes()
            back = torch.frombuffer(out, dtype=torch.bfloat16).reshape(page.shape)
            error = (back.float() - page.float()).abs()
            score.errors.append(float(error.mean()))
            score.error_max = max(score.error_max, float(error.max()))
            decoded.append(back)
        return decoded


def copied(frame: bytes, out: bytearray) -> None:
    """What raw does to decode."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(frame, np.uint8))


def prompts(tokenizer: Any, options: argparse.Namespace) -> list[torch.Tensor]:
    """Runs of tokens of docstrings of Python's library, each from other modules."""
    wanted = options.prefix + options.next
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(options.seed).shuffle(files)
    found: list[torch.Tensor] = []
    text = ""
    for file in files:
        tree = ast.parse(file.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documents = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]
        text += "\n\n".join(each for each in documents if each) + "\n\n"
        tokens = tokenizer(text, return_tensors="pt").input_ids
        if tokens.shape[1] >= wanted:
            found.append(tokens[:, :wanted])
            text = ""
        if len(found) == options.prompts:
            return found
    raise SystemExit(f"{len(found)} prompts of {wanted} tokens found, {options.prompts} wanted")


if __name__ == "__main__":
    main()
