"""Codecs on KV that SmolLM2 really computed: size, speed, and what the model says afterwards.

For each prompt, pages of the first tokens go through a codec and back; the model then reads the
next tokens over that cache. Beside the exact cache, token by token: KL of the next-token
distributions, and whether the most likely token is the same. Text: docstrings of Python's library.

The KV is computed as engines do, in bfloat16. It is read twice: in float32, where nothing but the
codec's error moves the answer, and in bfloat16, as engines do, where any change of the cache also
moves roundings of every layer. How much that is without a codec is measured beside it: `order`,
the exact cache read by another attention kernel ("eager"), as equal as two engines are. `kl_added`
is what a codec adds to the distance of the bfloat16 answer from the float32 one, exact cache. So
int8's 0.0016 nats in bfloat16 are rounding: `order` has 0.0016 too, int8 adds 0.00004.

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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from paired import json_line, machine

from kvstore.engine_adapter.demo_model import convert
from kvstore.engine_adapter.model_spec import CACHE_ARGUMENT
from kvstore.tiers import codec_lossless
from kvstore.tiers.codec import LOSSY_CODECS, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_TOKENS = 64
PROMPTS_A_BATCH = 10
READINGS = FLOAT32, BFLOAT16 = "float32", "bfloat16"
BUDGETS = {"int8": 0.001, "int4": 0.02}  # nats
RATIO_LEAST = 1.35


class Answer:
    """What the model said: log-probabilities and probabilities [tokens, words], float64."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logs = logits.double().log_softmax(-1)
        self.words = self.logs.argmax(-1)

    @cached_property
    def shares(self) -> torch.Tensor:
        return self.logs.exp()

    def divergence(self, other: Answer) -> list[float]:
        """KL of another answer from this one, token by token."""
        found: list[float] = (self.shares * (self.logs - other.logs)).sum(-1).tolist()
        return found


@dataclass
class Reading:
    """What the model said over decoded caches, token by token, beside the exact cache."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    away: list[float] = field(default_factory=list)  # KL from the float32 answer, exact cache

    def compare(self, exact: Answer, found: Answer, truth: Answer) -> None:
        """Add an answer; `exact` is of the same dtype, `truth` in float32, both of exact caches."""
        kl = exact.divergence(found)
        self.kl += kl
        self.same += (exact.words == found.words).tolist()
        self.away += kl if truth is exact else truth.divergence(found)

    def row(self, exact_away: list[float]) -> dict[str, float]:
        return {
            "kl_mean": round(statistics.fmean(self.kl), 7),
            "kl_max": round(max(self.kl), 6),
            "greedy_agreement": round(statistics.fmean(self.same), 5),
            "kl_added": round(statistics.fmean(self.away) - statistics.fmean(exact_away), 7),
        }


@dataclass
class Score:
    """What was seen of one codec, over all prompts."""

    raw_bytes: int = 0
    encoded_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)  # a GB, page by page
    decode_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # mean magnitude, page by page
    error_max: float = 0.0
    exact: bool = True
    read: dict[str, Reading] = field(default_factory=lambda: {d: Reading() for d in READINGS})

    def row(self) -> dict[str, float | bool]:
        return {
            "ratio": round(self.raw_bytes / self.encoded_bytes, 4),
            "encode_gb_s": round(1 / statistics.median(self.encode_s), 3),
            "decode_gb_s": round(1 / statistics.median(self.decode_s), 3),
            "bit_exact": self.exact,
            "error_max": round(self.error_max, 5),
            "error_mean": round(statistics.fmean(self.errors), 6),
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
        bench = Bench(directory, options)
        bench.run()
    rows, order = bench.rows()
    results = {"lossless_ratio": rows["lossless"]["ratio"]}
    for suffix, dtype in (("", FLOAT32), ("_bf16", BFLOAT16)):
        results |= {f"{name}_kl{suffix}": rows[name][dtype]["kl_mean"] for name in LOSSY_CODECS}
    results["order_kl_bf16"] = order["kl_mean"]
    found = verdicts(rows)
    if options.json:
        tokens = options.prompts * options.next
        print(json_line({}, options.seed, **results, codecs=rows, order=order, verdicts=found,
                        prompts=options.prompts, prefix_tokens=options.prefix,
                        tokens_compared=tokens))  # fmt: skip
        return
    print(f"{machine()}; seed {options.seed}; {options.prompts} prompts of {options.prefix} tokens")
    for name, row in rows.items():
        print(f"{name:9}" + "  ".join(f"{k} {v}" for k, v in row.items() if k not in READINGS))
    for dtype in READINGS:
        print(f"read in {dtype}:")
        read = {name: row[dtype] for name, row in rows.items()}
        for name, row in (read | ({"order": order} if dtype == BFLOAT16 else {})).items():
            print(f"{name:9}" + "  ".join(f"{key} {value}" for key, value in row.items()))
    for line in found:
        print(line)


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Each budget and whether it was kept, in both readings."""
    ratio, exact = rows["lossless"]["ratio"], rows["lossless"]["bit_exact"]
    lines = [
        f"lossless ratio {ratio}, budget >= {RATIO_LEAST}: {word(ratio >= RATIO_LEAST)}",
        f"lossless bit-exact: {word(exact)}",
    ]
    for name, budget in BUDGETS.items():
        for dtype in READINGS:
            kl = rows[name][dtype]["kl_mean"]
            lines.append(f"{name} KL in {dtype} {kl}, budget <= {budget}: {word(kl <= budget)}")
        added = rows[name][BFLOAT16]["kl_added"]
        lines.append(f"{name} KL added in bfloat16 {added}, same budget: {word(added <= budget)}")
    return lines


