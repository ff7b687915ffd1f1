"""SGLang's radix trees alone (RadixCache and the Rust core of its wheel), without the engine.

The tree needs a few of SGLang's own modules; what those import beside (torch, kernels, memory
pools, metrics) is never called here, so empty modules stand in for it and nothing else has to be
installed. Page size 16; the prompt is an array("q"), the form that its scheduler gives it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from array import array
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from contract import IndexPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract import Tokens

PAGE_TOKENS = 16
# What is SGLang's own code here; all else is an empty module.
OWN = {
    f"sglang.srt.mem_cache.{name}"
    for name in ("radix_cache", "base_prefix_cache", "cache_init_params", "evict_policy", "utils")
}


class _Anything:
    """Stands where a class or a function is imported and never used."""

    def __init__(self, *args: object, **named: object) -> None:
        pass

    def __call__(self, *args: object, **named: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return _Anything()


class _EmptyModule(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder:
    """Finds SGLang's few modules where they lie, and empty ones for the rest of what they name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in OWN:
            file = self.root.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in ("sglang", "torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "sglang.srt.utils.common":
            module.ceil_align = lambda value, step: -(-value // step) * step  # type: ignore[attr-defined]


def _tree_module() -> Any:
    [root] = [Path(folder) for folder in sys.path if (Path(folder) / "sglang" / "srt").is_dir()]
    sys.meta_path.insert(0, _Finder(root))  # type: ignore[arg-type]
    return importlib.import_module("sglang.srt.mem_cache.radix_cache")


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the KV of tokens would lie: a tensor of indexes in SGLang, their range here."""

    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, part: slice) -> Slots:
        return Slots(self.numbers[part])

    def clone(self) -> Slots:
        return self


class Tree(IndexPeer):
    """RadixCache.match_prefix."""

    version = f"sglang {version('sglang')}"

    def __init__(self) -> None:
        self.module = _tree_module()
        self.tree = self.module.RadixCache.create_simulated(page_size=PAGE_TOKENS)

    def insert(self, tokens: Tokens) -> None:
        key = self.module.RadixKey(array("q", tokens.tolist()))
        value = Slots(range(len(tokens)))
        self.tree.insert(self.module.InsertParams(key=key, value=value))

    def prepare(self, tokens: Tokens) -> object:
        return array("q", tokens.tolist())

    def match(self, prompt: object) -> int:
        key = self.module.RadixKey(prompt)
        result = self.tree.match_prefix(self.module.MatchPrefixParams(key=key))
        return int(result.device_prefix_len)


class RustTree(IndexPeer):
    """match_prefix of the Rust core, called as its adapter in Python does, without that adapter."""

    version = Tree.version

    def __init__(self) -> None:
        import torch  # its libraries have to be there before the core's

        self.torch = torch
        [folder] = [Path(each) for each in sys.path if (Path(each) / "sglang" / "srt").is_dir()]
        files = [*(folder / "sglang/srt/mem_cache/rust_tree_core").glob("mem_cache.*.so")]
        if not files:
            raise RuntimeError("this wheel of SGLang brings no Rust tree core (mem_cache.*.so)")
        spec = importlib.util.spec_from_file_location("mem_cache", files[0])
        assert spec is not None
        assert spec.loader is not None
        self.core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.core)
        settings = self.core.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            slru_protected_threshold=2,
            tlru_tail_budget=0,
            tlru_float_config=None,
            page_size=PAGE_TOKENS,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            swa_req_ring=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            mamba_cache_chunk_size=None,
            mamba_max_states_per_path=None,
        )
        full_attention = 0
        self.tree = self.core.RustUnifiedTreeCoreBinding(settings, [full_attention])

    def insert(self, tokens: Tokens) -> None:
        value = self.torch.arange(len(tokens), dtype=self.torch.int64)
        key = array("q", tokens.tolist())
        self.tree.insert(
            self.core.InsertParamsBinding(
                key=key,
                value=value,
                extra_key=None,
                cache_salt=None,
                session_id=None,
                mamba_value=None,
                prev_prefix_len=0,
                swa_evicted_seqlen=0,
                swa_branching_seqlen=None,
                inserted_len=0,
                priority=0,
                track_adopted_ranges=False,
                rotation_base=None,
            )
        )

    def prepare(self, tokens: Tokens) -> object:
        return array("q", tokens.tolist())

    def match(self, prompt: object) -> int:
        asked = self.core.MatchParamsBinding(key=prompt, extra_key=None, cache_salt=None)
        return int(self.tree.match_prefix(asked).device_prefix_len)
