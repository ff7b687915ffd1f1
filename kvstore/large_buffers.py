"""Buffers of a few megabytes come from the heap again and again, and not fresh from the system.

malloc gives a buffer of more than 128 KiB memory of its own and unmaps it at the end, so that each
message with a long prompt paid for 128 page faults per copy of its tokens: look-ups of 128 Ki
tokens took 2.4 ms instead of 1.4. But glibc learns: once such a buffer has been freed, ones up to
its size stay on the heap. So one is, here, before the first message. Other C libraries ignore it.
"""

from __future__ import annotations

import numpy as np

from kvstore.wire import CONTROL_BYTES_MAX

LARGEST_BYTES = 2 * CONTROL_BYTES_MAX


def reuse_large_buffers() -> None:
    """Have freed buffers of up to LARGEST_BYTES used again, and twice as much of free heap kept."""
    np.empty(LARGEST_BYTES, np.uint8)  # never touched, and freed at once
