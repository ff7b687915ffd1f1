"""Kernels run in Triton's interpreter here, on CPU memory; Triton reads this when it is imported.

TRITON_INTERPRET=0 in the environment compiles them instead, for the tests that need a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
