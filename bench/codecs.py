"""Codecs on KV that SmolLM2 really computed: size, speed, and what the model says afterwards.

For each prompt, pages of the first tokens go through a codec and back; the model then reads the
next tokens over that cache. Text: docstrings of Python's library. The KV is computed as engines do,
in bfloat16, and so are decoded pages. What is compared, token by token, is the next-token
distribution over the decoded cache with that over the uncompressed one: the same weights, attention
kernel, cache class, batch and dtype; only the bytes of the cache differ. KL(uncompressed, decoded).

    float32    weights and arithmetic in float32, the cache's bfloat16 numbers made wider: what the
               codec's error alone does. The budgets below are of this reading.
    bfloat16   as engines do. Any change of the cache, however small, also moves roundings in every
               layer, and these move the answer too. `nudged` shows how much that is: the exact
               cache with one number in NUDGED_ONE_IN moved to its neighbour in bfloat16. Measured:
               0.0016 of that, 0.0016 of int8. So what is int8's own is the other two readings.
    KL added   KL of an answer from the float32 one over the exact cache, less what the exact cache
               in the same dtype has of it: roundings that do no more than replace others cancel.

"+-" is the standard error over prompts. The float32 row of `nudged` is its own loss, next to none.

    lossless_ratio >= 1.35, bit-exact     int8_kl <= 0.001     int4_kl <= 0.02     nats, mean

    python bench/codecs.py [--json] [--tiny] [--prompts 50] [--prefix 128] [--next 32] [--model DIR]
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import sysconfig
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from codecs_report import BFLOAT16, FLOAT32, READINGS, Score, tables, verdicts
from paired import json_line, machine

from kvstore.engine_adapter.demo_model import convert
from kvstore.engine_adapter.model_spec import CACHE_ARGUMENT
from kvstore.tiers import codec_lossless
from kvstore.tiers.codec import LOSSY_CODECS, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

Pages = list[list[torch.Tensor]]  # of each prompt

PAGE_TOKENS = 64
PROMPTS_A_BATCH = 10
NUDGED_ONE_IN = 1024
ROWS_AT_ONCE = 16  # of [tokens, words]: what is made in between stays in the processor's cache


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
        parts = [each.split(ROWS_AT_ONCE) for each in (self.shares, self.logs, other.logs)]
        found: list[float] = []
        for shares, logs, others in zip(*parts, strict=True):
            found += (shares * (logs - others)).sum(-1).tolist()
        return found


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
    if options.prompts < 2:
        parser.error("--prompts: at least 2 are needed for a spread")
    if options.prefix % PAGE_TOKENS:
        parser.error(f"--prefix: whole pages of {PAGE_TOKENS} tokens are needed")
    # Threads that wait for each other cost 4 times the work where others want the processors.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model
        if directory is None:
            directory = Path(scratch) / "model"
            progress("making the model")
            convert(directory)
        bench = Bench(directory, options)
        bench.run()
        progress("all prompts are done")
    rows = bench.rows()
    found = verdicts(rows)
    if options.json:
        nudged = rows.pop("nudged")
        results = {"lossless_ratio": rows["lossless"]["ratio"]}
        for suffix, dtype in (("", FLOAT32), ("_bf16", BFLOAT16)):
            results |= {f"{name}_kl{suffix}": rows[name][dtype]["kl_mean"] for name in LOSSY_CODECS}
        results["nudged_kl_bf16"] = nudged[BFLOAT16]["kl_mean"]
        tokens = options.prompts * options.next
        print(json_line({}, options.seed, **results, codecs=rows, nudged=nudged, verdicts=found,
                        prompts=options.prompts, prefix_tokens=options.prefix,
                        tokens_compared=tokens))  # fmt: skip
        return
    print(f"{machine()}; seed {options.seed}; {options.prompts} prompts of {options.prefix} tokens")
    for line in (*tables(rows), "", *found):
        print(line)


def progress(doing: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {doing}", file=sys.stderr, flush=True)


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
        self.scores = {name: Score(options.next) for name in (*self.codecs, "nudged")}
        self.random = torch.Generator().manual_seed(options.seed)

    @torch.no_grad()
    def run(self) -> None:
        """All prompts; the codecs' order moves on, so that none is always measured first."""
        names = list(self.codecs)
        count = len(self.prompts)
        for turn, start in enumerate(range(0, count, PROMPTS_A_BATCH)):
            progress(f"{start} of {count} prompts are done")
            tokens = torch.cat(self.prompts[start : start + PROMPTS_A_BATCH])
            prefix, rest = tokens.split([self.options.prefix, self.options.next], 1)
            cache = self.models[BFLOAT16](prefix, use_cache=True, logits_to_keep=1).past_key_values
            pages = self.pages_of(cache)
            turned = turn % len(names)
            decoded = {n: self.through(n, pages) for n in names[turned:] + names[:turned]}
            decoded["nudged"] = [[self.nudged(page) for page in row] for row in pages]
            truth = self.read(FLOAT32, pages, decoded, rest)
            self.read(BFLOAT16, pages, decoded, rest, truth)

    def read(
        self,
        dtype: str,
        pages: Pages,
        decoded: dict[str, Pages],
        rest: torch.Tensor,
        truth: Answer | None = None,
    ) -> Answer:
        """Compare answers over decoded caches with that over the exact one, which is returned.

        truth: the float32 answer, exact cache; None if that is what this one is. Caches of equal
        bytes are read once, as `raw`, beside the exact one: their answer can't differ.
        """
        exact = self.answer(dtype, pages, rest)
        raw = self.answer(dtype, decoded["raw"], rest)
        for name, those in decoded.items():
            equal = name == "raw" or same_bits(those, decoded["raw"])
            found = raw if equal else self.answer(dtype, those, rest)
            reading = self.scores[name].read[dtype]
            kl = exact.divergence(found)
            reading.kl += kl
            reading.same += (exact.words == found.words).tolist()
            reading.away += kl if truth is None else truth.divergence(found)
        return exact

    def rows(self) -> dict[str, dict[str, Any]]:
        """A row a codec, with one more a reading in it; of `nudged` only these."""
        away = {dtype: self.scores["raw"].read[dtype].away for dtype in READINGS}
        return {
            name: (score.row() if score.raw_bytes else {})
            | {dtype: score.read[dtype].row(away[dtype]) for dtype in READINGS}
            for name, score in self.scores.items()
        }

    def pages_of(self, cache: Any) -> Pages:
        """The cache as the store has it: [layers, 2, heads, tokens, dim] a page, by prompt."""
        layers = [torch.stack([layer.keys, layer.values], 1) for layer in cache.layers]
        whole = torch.stack(layers, 1)
        return [[part.contiguous() for part in row.split(PAGE_TOKENS, 3)] for row in whole]

    def answer(self, dtype: str, pages: Pages, rest: torch.Tensor) -> Answer:
        """The token after each of `rest`, read over caches of these pages."""
        whole = torch.stack([torch.cat(row, 3) for row in pages]).to(getattr(torch, dtype))
        cache = transformers.DynamicCache()
        for layer in range(self.shape.layers):
            cache.update(whole[:, layer, 0].clone(), whole[:, layer, 1].clone(), layer)
        logits = self.models[dtype](rest, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
        return Answer(logits.flatten(0, 1))

    def through(self, name: str, pages: Pages) -> Pages:
        """The pages after the codec, there and back."""
        return [[self.page_through(name, page) for page in row] for row in pages]

    def nudged(self, page: torch.Tensor) -> torch.Tensor:
        """A page with a few numbers moved to the neighbour that is farther from 0."""
        moved = page.clone()
        chosen = torch.rand(page.shape, generator=self.random) < 1 / NUDGED_ONE_IN
        moved.view(torch.int16).add_(chosen)
        return moved

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


def same_bits(some: Pages, others: Pages) -> bool:
    return all(
        torch.equal(page.view(torch.int16), other.view(torch.int16))
        for row, other_row in zip(some, others, strict=True)
        for page, other in zip(row, other_row, strict=True)
    )


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
