"""What vLLM's own objects lead to: groups of layers, requests. No engine, no weights."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from vllm_engines import PYTHON, ROOT, needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

HEAD = """
import json
from types import SimpleNamespace as Plain
import torch
def tell(answer): print("ANSWER", json.dumps(answer))
"""
GROUPS = """
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.kv_cache_interface import *
from kvstore.engine_adapter.block_regions import facts_from_config

attention = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
full = lambda: FullAttentionSpec(**attention)
window = lambda: SlidingWindowSpec(**attention, sliding_window=64)
chunked = lambda: ChunkedLocalAttentionSpec(**attention, attention_chunk_size=64)
state = lambda: MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.bfloat16,))

def problem(*kinds, one_group=False):
    specs = {f"layers.{at}": kind() for at, kind in enumerate(kinds)}
    if one_group:  # as --disable-hybrid-kv-cache-manager has it
        utils.unify_hybrid_kv_cache_specs(specs)
    if utils.is_kv_cache_spec_uniform(specs):
        groups = utils._get_kv_cache_groups_uniform_spec(specs)
    else:
        groups = utils._get_kv_cache_groups_uniform_page_size(specs)
    tensor = KVCacheTensor(size=1, layers=list(specs), layer_stride=1, block_stride=1)
    config = KVCacheConfig(10, [tensor], groups, kv_cache_layout="LBHNC")
    vllm_config = Plain(
        parallel_config=Plain(tensor_parallel_size=1),
        cache_config=Plain(cache_dtype="auto"),
        model_config=Plain(dtype=torch.bfloat16),
        device_config=Plain(device_type="cpu"),
    )
    facts = facts_from_config(vllm_config, config)
    assert bool(facts.problem) == (facts.shard_bytes == 0)
    return facts.problem

tell({
    "full": problem(full, full),
    "full and window": problem(full, window, full, window),
    "full and window, one group": problem(full, window, full, window, one_group=True),
    "chunked and full": problem(chunked, full),
    "chunked and full, one group": problem(chunked, full, one_group=True),
    "window": problem(window, window),
    "state and full": problem(state, full, full),
    "state": problem(state),
})
"""
REQUESTS = """
from vllm import PoolingParams, SamplingParams
from vllm.v1.request import Request
from kvstore.engine_adapter.vllm_identity import why_uncacheable

def why(**given):
    made = {
        "request_id": "r", "prompt_token_ids": [1, 2, 3], "pooling_params": None,
        "sampling_params": SamplingParams(max_tokens=1),
    }
    return why_uncacheable(Request(**made | given))

embeds = torch.zeros(3, 8)
tell({
    "tokens": why(),
    "embeds": why(prompt_token_ids=None, prompt_embeds=embeds),
    "both": why(prompt_embeds=embeds),
    "pooling": why(sampling_params=None, pooling_params=PoolingParams(task="embed")),
})
"""


def answer(script: str) -> Any:
    """What a script tells that vLLM's Python runs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    ran = subprocess.run(
        [PYTHON, "-c", HEAD + script], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    [line] = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))


def test_groups_of_layers_are_served_or_refused_with_one_line_that_says_the_way_out() -> None:
    found = answer(GROUPS)
    served = {name for name, problem in found.items() if not problem}
    assert served == {"full", "full and window, one group", "chunked and full, one group"}
    for name in ("full and window", "chunked and full"):
        assert "--disable-hybrid-kv-cache-manager" in found[name]
    assert "SlidingWindowSpec" in found["window"]
    assert "1 of 3 layers are state spaces" in found["state and full"]
    assert "state spaces" in found["state"]
    assert not any("\n" in problem for problem in found.values())


def test_requests_with_embeddings_or_for_pooling_pass_by() -> None:
    assert answer(REQUESTS) == {
        "tokens": "",
        "embeds": "prompt embeddings",
        "both": "prompt embeddings",
        "pooling": "a pooling request",
    }
