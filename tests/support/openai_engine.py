"""A small engine in a process of its own: a model of transformers behind OpenAI's completions API.

    python openai_engine.py MODEL_DIRECTORY STORE

Its adapter loads from and saves to the store, each prompt before it answers, and `cached_tokens` is
what the adapter reused. Says its port on stdout; ends with its stdin.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

PAGE_TOKENS = 8


class EngineProcess:
    """The client's side: start it, ask it, end it. Use it in a `with` statement."""

    def __init__(self, model: Path, store: str) -> None:
        command = [sys.executable, __file__, str(model), store]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline() or b"0")
        assert self.port, "the engine did not start"
        self.url = f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: str) -> dict[str, Any]:
        """The usage that it reports."""
        link = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            link.request("POST", "/v1/completions", json.dumps(body))
            found: dict[str, Any] = json.loads(link.getresponse().read())["usage"]
            return found
        finally:
            link.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate(timeout=30)


class Engine(HTTPServer):
    """One request at a time, as one model computes."""

    def __init__(self, model: str, store: str) -> None:
        import torch
        import transformers

        from kvstore.engine_adapter.transformers_adapter import TransformersAdapter

        torch.set_num_threads(1)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        self.adapter = TransformersAdapter(store, loaded, page_tokens=PAGE_TOKENS)
        super().__init__(("127.0.0.1", 0), Handler)

    def usage(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        """Run a prompt through the model; what the answer counts."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        cache = self.adapter.cache(ids)
        output = self.adapter.model.generate(
            ids, **cache.arguments(), max_new_tokens=new_tokens, do_sample=False
        )
        cache.save(output, durable=True)
        return {
            "prompt_tokens": ids.shape[1],
            "completion_tokens": output.shape[1] - ids.shape[1],
            "prompt_tokens_details": {"cached_tokens": cache.reused_tokens[0]},
        }


class Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"
    timeout = 1.0  # an idle connection makes room for the next

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = self.server.usage(asked["prompt"], asked["max_tokens"])
        self.reply({"choices": [{"text": "x"}], "usage": usage})

    def reply(self, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *parts: object) -> None:
        """Nothing on stderr."""


def main() -> None:
    engine = Engine(*sys.argv[1:3])
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    sys.stdout.write(f"{engine.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    engine.shutdown()
    engine.adapter.close()


if __name__ == "__main__":
    main()
