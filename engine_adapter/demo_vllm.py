"""The vLLM demo: two fresh engine processes, one after the other, and a server killed between.

    python -m kvstore.engine_adapter.demo_vllm [--model DIR] [--prompt-tokens 3000]

The first engine computes a prompt, and answers it again from vLLM's own prefix cache. The second
one has never seen it, and takes it from the store: from memory, then, after kill -9 of the server,
from disk. Exits 0 only if the warm answers are equal and came from where the table says. Must not
be here: vLLM, torch, or anything slow to import.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pydoc_data.topics
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvstore.client import ServerUnavailable
from kvstore.connect import connect
from kvstore.engine_adapter.demo_vllm_engine import EngineError, VllmEngine
from kvstore.shared_memory import UCRED

if TYPE_CHECKING:
    from typing import TextIO

DIRECTORY = Path(".demo")
PROMPT_TOKENS = 3000
WARM_UP_TOKENS = 300
NEW_TOKENS = 12
QUESTION = "\n\nIn one sentence, what is a Python dictionary?\n"
HOST_BYTES, DISK_BYTES = 1 << 30, 2 << 30
KEPT_S_MAX = 60.0  # within which what was saved has to be on disk
BACK_S_MAX = 30.0  # within which a new server has to serve what the killed one had
FOUND_S = 2.0  # more than engines need to find it
COLD, OWN, HOST, DISK = "cold", "vLLM's prefix cache", "fresh engine, host", "fresh engine, disk"


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer to the prompt."""

    name: str
    engine: str
    ttft_s: float
    cached_tokens: int
    tokens: list[int]
    logprobs: list[float]


