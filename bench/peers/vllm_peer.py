"""vLLM's prefix cache, as its scheduler asks it: hash the prompt's blocks, then look them up.

vLLM hashes a prompt once, when the request comes (Request.__init__ by its block hasher), and looks
the hashes up when the request is scheduled; both are needed before it knows a hit. Blocks of 16
tokens, full attention, all of vLLM's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from contract import IndexPeer
from vllm import __version__ as vllm_version
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

if TYPE_CHECKING:
    from contract import Tokens

BLOCK_TOKENS = 16
BLOCKS = 40_000


class Sha256(IndexPeer):
    """The default hash."""

    version = f"vllm {vllm_version}"
    hash_name = "sha256"

    def __init__(self) -> None:
        hash_function = get_hash_fn_by_name(self.hash_name)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        self.asked = 0

    def insert(self, tokens: Tokens) -> None:
        request = self._request(tokens.tolist())
        count = len(tokens) // BLOCK_TOKENS
        blocks = self.pool.get_new_blocks(count)
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK_TOKENS, 0)

    def prepare(self, tokens: Tokens) -> object:
        return tokens.tolist()

    def match(self, prompt: object) -> int:
        assert isinstance(prompt, list)
        request = self._request(prompt)
        _, tokens = FullAttentionManager.find_longest_cache_hit(
            request.block_hashes,
            len(prompt),
            [0],
            self.pool,
            self.spec,
            drop_eagle_block=False,
            alignment_tokens=BLOCK_TOKENS,
        )
        return int(tokens)

    def _request(self, tokens: list[int]) -> Request:
        self.asked += 1
        return Request(
            str(self.asked), tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher
        )


class XxHash(Sha256):
    """Its fast hash, which is not safe against collisions that are made on purpose."""

    hash_name = "xxhash"
