"""F30: a container's 64 MB of /dev/shm is no limit on the arena."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from kvstore import CacheSpec, Store
import numpy as np
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
spec = CacheSpec.opaque("shm", page_tokens=4, page_bytes=1 << 20)
with Store.open(None, host_bytes="192MiB") as store, store.session(spec) as session:
    tokens = np.arange(4 * 150, dtype=np.int32)
    with session.reserve(tokens, deadline_s=30.0) as run:
        for number, view in enumerate(run.views()):
            view[:] = bytes([number]) * (1 << 20)
        assert run.commit().pages == 150, run.reason
    with session.match(tokens) as hit:
        assert [view[-1] for view in hit.views()] == list(range(150))
print("stored 150 MiB")
"""
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'


@pytest.mark.slow
def test_the_arena_is_not_bound_by_the_size_of_dev_shm() -> None:
    isolated = ["unshare", "--mount", "sh", "-c"]
    try:
        may = subprocess.run([*isolated, "true"], capture_output=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if may.returncode:
        pytest.skip("needs the right to make a mount namespace")
    done = subprocess.run(
        [*isolated, MOUNT, sys.executable, PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stored 150 MiB\n"
