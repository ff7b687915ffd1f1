"""What a policy costs a look-up of the real store: its part of a match that hits 8 Ki tokens.

An embedded store in memory, prompts of 128 pages of 64 tokens that are all there. The time that
the policy is told of them is taken inside the look-up, under the store's lock.

    python bench/policy_cost.py            all policies
    python bench/policy_cost.py --json     one line
"""

from __future__ import annotations

import argparse
import datetime
import json
import time

import numpy as np
from paired import machine

from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.tiers.policies import POLICIES

PAGES = 128
PAGE_TOKENS = 64
PROMPTS = 10
SPEC = CacheSpec.opaque("policy-cost", page_tokens=PAGE_TOKENS, page_bytes=4032)


def measure(name: str, lookups: int) -> dict[str, float]:
    """Medians in microseconds: of the policy's part, and of the whole look-up."""
    with Store.open(None, host_bytes="16MiB", policy=name) as store:
        session = store.session(SPEC)
        count = PAGES * PAGE_TOKENS
        prompts = [np.arange(n * count, (n + 1) * count, dtype=np.int32) for n in range(PROMPTS)]
        for tokens in prompts:
            with session.reserve(tokens, deadline_s=5.0) as run:
                run.commit()
        policy, parts, wholes = store.state.policy, [], []
        told = policy.touched

        def timed(ids: np.ndarray, now: float) -> None:
            began = time.perf_counter()
            told(ids, now)
            parts.append(time.perf_counter() - began)

        policy.touched = timed  # type: ignore[method-assign]
        for number in range(lookups):
            began = time.perf_counter()
            with session.match(prompts[number % PROMPTS]) as found:
                assert found.pages == PAGES
            wholes.append(time.perf_counter() - began)
        return {
            "policy_us_p50": round(1e6 * float(np.median(parts)), 2),
            "lookup_us_p50": round(1e6 * float(np.median(wholes)), 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lookups", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: measure(name, options.lookups) for name in POLICIES}
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        print(json.dumps(line | {"pages": PAGES, "policies": found}))
        return
    for name, each in found.items():
        print(
            f"{name:5} {each['policy_us_p50']:6.1f} us of a look-up of "
            f"{each['lookup_us_p50']:6.1f} us ({PAGES} pages hit)"
        )


if __name__ == "__main__":
    main()
