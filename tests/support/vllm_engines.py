"""Real vLLM engines for tests, in the Python that TEST_VLLM_PYTHON names (make test-vllm)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvstore.client import ServerUnavailable
from kvstore.connect import connect
from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")
MODEL = Path(os.environ.get("TEST_VLLM_MODEL", ROOT / ".demo" / "model"))
# As released: TEST_VLLM_PROMPTS=100, which takes long.
PROMPTS = int(os.environ.get("TEST_VLLM_PROMPTS", "12"))
ABORTS = int(os.environ.get("TEST_VLLM_ABORTS", "1000"))
BLOCK = 128
SMALL_BLOCK = 32  # the smallest of the CPU backend: short prompts have whole pages, too
CLEAR_MARGIN = 0.25  # of log probability; below it, rounding may choose the other token
SERVER_FLAGS = ("--host-bytes=768MiB", "--disk-bytes=2GiB")

needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="NO VLLM: set TEST_VLLM_PYTHON, or run make test-vllm"
)


def ready_model() -> Path:
    """The model of the tests, made once."""
    if not (MODEL / "config.json").exists():
        MODEL.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore.engine_adapter.demo_model", str(MODEL)]
        subprocess.run(command, check=True, cwd=ROOT)
    return MODEL


@contextlib.contextmanager
def engine(
    store: str | None, log: Path, *, wait: bool = True, **settings: Any
) -> Iterator[VllmEngine]:
    """A fresh engine that is ready; `settings` are vLLM's, but for `extra`, the connector's.

    store: None makes one without a connector. wait: without it, it is starting, and wait_ready()
    is up to you.
    """
    model = settings.pop("model", None) or ready_model()
    more = settings.pop("extra", {})
    extra = None if store is None else {"store": store, "load": "always"} | more
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(ROOT)
    # Threads of one process that wait for each other stand still where others want the cores too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with (
            open(log, "a", encoding="utf-8") as written,
            VllmEngine(model, written, extra_config=extra, python=PYTHON, **settings) as made,
        ):
            yield made.wait_ready() if wait else made
    finally:
        os.environ.clear()
        os.environ.update(before)


def prompts(
    count: int,
    seed: int,
    *,
    tokens: int = 2 * BLOCK + 40,
    shared: int = BLOCK,
    period: int | None = None,
) -> list[list[int]]:
    """Prompts of random words, the first `shared` tokens common to four of them each.

    period: after those, words repeat themselves, for speculation to guess.
    """
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        if number % 4 == 0:
            first = rng.integers(1000, 40_000, shared).tolist()
        own = rng.integers(1000, 40_000, period or tokens - shared).tolist()
        own = (own * (tokens // len(own) + 1))[: tokens - shared]
        found.append([*first, *own])
    return found


def ask(tokens: list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A request as VllmEngine.run() takes it."""
    return {"tokens": tokens, "max_tokens": max_tokens, **more}


def local(tokens: list[int], max_tokens: int = 4) -> dict[str, Any]:
    """The same, answered without the store."""
    return ask(tokens, max_tokens, params={"kvstore": {"load": False, "store": False}})


def clear(answer: dict[str, Any]) -> bool:
    """Whether its first token was no close call."""
    return bool(answer["margins"][0] >= CLEAR_MARGIN)


def say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """Print what was measured, in a run that passes, too."""
    with capsys.disabled():
        sys.stdout.write(f"\n{line}\n")


def lines_with(log: Path, *parts: str) -> list[str]:
    """What an engine or a server said that has all these parts."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if all(part in line for part in parts)]


def same_answer(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal tokens as far as the choice was clear: chunks of other sizes round differently."""
    for mine, theirs, margin in zip(
        answer["tokens"], expected["tokens"], expected["margins"], strict=True
    ):
        if margin < CLEAR_MARGIN:
            return True
        if mine != theirs:
            return False
    return True


def store_document(address: str) -> dict[str, Any]:
    """What the server counts; {} while none answers."""
    with connect(address, open_wait_s=0.0) as store:
        try:
            document: dict[str, Any] = store.stats().to_dict()
        except ServerUnavailable:
            return {}
        return document


def wait_store(address: str, condition: Any, wait_s: float = 60.0) -> dict[str, Any]:
    """Until the server says so."""
    deadline = time.monotonic() + wait_s
    while True:
        document = store_document(address)
        if document and condition(document):
            return document
        assert time.monotonic() < deadline, document
        time.sleep(0.1)