class Demo:
    """The course of the demo, and what came out of it."""

    def __init__(self, console: Console, prompt: list[int], store: Path) -> None:
        self.console = console
        self.prompt = prompt
        self.store = store
        self.runs: list[Run] = []

    def play(self, model: Path, log: TextIO) -> None:
        """Both engines; DemoError or EngineError when it does not come about."""
        settings = {
            "store": str(self.store),
            "load": "always",
            "host_bytes": HOST_BYTES,
            "disk_bytes": DISK_BYTES,
        }
        self._say(f"Engine 1 starts; the store {self.store.name} is empty.")
        with VllmEngine(model, log, extra_config=settings) as engine:
            self._warm_up(engine.wait_ready())
            self._ask(engine, COLD, "1")
            self._ask(engine, OWN, "1")
            pages = self._wait_kept()
        self._say(f"Engine 1 is gone; {pages} pages are on disk. Engine 2 starts.")
        with VllmEngine(model, log, extra_config=settings) as engine:
            self._warm_up(engine.wait_ready())
            self._ask(engine, HOST, "2")
            if not engine.reset():
                raise DemoError("vLLM's prefix cache could not be emptied")
            self._kill_server()
            self._ask(engine, DISK, "2")

    def problems(self) -> list[str]:
        """How the store broke its word; empty if it kept it."""
        by_name = {run.name: run for run in self.runs}
        own = by_name[OWN]
        found = []
        for run in (by_name[HOST], by_name[DISK]):
            if run.tokens != own.tokens:
                found.append(f"{run.name}: the answer differs from that of vLLM's prefix cache")
            elif run.cached_tokens == own.cached_tokens and run.logprobs != own.logprobs:
                found.append(f"{run.name}: equal tokens, other probabilities, same boundary")
            if run.cached_tokens < own.cached_tokens:
                found.append(
                    f"{run.name}: {run.cached_tokens} tokens reused, {own.cached_tokens} expected"
                )
        if by_name[COLD].cached_tokens:
            found.append("cold: it was not")
        return found

    def table(self) -> Table:
        """The runs, one a line."""
        cold = next(run for run in self.runs if run.name == COLD)
        own = next(run for run in self.runs if run.name == OWN)
        table = Table(title=f"Time to first token, one prompt of {len(self.prompt):,} tokens, vLLM")
        table.add_column("run", no_wrap=True)
        for name in ("engine", "TTFT", "of cold", "tokens\nreused"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("same answer")
        for run in self.runs:
            table.add_row(
                run.name,
                run.engine,
                f"{run.ttft_s:.3f} s",
                f"{run.ttft_s / cold.ttft_s:.3f}",
                f"{run.cached_tokens:,}",
                "yes" if run.tokens == own.tokens else "no",
                style="bold" if run.name in (HOST, DISK) else "",
            )
        return table

    def _warm_up(self, engine: VllmEngine) -> None:
        """The first tokens of a process are slow whatever they are."""
        other = self.prompt[::-1][:WARM_UP_TOKENS]
        engine.run([{"tokens": other, "max_tokens": 4, "params": {"kvstore": {"store": False}}}])

    def _ask(self, engine: VllmEngine, name: str, which: str) -> None:
        [answer] = engine.run([{"tokens": self.prompt, "max_tokens": NEW_TOKENS}])
        if "tokens" not in answer:
            raise DemoError(f"{name}: the engine gave no answer")
        run = Run(
            name,
            which,
            answer["ttft_s"],
            answer["cached_tokens"],
            answer["tokens"],
            answer["logprobs"],
        )
        self.runs.append(run)
        self._say(
            f"  {name}: first token after {run.ttft_s:.3f} s, {run.cached_tokens:,} tokens reused"
        )

    def _wait_kept(self) -> int:
        """Until all that was saved is on disk; how many pages."""
        document = self._wait_for(
            lambda found: found["pages"] > 0 and not found["dirty_bytes"], KEPT_S_MAX
        )
        return int(document["pages"])

    def _kill_server(self) -> None:
        pid = server_pid(self.store / "kvstore.sock")
        os.kill(pid, signal.SIGKILL)
        self._say(f"kill -9 {pid}: the server is gone, and with it what it had in memory.")
        begun_s = time.monotonic()
        while _exists(pid):
            time.sleep(0.01)
        self._wait_for(lambda found: found["warm"] and found["pages"] > 0, BACK_S_MAX)
        self._say(
            f"A new server is up {time.monotonic() - begun_s:.1f} s later; the engine is as it was."
        )
        time.sleep(FOUND_S)

    def _wait_for(self, condition: Any, wait_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + wait_s
        with connect(self.store, open_wait_s=0.0) as store:
            while True:
                document: dict[str, Any] = {}
                with contextlib.suppress(ServerUnavailable):
                    document = store.stats().to_dict()
                if document and condition(document):
                    return document
                if time.monotonic() > deadline:
                    raise DemoError(f"the store is not where it should be: {document}")
                time.sleep(0.1)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def server_pid(path: Path) -> int:
    """Who listens on a server's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(str(path))
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    return int(UCRED.unpack(raw)[0])


def _exists(pid: int) -> bool:
    """Also while it is only waited for by its parent: then its end is not over."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def long_prompt(model: Path, tokens: int) -> list[int]:
    """Token ids of a long text that ships with Python, its manual, and a question."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n".join(pydoc_data.topics.topics.values())
    question: list[int] = tokenizer.encode(QUESTION).ids
    manual: list[int] = tokenizer.encode(text[: 12 * tokens]).ids
    if len(manual) + len(question) < tokens:
        raise DemoError(f"--prompt-tokens: the text has only {len(manual)} tokens")
    return manual[: tokens - len(question)] + question


def own_model(log: TextIO) -> Path:
    """The demo's model, unpacked once."""
    directory = (DIRECTORY / "model").absolute()
    if not (directory / "config.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore.engine_adapter.demo_model", str(directory)]
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:  # noqa: S603
            raise DemoError("the model could not be unpacked; name one with --model DIR")
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if the store kept its word."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="directory of another Hugging Face model")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    options = parser.parse_args(arguments)
    console = Console()
    if util.find_spec("vllm") is None:
        console.print("demo-vllm: vLLM is not installed here; say: make demo-vllm", style="red")
        return 2
    work = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            model = options.model.absolute() if options.model else own_model(log)
            demo = Demo(console, long_prompt(model, options.prompt_tokens), work / "store")
            demo.play(model, log)
        except (DemoError, EngineError, OSError) as exc:
            console.print(f"demo-vllm: {exc}", style="bold red", markup=False)
            log.seek(0)
            console.print("".join(log.readlines()[-25:]), markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            _end_server(work / "store" / "kvstore.sock")
            shutil.rmtree(work, ignore_errors=True)
    console.print(demo.table())
    problems = demo.problems()
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}")
    if not problems:
        console.print("[bold green]Same answers, from another process, and after kill -9.[/]")
    return 1 if problems else 0


def _end_server(path: Path) -> None:
    """The private server would outlive its engines by a minute."""
    with contextlib.suppress(OSError):
        os.kill(server_pid(path), signal.SIGTERM)
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
