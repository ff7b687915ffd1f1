"""`kvstore warm` through the real process, against a small real server of the OpenAI API."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from command import run, run_json, shape
from known_pages import PAGE_TOKENS, SPEC, save
from server_process import ServerProcess

from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.warming import ERRORS_IN_A_ROW_MAX, requests_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


class FakeEngine(ThreadingHTTPServer):
    """Answers completions as an engine does, one token a character, and remembers prompts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, Any], str]] = []
        self.models = ["tiny"]
        self.says_cached = True
        self.key = ""
        self.answer_all = threading.Event()
        self.answer_all.set()
        self.session: Any = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["messages"][0]["content"]
        known = [each for _, before, _ in engine.seen if (each := before.get("prompt")) == prompt]
        engine.seen.append((self.path, body, self.headers.get("Authorization", "")))
        engine.answer_all.wait(30.0)
        if prompt == "boom":
            self.reply(500, {"error": "the engine has no room"})
            return
        if engine.session is not None:
            tokens = [ord(each) for each in prompt][: len(prompt) // PAGE_TOKENS * PAGE_TOKENS]
            save(engine.session, np.array(tokens, np.int32))
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        if engine.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) if known else 0}
        self.reply(200, {"choices": [{"text": "x"}], "usage": usage})

    def reply(self, status: int, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *parts: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.answer_all.set()
    made.shutdown()
    made.server_close()


WARMING = {
    **dict.fromkeys(("prompts", "done", "errors", "prompt_tokens", "reused_tokens"), "int"),
    **dict.fromkeys(("counted", "computed_tokens"), "int"),
    **dict.fromkeys(("stopped", "interrupted"), "bool"),
    "first_errors": [],
    "seconds": "float",
    "stored_pages": "NoneType",
}


def test_each_line_is_one_request_and_the_summary_adds_up(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello world\n\nhello world\nanother one\n")
    done = run_json("warm", engine.url, str(file), "--concurrency", "1")
    assert shape(done) == WARMING
    assert (done["prompts"], done["done"], done["errors"], done["prompt_tokens"]) == (3, 3, 0, 33)
    assert (done["reused_tokens"], done["computed_tokens"]) == (11, 22)
    bodies = [body for _, body, _ in engine.seen]
    assert [body["prompt"] for body in bodies] == ["hello world", "hello world", "another one"]
    assert {(body["model"], body["max_tokens"]) for body in bodies} == {("tiny", 1)}
    said = run("warm", f"{engine.url}/v1/", "-", stdin=b"fresh")
    assert "1 of 1 prompts, 5 tokens in " in said
    assert "0 tokens were in a cache already, 5 were computed." in said


def test_jsonl_carries_ids_messages_and_other_fields(engine: FakeEngine, tmp_path: Path) -> None:
    lines = [
        {"prompt": [1, 2, 3], "cache_salt": "s", "max_tokens": 500},
        {"messages": [{"role": "user", "content": "hi\u2028there"}]},
        [4, 5],
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    done = run_json("warm", engine.url, str(file), "--concurrency", "1", "--model", "other")
    assert done["done"] == 3
    assert [path for path, _, _ in engine.seen] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions",
    ]
    first = engine.seen[0][1]
    assert (first["cache_salt"], first["max_tokens"], first["model"]) == ("s", 1, "other")


def test_errors_are_counted_and_the_rest_is_done(engine: FakeEngine, tmp_path: Path) -> None:
    engine.says_cached = False
    file = tmp_path / "prompts.txt"
    file.write_text("one\nboom\ntwo\n")
    done = run_json("warm", engine.url, str(file), code=1)
    assert (done["done"], done["errors"], done["stopped"]) == (2, 1, False)
    assert (done["reused_tokens"], done["computed_tokens"]) == (None, None)
    assert "status 500" in done["first_errors"][0]
    assert "no room" in done["first_errors"][0]
    file.write_text("boom\n" * 3 * ERRORS_IN_A_ROW_MAX)
    done = run_json("warm", engine.url, str(file), "--concurrency", "1", code=1)
    assert done["stopped"]
    assert done["errors"] < 2 * ERRORS_IN_A_ROW_MAX


def test_what_makes_no_sense_is_refused_before_anything_is_sent(
    engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert "line 2: not JSON" in run("warm", engine.url, str(file), code=1)
    file.write_text('{"text": "fine"}\n')
    assert 'line 1: an object with "prompt"' in run("warm", engine.url, str(file), code=1)
    file.write_text("\n\n")
    assert "no prompt in it" in run("warm", engine.url, str(file), code=1)
    file.write_text('"fine"\n')
    assert "http://HOST:PORT" in run("warm", "localhost:8000", str(file), code=1)
    engine.models = ["a", "b"]
    assert "serves 2 models" in run("warm", engine.url, str(file), code=1)
    engine.shutdown()
    engine.server_close()
    said = run("warm", engine.url, str(file), code=1)
    assert "no engine answers there: Connection refused" in said
    assert "Traceback" not in said
    assert engine.seen == []


def test_a_key_comes_from_a_private_file_only(engine: FakeEngine, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame-sesame\n")
    key.chmod(0o644)
    given = ("warm", engine.url, "-", "--api-key-file", str(key))
    assert "key" in run(*given, code=1, stdin=b"one")
    key.chmod(0o600)
    run(*given, stdin=b"one")
    assert engine.seen[-1][2] == "Bearer sesame-sesame"


def test_ctrl_c_gives_the_summary_so_far_and_130(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(50)))
    engine.answer_all.clear()
    command = [sys.executable, "-m", "kvstore.cli", "warm", engine.url, str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not engine.seen:
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 130
    done = json.loads(out)
    assert (done["interrupted"], done["done"]) == (True, 0)
    assert b"Traceback" not in err


def test_it_says_how_many_pages_the_store_took(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abcdefgh\nabcdefgh\nabcdXYZ\n")
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        with connect(server.address, lookup_deadline_s=5.0) as store:
            engine.session = store.session(SPEC)
            given = ("--concurrency", "1", "--store", str(tmp_path / "store"))
            done = run_json("warm", engine.url, str(file), *given)
            assert done["stored_pages"] == 2, "two pages; the third prompt's first is one of them"
            assert "0 pages came to the store" in run("warm", engine.url, str(file), *given)
    assert "no server holds it" in run("warm", engine.url, str(file), *given, code=1)


def test_lines_of_a_file_are_prompts_as_they_stand() -> None:
    assert requests_of('{"a": 1}\n', "f", is_jsonl=False) == [{"prompt": '{"a": 1}'}]
    with pytest.raises(InvalidRequest, match="line 1"):
        requests_of("[]\n", "f", is_jsonl=True)
