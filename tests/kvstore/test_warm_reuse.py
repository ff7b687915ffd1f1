"""`kvstore warm` through a real engine: what it ran is found by the engines that ask after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from command import run_json
from openai_engine import PAGE_TOKENS, EngineProcess
from server_process import ServerProcess
from tiny_model import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.model]

SHARED = "You are the assistant of a bicycle shop. Answer in two sentences. Customer: "
ASKED = SHARED + "my chain slips when I go uphill, is it worn or badly set?"


def test_a_warmed_prompt_is_reused_by_an_engine_that_starts_after_it(tmp_path: Path) -> None:
    """Three processes besides the test: a server, the engine that is warmed, and a later one that
    has nothing but the store."""
    tiny_model(tmp_path / "model")
    file = tmp_path / "prompts.txt"
    file.write_text(SHARED + "\n")
    whole = len(SHARED) // PAGE_TOKENS * PAGE_TOKENS
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        with EngineProcess(tmp_path / "model", server.address) as engine:
            cold = run_json("warm", engine.url, str(file), "--store", str(server.directory))
            assert (cold["done"], cold["errors"], cold["prompt_tokens"]) == (1, 0, len(SHARED))
            assert (cold["reused_tokens"], cold["computed_tokens"]) == (0, len(SHARED))
            assert cold["stored_pages"] >= whole // PAGE_TOKENS
        with EngineProcess(tmp_path / "model", server.address) as engine:
            used = engine.complete(ASKED)
            assert used["prompt_tokens"] == len(ASKED)
            reused = used["prompt_tokens_details"]["cached_tokens"]
            assert whole <= reused <= len(SHARED)
            apart = engine.complete("z" + ASKED)
            assert apart["prompt_tokens_details"]["cached_tokens"] == 0
            again = run_json("warm", engine.url, str(file), "--store", str(server.directory))
            assert again["reused_tokens"] > 0
            assert again["reused_tokens"] + again["computed_tokens"] == len(SHARED)
            assert again["stored_pages"] == 0
        assert server.terminate() == 0
