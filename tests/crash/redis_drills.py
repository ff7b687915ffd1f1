"""Two servers on two directories share one Redis: what one stored the other loads, then it fails.

    python tests/crash/redis_drills.py [--json] [--pairs 10] [--samples 400] [--directory DIR]

share    A stores, B loads, bytes are compared; a model answers the same at B from pages of A
restart  B is killed with -9 and loads again
share    A stores, B loads, bytes are compared; a model at B answers the same from pages of A
return   kill -9, then an empty Redis: how long until the pages are there again

Prints what was measured and whether it kept its bounds; exits with 1 if not.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
for folder in (SUPPORT, SUPPORT.parents[1] / "bench"):
    if str(folder) not in sys.path:  # pytest has the first one there
        sys.path.append(str(folder))

import numpy as np  # noqa: E402
from known_pages import SPEC, load, prompt, save  # noqa: E402
from paired import machine, paired_ratio  # noqa: E402
from redis_server import RedisProcess  # noqa: E402
from server_process import ServerProcess  # noqa: E402

from kvstore.connect import connect  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.interface import SessionLike, StoreLike

PROMPTS, PAGES = 20, 8
UNKNOWN_EACH = 10  # local hits between two look-ups that must ask Redis
ADDED_P99_MS_MAX = 1.0
FIRST_LOOKUP_MS_MAX = 100.0
RETURN_S_MAX = 30.0
WAIT_S = 60.0
ANSWER_TOKENS = 12


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument(
        "--samples", type=int, default=400, help="local hits in each half of a pair"
    )
    parser.add_argument("--directory", type=Path, help="where the stores are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="redis-drill-", dir=options.directory) as folder:
        found = drill(Path(folder), options.pairs, options.samples)
    found |= {"machine": machine()}
    print(json.dumps(found) if options.json else json.dumps(found, indent=2), flush=True)
    sys.exit(bool(found["problems"]))


def drill(folder: Path, pairs: int, samples: int) -> dict[str, Any]:
    """Everything, in one world."""
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    with RedisProcess(folder / "redis") as redis:
        flags = ("--host-bytes=64MiB", "--disk-bytes=256MiB")
        flags += (f"--redis-url={redis.url}", f"--secret-file={secret}")
        with (
            ServerProcess(folder / "a", *flags).start() as a,
            ServerProcess(folder / "b", *flags).start() as b,
        ):
            found = share(a, b)
            found |= same_answer(a, b)
            found |= restart(b)
            found |= silence(redis, b, pairs, samples)
            found |= come_back(redis, folder, b)
            codes = a.terminate(), b.terminate()
    problems = [name for name, kept in bounds(found).items() if not kept]
    return found | {"problems": problems + ([f"exit codes {codes}"] if any(codes) else [])}


def bounds(found: dict[str, Any]) -> dict[str, bool]:
    """What must hold."""
    return {
        "all pages of A at B": found["pages_loaded"] == found["pages_stored"] == PROMPTS * PAGES,
        "all pages after a restart": found["pages_after_restart"] == PROMPTS * PAGES,
        "the same answer": found["same_answer"] is not False,
        "local hits": found["local_pages_missing"] == 0,
        "unknown prompts are misses": found["wrong_hits"] == 0,
        "added p99": found["local_added_p99_ms"] <= ADDED_P99_MS_MAX,
        "first look-up": found["first_lookup_ms_max"] <= FIRST_LOOKUP_MS_MAX,
        "later look-ups": found["later_lookup_added_p99_ms"] <= ADDED_P99_MS_MAX,
        "back within": found["back_after_s"] <= RETURN_S_MAX,
    }


def linked(server: ServerProcess) -> StoreLike:
    """A client that waits as long as it must: what is slow shall be seen."""
    return connect(server.address, lookup_deadline_s=10.0)


def counters(store: StoreLike) -> dict[str, int]:
    """What the server counts."""
    counted: dict[str, int] = store.stats().to_dict()["counters"]
    return counted


def redis_state(store: StoreLike) -> str:
    """What the server says of its Redis."""
    return str(next(t["state"] for t in store.stats().to_dict()["tiers"] if t["name"] == "redis"))


def wait_for(what: Callable[[], bool], within_s: float = WAIT_S) -> float:
    """Seconds until it was so; `within_s` if it never was."""
    begun = time.monotonic()
    while not what() and time.monotonic() - begun < within_s:
        time.sleep(0.02)
    return time.monotonic() - begun


def share(a: ServerProcess, b: ServerProcess) -> dict[str, Any]:
    """A stores, B loads; load() compares every byte."""
    with linked(a) as first, linked(b) as second:
        session = first.session(SPEC)
        stored = sum(save(session, prompt(seed, PAGES)) for seed in range(PROMPTS))
        wait_for(lambda: counters(first)["redis_pages_written"] >= stored)
        loaded = load_all(second.session(SPEC))
        came = counters(second)["redis_pages_read"]
    return {"pages_stored": stored, "pages_loaded": loaded, "pages_through_redis": came}


def load_all(session: SessionLike) -> int:
    """Pages of all prompts, compared; a prompt that is not whole is tried for a while."""
    pages = [0] * PROMPTS

    def try_again() -> bool:
        for seed in range(PROMPTS):
            if pages[seed] < PAGES:
                pages[seed] = load(session, prompt(seed, PAGES))
        return sum(pages) == PROMPTS * PAGES

    wait_for(try_again, 10.0)
    return sum(pages)


def same_answer(a: ServerProcess, b: ServerProcess) -> dict[str, Any]:
    """A model computes at A; at B its answer comes from A's pages."""
    try:
        import torch
        import transformers

        from kvstore.engine_adapter.transformers_adapter import TransformersAdapter
    except ImportError:
        return {"same_answer": None, "tokens_reused": 0}
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, head_dim=16, eos_token_id=1, **shape
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 500, (1, 400), generator=torch.Generator().manual_seed(1))
    answers, reused = [], 0
    with linked(a) as first, linked(b) as second:
        for store in (first, second):
            before = counters(first)
            adapter = TransformersAdapter(store, model, page_tokens=8)
            cache = adapter.cache(ids)
            output = model.generate(
                ids, **cache.arguments(), max_new_tokens=ANSWER_TOKENS, do_sample=False
            )
            cache.save(output, durable=True)
            answers.append(output[0].tolist())
            reused = cache.reused_tokens[0]
            wait_for(
                lambda before=before: (  # type: ignore[misc]  # bound at once
                    counters(first)["redis_pages_written"] - before["redis_pages_written"]
                    >= counters(first)["pages_committed"] - before["pages_committed"]
                ),
                10.0,
            )
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    same = answers == [plain[0].tolist()] * 2 and reused >= ids.shape[1] - 8
    return {"same_answer": same, "tokens_reused": reused}


