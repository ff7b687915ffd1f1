"""`kvstore demo`: a real model answers slowly once, then fast, then fast again after kill -9.

This process only directs and shows. The model and the store live in two child processes, one after
the other; the first is killed for real. Exits 0 only if all answers are equal and both later runs
reused what the first had computed. Must not be here: torch, or anything slow to import.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main(): no stack of what it imports

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.engine_adapter.demo_model import MODEL_NAME, gguf_file
from kvstore.engine_adapter.demo_report import Row, machine, results_svg, results_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

COLD, AGAIN, AFTER_KILL = "cold", "again (host)", "after kill -9 (disk)"
DEMO_DIRECTORY = Path(".demo")
END_S_MAX = 30.0  # for a worker to close its store
LOG_LINES_SHOWN = 15


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Worker:
    """A child process with model and store; see demo_worker.py for what it says."""

    def __init__(self, task: dict[str, Any], log: TextIO) -> None:
        self._log = log
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "kvstore.engine_adapter.demo_worker", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[dict[str, Any]]:
        """What it says until it is "ready"; DemoError with its last words if it dies before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "failed":
                raise DemoError(event["text"])
            yield event
            if event["event"] == "ready":
                return
        self._process.wait()
        self._log.seek(0)
        last = "".join(self._log.readlines()[-LOG_LINES_SHOWN:])
        raise DemoError(f"the model's process ended with {self._process.returncode}:\n{last}")

    def kill(self) -> None:
        """SIGKILL, as the kernel would when memory runs out: no chance to say goodbye."""
        self._process.send_signal(signal.SIGKILL)
        if self._process.wait() != -signal.SIGKILL:
            raise DemoError(f"the process was not killed: it ended {self._process.returncode}")

    def end(self) -> None:
        """Let it close its store and go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired as exc:
            raise DemoError(f"the store did not close within {END_S_MAX:.0f} s") from exc

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Demo:
    """The course of the demo, and what came out of it."""

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self.console = console
        self.options = options
        self.results: list[dict[str, Any]] = []
        self.chain = ""
        self.model = Path()

    def run(self, log: TextIO) -> None:
        """All three runs; DemoError when one does not come about."""
        options = self.options
        name = options.model.name if options.model else MODEL_NAME
        self.model = options.model or self._own_model(log)
        options.dir.mkdir(parents=True, exist_ok=True)
        task = {
            "model": str(self.model),
            "name": name,
            "directory": str(options.dir),
            "dtype": options.dtype,
            "prompt_file": str(self.prompt_file),
        }
        self._say("A new process loads the model; the store has nothing of its prompt yet.")
        with Worker(task | {"runs": [COLD, AGAIN], "forget": True}, log) as worker:
            self._follow(worker)
            worker.kill()
            self._say(f"\n[bold]kill -9 {worker.pid}[/] - the process that cached it is gone.")
        self._say("A new process loads the model and opens the same directory.")
        with Worker(task | {"runs": [AFTER_KILL], "forget": False}, log) as worker:
            self._follow(worker)
            worker.end()

    @property
    def prompt_file(self) -> Path:
        """Token ids of another question about the same text, for `kvstore explain`."""
        return Path(f"{self.options.dir}-question-2.json")

    def rows(self) -> list[Row]:
        """The results as they are shown."""
        first = self.results[0]["answer"]
        return [
            Row(
                run=each["run"],
                ttft_s=each["ttft_s"],
                reused_tokens=each["reused_tokens"],
                prompt_tokens=each["prompt_tokens"],
                tier=", ".join(each["tiers"]),
                same_answer=None if number == 0 else each["answer"] == first,
            )
            for number, each in enumerate(self.results)
        ]

    def _own_model(self, log: TextIO) -> Path:
        directory = DEMO_DIRECTORY / "model"
        if (directory / "config.json").exists():
            return directory
        size = gguf_file().stat().st_size / 1e6
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvstore.engine_adapter.demo_model", str(directory)]
        started = time.monotonic()
        with self._waiting(f"unpacking {MODEL_NAME} ({size:.0f} MB to 270 MB, once)"):
            done = subprocess.run(command, stdout=log, stderr=log, check=False)  # noqa: S603
        if done.returncode:
            log.seek(0)
            last = "".join(log.readlines()[-LOG_LINES_SHOWN:])
            raise DemoError(f"the model could not be unpacked:\n{last}")
        self._say(f"Unpacked {MODEL_NAME} into {directory} in {time.monotonic() - started:.0f} s.")
        return directory

    def _follow(self, worker: Worker) -> None:
        """Show what a worker does; each wait has a clock."""
        events = worker.events()
        self._show_loaded(self._wait_for(events, "loading torch, the model and the store"))
        for event in events:
            if event["event"] == "run":
                self._follow_run(events, event["name"])
            elif event["event"] == "ready":
                self.chain = event["chain"]

    def _show_loaded(self, event: dict[str, Any]) -> None:
        self._say(
            f"Loaded in {event['seconds']:.1f} s. Prompt: {event['prompt_tokens']:,} tokens of "
            f"Python's manual, then: [italic]{event['question']}[/]"
        )

    def _follow_run(self, events: Iterator[dict[str, Any]], name: str) -> None:
        self.console.rule(f"[bold]{name}", align="left")
        event = self._wait_for(events, "waiting for the first token")
        held_back = ""  # an answer's last line breaks are not worth showing
        while event["event"] == "text":
            text = held_back + event["text"]
            shown = text.rstrip("\n")
            held_back = text[len(shown) :]
            self.console.print(shown, end="", style="cyan", markup=False, highlight=False)
            event = next(events)
        self.results.append(event)
        self.console.print()
        line = f"First token after [bold]{event['ttft_s']:.2f} s[/]"
        if event["reused_tokens"]:
            line += (
                f": {event['reused_tokens']:,} tokens loaded from {', '.join(event['tiers'])} "
                f"in {1e3 * event['load_s']:.0f} ms, "
                f"{event['prompt_tokens'] - event['reused_tokens']} computed."
            )
        else:
            line += f": all {event['prompt_tokens']:,} tokens computed."
        self._say(line)
        if event["saved_pages"]:
            kept = "safe on disk" if event["saved_durably"] else "in memory only"
            self._say(f"Stored {event['saved_pages']} pages, {kept} {event['save_s']:.2f} s later.")

    def _wait_for(self, events: Iterator[dict[str, Any]], what: str) -> dict[str, Any]:
        with self._waiting(what):
            return next(events)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        if not self.console.is_terminal:
            self._say(f"... {what}")
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(what)
            yield

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)


def conclude(demo: Demo) -> int:
    """Table, picture, what to try next; the exit code."""
    console, options = demo.console, demo.options
    rows = demo.rows()
    cold, after = rows[0], rows[-1]
    console.print()
    console.print(results_table(rows))
    console.print(f"[dim]TTFT counts look-up and loading, not starting the process. {machine()}[/]")
    problems = [f"{row.run}: the answer differs" for row in rows[1:] if not row.same_answer]
    problems += [f"{row.run}: nothing was reused" for row in rows[1:] if not row.reused_tokens]
    if after.reused_tokens and after.tier != "disk":
        problems.append(f"{after.run}: pages came from {after.tier}")
    if problems:
        for problem in problems:
            console.print(f"[bold red]FAILED[/] {problem}")
        return 1
    console.print(
        f"[bold green]{cold.ttft_s / after.ttft_s:.1f} x faster, "
        f"{cold.ttft_s - after.ttft_s:.1f} s of prefill saved[/] after a restart."
    )
    if options.svg:
        name = options.model.name if options.model else MODEL_NAME
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(results_svg(rows, name), encoding="utf-8")
        console.print(f"Picture: {options.svg}", highlight=False)
    command = Path(sys.executable).with_name("kvstore")
    shown = os.path.relpath(command) if command.exists() else "kvstore"
    console.print("\nTry next:")
    for line in (
        f"ls {options.dir}",
        f"inspect {options.dir} {demo.chain[:12]}",
        f"explain {options.dir} --tenant demo --tokens-file {demo.prompt_file} "
        f"--tokenizer {demo.model}",
    ):
        console.print(f"  {shown} {line}", markup=False, highlight=False, soft_wrap=True)
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="kvstore demo", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", type=Path, help="directory of another Hugging Face model, on this machine"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=DEMO_DIRECTORY / "store",
        help="the store (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what to compute in; in the short ones, rounding may change an answer's words",
    )
    parser.add_argument("--svg", type=Path, help="also write the result as a picture")
    options = parser.parse_args(arguments)
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json; name a model's directory")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 if the store kept its word."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse(arguments)
    console = Console()
    demo = Demo(console, options)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        try:
            demo.run(log)
        except (DemoError, FileNotFoundError) as exc:
            console.print(f"kvstore demo: {exc}", style="bold red", markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            return 130
    return conclude(demo)


if __name__ == "__main__":
    sys.exit(main())
