"""The one module that imports Triton; without it the kernels can't be launched, all else works.

Every launch says FP_OPTIONS: a fused multiply-add would round once where the reference and the CPU
round twice. TRITON_INTERPRET=1 in the environment makes all kernels run on CPU memory, in Python;
it is read when this module is imported. Wrappers do so with CPU tensors only in interpreted().
"""

from __future__ import annotations

import contextlib
import inspect
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the extra `triton` is not installed
    triton = None
    tl = None

__all__ = ["FP_OPTIONS", "INTERPRETED", "interpreted", "jit", "launches_on", "tl"]

FP_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
_launch_on_cpu: ContextVar[bool] = ContextVar("launch_on_cpu", default=False)


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit; the bare function, which nobody calls, when Triton is not installed.

    Arguments named `pages` or `tokens` change with every call: no variant is compiled for what
    divides them.
    """
    if triton is None:
        return function
    names = set(inspect.signature(function).parameters) & {"pages", "tokens"}
    return triton.jit(function, do_not_specialize=sorted(names))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Wrappers launch kernels for CPU tensors too, in Triton's interpreter: to show what they do.

    RuntimeError unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if not INTERPRETED:
        raise RuntimeError("kernels are not interpreted: set TRITON_INTERPRET=1, install triton")
    before = _launch_on_cpu.set(True)
    try:
        yield
    finally:
        _launch_on_cpu.reset(before)


def launches_on(device: torch.device, name: str) -> bool:
    """True for a GPU, False for the CPU; RuntimeError for a GPU when Triton is not installed."""
    if device.type == "cpu":
        return _launch_on_cpu.get()
    if triton is None:
        raise RuntimeError(f"{name}: memory on {device} needs Triton; pip install triton")
    return True
