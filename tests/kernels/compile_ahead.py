"""Compiles every kernel ahead of time for GPUs that need not be there; prints what each one uses.

One JSON line a kernel and target: registers and shared memory, as the assembler counts them, and
whether 16-byte memory accesses were made. Run by test_compile_ahead.py in a process of its own,
because Triton decides at import whether it interprets.

    TRITON_INTERPRET=0 python tests/kernels/compile_ahead.py [TARGET ...]      say "cuda 90"
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore.kernels.gather import WORDS_A_PROGRAM, copy_kernel
from kvstore.kernels.jit import FP_OPTIONS
from kvstore.kernels.quantize_fp8 import TILE_TOKENS, dequantize_fp8_kernel, quantize_fp8_kernel
from kvstore.kernels.quantize_int import dequantize_kernel, quantize_kernel
from kvstore.kernels.rope import rotate_kernel

TARGETS = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "cuda 100": GPUTarget("cuda", 100, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}
# Llama-3-8B: 32 layers, 8 heads of 128, blocks of 16 tokens; and SmolLM2: 3 heads of 64.
COPY: dict[str, Any] = {"PLANES": 64, "BLOCKS_A_PAGE": 2, "HEADS": 8, "TOKENS": 16, "WORDS": 32}
COPY |= {"ALIGNED": True, "BLOCK": WORDS_A_PROGRAM, "WORD": tl.int64}
GATHER = COPY | {"TO_PAGES": True}
# vLLM's blocks, moved whole: K and V of 16 tokens as one row.
WHOLE = COPY | {"PLANES": 32, "HEADS": 1, "TOKENS": 1, "WORDS": 8192, "HEADS_FIRST": True}
TILES: dict[str, Any] = {"PLANES": 64, "HEADS": 8, "PAGE_TOKENS": 32, "BLOCK_TOKENS": 16}
TILES |= {"DIM": 128, "DIM_PADDED": 128}
GROUPS = TILES | {"KINDS": 2, "GROUP": 32, "CHANNELS": 32}
ROPE: dict[str, Any] = {"FIRST": 0, "KINDS": 2, "PLANES": 64, "BLOCK_TOKENS": 16}
ROPE |= {"TOKENS_PADDED": 16, "PAIRS": 64, "PAIRS_PADDED": 64}
NUMBERS = {0: tl.uint16, 1: tl.uint16, 2: tl.uint32}

CASES: list[tuple[str, Any, dict[str, Any]]] = [
    *(
        (
            f"{name} {order}",
            copy_kernel,
            COPY | {"HEADS_FIRST": order == "hnd", "TO_PAGES": to_pages},
        )
        for name, to_pages in (("gather", True), ("scatter", False))
        for order in ("hnd", "nhd")
    ),
    *(
        (f"{name} whole blocks", copy_kernel, WHOLE | {"TO_PAGES": to_pages})
        for name, to_pages in (("gather", True), ("scatter", False))
    ),
    (
        "gather bytes",
        copy_kernel,
        GATHER | {"HEADS_FIRST": True, "ALIGNED": False, "WORD": tl.int8},
    ),
    *(
        (f"{name} int{bits} {kind}", kernel, GROUPS | {"BITS": bits, "KIND": kind, "WORD": word})
        for name, kernel in (("quantize", quantize_kernel), ("dequantize", dequantize_kernel))
        for bits in (8, 4)
        for kind, word in NUMBERS.items()
    ),
    (
        "quantize latent",
        quantize_kernel,
        GROUPS
        | {"KINDS": 1, "HEADS": 1, "DIM": 576, "DIM_PADDED": 1024, "BITS": 8, "KIND": 0}
        | {"WORD": tl.uint16},
    ),
    *(
        (f"{name} fp8 {kind}", kernel, TILES | {"TILE": TILE_TOKENS, "KIND": kind, "WORD": word})
        for name, kernel in (
            ("quantize", quantize_fp8_kernel),
            ("dequantize", dequantize_fp8_kernel),
        )
        for kind, word in NUMBERS.items()
    ),
    *(
        (
            f"rotate {name} {kind}",
            rotate_kernel,
            ROPE | {"INTERLEAVED": pairs, "KIND": kind, "WORD": word},
        )
        for name, pairs in (("halves", False), ("interleaved", True))
        for kind, word in NUMBERS.items()
    ),
]


def main() -> None:
    """Compile all, or all for the targets that are named; one line each, in a fixed order."""
    for target in sys.argv[1:] or TARGETS:
        for name, kernel, constants in CASES:
            line = {"target": target, "kernel": name}
            print(json.dumps(line | compiled(kernel, constants, TARGETS[target])), flush=True)


def compiled(kernel: Any, constants: dict[str, Any], target: GPUTarget) -> dict[str, object]:
    """What the kernel uses on the target; `error` if it does not compile."""
    kinds = {"addresses": "*i64", "cosines": "*fp32", "sines": "*fp32"}
    wide = {"stride_block": "i64", "scales_at": "i64", "minima_at": "i64"}
    signature = {
        name: "constexpr" if name in constants else (kinds | wide).get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]  # what a launch says of strides that 16 divides
    attributes = {
        (at,): aligned for at, name in enumerate(kernel.arg_names) if name.startswith("stride_")
    }
    warps = 16 if constants.get("DIM_PADDED", 0) > 256 else 4
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    try:
        binary = triton.compile(source, target=target, options=FP_OPTIONS | {"num_warps": warps})
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        [registers] = re.findall(r"\.vgpr_count:\s+(\d+)", text)
        wide_access = "dwordx4" in text
    else:
        registers = cuda_registers(binary.asm["cubin"])
        wide_access = bool(re.search(r"\.(v4\.b32|v2\.b64)", binary.asm["ptx"]))
    return {
        "registers": int(registers),
        "shared_bytes": binary.metadata.shared,
        "wide": wide_access,
    }


def cuda_registers(cubin: bytes) -> int:
    """Registers a thread, as the tool that comes with Triton reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    [registers] = re.findall(r"REG:(\d+)", done.stdout)
    return int(registers)


if __name__ == "__main__":
    main()
