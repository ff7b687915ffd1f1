"""The service demo: three engines, one server, which comes late and is killed in the middle.

    python -m kvstore.engine_adapter.demo_service [--model DIR] [--server-after 60]

The engines are processes of their own and are never restarted. Exits 0 only if all answers are
equal, every engine reused what another one had computed, went on without the server, and reused
again after its return. Must not be here: torch, or anything slow to import.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvstore.engine_adapter.demo_model import MODEL_NAME
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

ENGINES = 3
DIRECTORY = Path(".demo")
SERVER_AFTER_S = 60.0
PROMPT_TOKENS = 2000
HOST_BYTES_MIN = 512 << 20
# A session may hold a quarter of the arena in place: the prompt has to fit twice.
HOST_BYTES_A_PROMPT_BYTE = 8
FOUND_S_MAX = 1.0  # within which engines have to find a server that is there
START_S_MAX = 30.0
END_S_MAX = 15.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Engine:
    """A process with a model; see demo_service_worker.py."""

    def __init__(self, number: int, task: dict[str, Any], log: TextIO) -> None:
        self.name = f"engine {number}"
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvstore.engine_adapter.demo_service_worker", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def event(self) -> dict[str, Any]:
        """The next thing that it says; DemoError if that is bad news."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DemoError(f"{self.name} ended with {self._process.wait()}")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "failed":
            raise DemoError(f"{self.name}: {event['text']}")
        return event

    def answer(self, run: str) -> dict[str, Any]:
        """Have it answer the question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run": run}) + "\n")
        self._process.stdin.flush()
        return self.event() | {"engine": self.name}

    def end(self) -> None:
        """Let it go, or make it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Server:
    """`kvstore serve` on the demo's directory, started and killed as the story wants it."""

    def __init__(self, directory: Path, log: TextIO) -> None:
        self.directory = directory
        self.socket = directory / "kvstore.sock"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host_bytes: int) -> int:
        """Start it, wait until it listens; its process id."""
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(self.directory)]
        command.append(f"--host-bytes={host_bytes}")
        self.socket.unlink(missing_ok=True)  # what a killed one left, so that its return shows
        process = subprocess.Popen(command, stdout=self._log, stderr=self._log)  # noqa: S603
        self._process = process
        deadline = time.monotonic() + START_S_MAX
        while not self.socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"the server did not start: {process.poll()}")
            time.sleep(0.02)
        return process.pid

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """SIGTERM."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Demo:
    """The course of the demo, and what came out of it."""

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self.console = console
        self.options = options
        self.results: list[dict[str, Any]] = []

    def run(self, work: Path, model: Path, log: TextIO) -> None:
        """The whole story; DemoError when it does not come about."""
        server = Server(work / "store", log)
        task = {
            "model": str(model),
            "name": model.name if self.options.model else MODEL_NAME,
            "address": f"kvstore://unix:{server.socket}",
            "directory": str(work),
            "dtype": self.options.dtype,
            "prompt_tokens": self.options.prompt_tokens,
        }
        begun_s = time.monotonic()
        engines = [Engine(number, task, log) for number in range(1, ENGINES + 1)]
        try:
            self._play(engines, server, begun_s)
        finally:
            for engine in engines:
                engine.end()
            server.end()

    def _play(self, engines: Sequence[Engine], server: Server, begun_s: float) -> None:
        self._say(f"{ENGINES} engines start; there is no server.")
        loaded = [engine.event() for engine in engines]
        first = loaded[0]
        self._say(
            f"Loaded. Prompt: {first['prompt_tokens']:,} tokens "
            f"({format_bytes(first['prompt_bytes'])} of KV), then: {first['question']}"
        )
        self._ask(engines[0], "no server yet", wants_reuse=False)
        left_s = self.options.server_after - (time.monotonic() - begun_s)
        if left_s > 0:
            self._say(f"The server comes in {left_s:.0f} s, as if an operator had forgotten it.")
            time.sleep(left_s)
        host_bytes = max(HOST_BYTES_MIN, HOST_BYTES_A_PROMPT_BYTE * first["prompt_bytes"])
        pid = server.start(host_bytes)
        self._say(f"Server {pid} is up, {time.monotonic() - begun_s:.0f} s after the engines.")
        time.sleep(FOUND_S_MAX)
        self._ask(engines[0], "the first to store", wants_reuse=False)
        self._ask(engines[1], "reuses the first one's", wants_reuse=True)
        self._ask(engines[2], "reuses the first one's", wants_reuse=True)
        server.kill()
        self._say(f"kill -9 {pid}: the server is gone.")
        self._ask(engines[1], "server killed", wants_reuse=False)
        pid = server.start(host_bytes)
        self._say(f"Server {pid} is up on the same directory; the engines are as they were.")
        time.sleep(FOUND_S_MAX)
        for engine in engines:
            self._ask(engine, "server is back", wants_reuse=True)

    def _ask(self, engine: Engine, run: str, *, wants_reuse: bool) -> None:
        result = engine.answer(run) | {"wants_reuse": wants_reuse}
        self.results.append(result)
        tiers = ", ".join(result["tiers"])
        self._say(
            f"  {engine.name}, {run}: first token after {result['ttft_s']:.2f} s, "
            f"{result['reused_tokens']:,} tokens reused" + (f" from {tiers}" if tiers else "")
        )

    def problems(self) -> list[str]:
        """How the store broke its word; empty if it kept it."""
        found = []
        expected = self.results[0]["answer"] if self.results else []
        for result in self.results:
            who = f"{result['engine']}, {result['run']}"
            if result["answer"] != expected:
                found.append(f"{who}: the answer differs")
            if result["wants_reuse"] and not result["reused_tokens"]:
                found.append(f"{who}: nothing was reused")
            if not result["wants_reuse"] and result["reused_tokens"]:
                found.append(f"{who}: reused what nobody can have had")
            if result["failed"]:
                found.append(f"{who}: an exception reached the adapter")
        return found

    def table(self) -> Table:
        """The answers, one a line."""
        table = Table(title=f"One prompt, {ENGINES} engines, one server")
        for name in ("engine", "when"):
            table.add_column(name, no_wrap=True)
        for name in ("TTFT", "tokens\nreused"):
            table.add_column(name, justify="right")
        table.add_column("from\ntier")
        for result in self.results:
            table.add_row(
                result["engine"],
                result["run"],
                f"{result['ttft_s']:.2f} s",
                f"{result['reused_tokens']:,}",
                ", ".join(result["tiers"]) or "-",
                style="bold" if result["reused_tokens"] else "",
            )
        return table

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def own_model(log: TextIO) -> Path:
    """The demo's model, unpacked once."""
    directory = (DIRECTORY / "model").absolute()
    if not (directory / "config.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore.engine_adapter.demo_model", str(directory)]
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:  # noqa: S603
            raise DemoError("the model could not be unpacked")
    return directory


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="directory of another Hugging Face model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="at most so many")
    parser.add_argument(
        "--server-after",
        type=float,
        default=SERVER_AFTER_S,
        help="seconds from the engines' start to the server's (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json; name a model's directory")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if the store kept its word."""
    options = parse(arguments)
    console = Console()
    demo = Demo(console, options)
    work = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            demo.run(work, options.model.absolute() if options.model else own_model(log), log)
        except (DemoError, FileNotFoundError) as exc:
            console.print(f"demo-service: {exc}", style="bold red", markup=False)
            log.seek(0)
            console.print("".join(log.readlines()[-15:]), markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            shutil.rmtree(work, ignore_errors=True)
    console.print(demo.table())
    problems = demo.problems()
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}")
    if not problems:
        console.print(
            "[bold green]Same answers; shared, lost, found again; no engine restarted.[/]"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