def word(kept: bool) -> str:
    return "kept" if kept else "MISSED"


class Bench:
    """The model in both dtypes, its prompts, and a score for each codec."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.options = options
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.models = {
            dtype: load(directory, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
            for dtype in READINGS
        }
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.prompts = prompts(tokenizer, options)
        config = self.models[BFLOAT16].config
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
        self.order = Reading()

    @torch.no_grad()
    def run(self) -> None:
        """All prompts; the codecs' order moves on, so that none is always measured first."""
        names = list(self.codecs)
        for turn, start in enumerate(range(0, len(self.prompts), PROMPTS_A_BATCH)):
            tokens = torch.cat(self.prompts[start : start + PROMPTS_A_BATCH])
            prefix, rest = tokens.split([self.options.prefix, self.options.next], 1)
            cache = self.models[BFLOAT16](prefix, use_cache=True, logits_to_keep=1).past_key_values
            pages = self.pages_of(cache)
            exact = {dtype: self.answer(dtype, pages, rest) for dtype in READINGS}
            turned = turn % len(names)
            for name in names[turned:] + names[:turned]:
                decoded = self.through(name, pages)
                for dtype in READINGS:
                    found = self.answer(dtype, decoded, rest)
                    reading = self.scores[name].read[dtype]
                    reading.compare(exact[dtype], found, exact[FLOAT32])
            self.models[BFLOAT16].set_attn_implementation("eager")
            found = self.answer(BFLOAT16, pages, rest)
            self.models[BFLOAT16].set_attn_implementation("sdpa")
            self.order.compare(exact[BFLOAT16], found, exact[FLOAT32])

    def rows(self) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        """A row a codec, with one more a reading in it; and that of `order`."""
        away = {dtype: self.scores["raw"].read[dtype].away for dtype in READINGS}
        rows = {
            name: score.row() | {d: score.read[d].row(away[d]) for d in READINGS}
            for name, score in self.scores.items()
        }
        return rows, self.order.row(away[BFLOAT16])

    def pages_of(self, cache: Any) -> list[list[torch.Tensor]]:
        """The cache as the store has it: [layers, 2, heads, tokens, dim] a page, by prompt."""
        layers = [torch.stack([layer.keys, layer.values], 1) for layer in cache.layers]
        whole = torch.stack(layers, 1)
        return [[part.contiguous() for part in row.split(PAGE_TOKENS, 3)] for row in whole]

    def answer(self, dtype: str, pages: list[list[torch.Tensor]], rest: torch.Tensor) -> Answer:
        """The token after each of `rest`, read over caches of these pages."""
        whole = torch.stack([torch.cat(row, 3) for row in pages]).to(getattr(torch, dtype))
        cache = transformers.DynamicCache()
        for layer in range(self.shape.layers):
            cache.update(whole[:, layer, 0].clone(), whole[:, layer, 1].clone(), layer)
        logits = self.models[dtype](rest, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
        return Answer(logits.flatten(0, 1))

    def through(self, name: str, pages: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The pages after the codec, there and back."""
        return [[self.page_through(name, page) for page in row] for row in pages]

    def page_through(self, name: str, page: torch.Tensor) -> torch.Tensor:
        """One page, timed."""
        encode, decode = self.codecs[name]
        score = self.scores[name]
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
        return back


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
