"""How malloc behaves here: few heaps, and large buffers that are used again. Only glibc listens.

Buffers. malloc gives one of more than 128 KiB memory of its own and unmaps it at the end, so that
each message with a long prompt paid for 128 page faults per copy of its tokens: look-ups of 128 Ki
tokens took 2.4 ms instead of 1.4. But glibc learns: once such a buffer has been freed, ones up to
its size stay on the heap. So one is, here, before the first message.

Heaps. Up to eight a core share out a process's threads, and each keeps its own holes: with 64 busy
clients the server's private memory went on growing for minutes.
"""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

from kvstore.wire import CONTROL_BYTES_MAX

LARGEST_BYTES = 2 * CONTROL_BYTES_MAX
HEAPS_MAX = 2

_M_ARENA_MAX = -8  # of mallopt


def reuse_large_buffers() -> None:
    """Have freed buffers of up to LARGEST_BYTES used again, and twice as much of free heap kept."""
    np.empty(LARGEST_BYTES, np.uint8)  # never touched, and freed at once


def limit_heaps() -> None:
    """For a process that is all ours, before it starts threads."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, HEAPS_MAX)