def restart(b: ServerProcess) -> dict[str, Any]:
    """B dies and comes back."""
    b.kill()
    b.start()
    with linked(b) as store:
        return {"pages_after_restart": load_all(store.session(SPEC))}


def silence(redis: RedisProcess, b: ServerProcess, pairs: int, samples: int) -> dict[str, Any]:
    """Each pair: the same calls with a Redis that answers, and from the moment that it does not."""
    quiet: list[Times] = []
    silent: list[Times] = []
    unknown = iter(range(1_000, 2_000_000))
    with linked(b) as store:
        session = store.session(SPEC)
        for _ in range(pairs):
            wait_for(lambda: redis_state(store) == "ok")
            quiet.append(Times(session, samples, unknown))
            redis.pause()
            silent.append(Times(session, samples, unknown))
            redis.resume()
        wait_for(lambda: redis_state(store) == "ok")
    added = [b.local_p99 - a.local_p99 for a, b in zip(quiet, silent, strict=True)]
    later = [b.later_p99 - a.later_p99 for a, b in zip(quiet, silent, strict=True)]
    spread = paired_ratio(added, [1.0] * pairs)
    both = quiet + silent
    return {
        "pairs": pairs,
        "local_p99_ms": round(float(np.median([each.local_p99 for each in quiet])), 3),
        "local_p99_ms_silent": round(float(np.median([each.local_p99 for each in silent])), 3),
        "local_added_p99_ms": round(spread.median, 3),
        "local_added_p99_ms_spread": [round(spread.low, 3), round(spread.high, 3)],
        "first_lookup_ms": round(float(np.median([each.first for each in silent])), 2),
        "first_lookup_ms_max": round(max(each.first for each in silent), 2),
        "later_lookup_p99_ms": round(float(np.median([each.later_p99 for each in quiet])), 3),
        "later_lookup_added_p99_ms": round(float(np.median(later)), 3),
        "local_pages_missing": sum(each.missing for each in both),
        "wrong_hits": sum(each.wrong for each in both),
    }


class Times:
    """Milliseconds of local hits, and of look-ups of prompts that nobody has, mixed."""

    def __init__(self, session: SessionLike, samples: int, unknown: Any) -> None:
        local, remote = [], []
        self.missing = self.wrong = 0
        for number in range(samples):
            if number % UNKNOWN_EACH == 0:
                taken, pages = timed(session, prompt(next(unknown), PAGES))
                remote.append(taken)
                self.wrong += pages
            taken, pages = timed(session, prompt(number % PROMPTS, PAGES))
            local.append(taken)
            self.missing += PAGES - pages
        self.local_p99 = float(np.percentile(local, 99))
        self.first = remote[0]
        self.later_p99 = float(np.percentile(remote[1:], 99))


def timed(session: SessionLike, tokens: np.ndarray) -> tuple[float, int]:
    """Milliseconds of a look-up, and its pages."""
    begun = time.perf_counter()
    hit = session.match(tokens)
    taken = (time.perf_counter() - begun) * 1e3
    pages = hit.pages
    hit.release()
    return taken, pages


def come_back(redis: RedisProcess, folder: Path, b: ServerProcess) -> dict[str, Any]:
    """Redis dies and comes back empty; what was used last is there again after a while."""
    with linked(b) as store:
        load_all(store.session(SPEC))
        redis.kill()
        wait_for(lambda: redis_state(store) != "ok")
        with RedisProcess(folder / "redis", port=redis.port) as again:
            back_s = wait_for(lambda: len(again.pages()) >= 2 * PROMPTS * PAGES)
            local = load_all(store.session(SPEC))
    return {"back_after_s": round(back_s, 1), "pages_meanwhile_lost_here": PROMPTS * PAGES - local}


if __name__ == "__main__":
    main()
