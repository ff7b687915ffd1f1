"""A vLLM engine as its user sees it: start it, ask it, end it. See demo_vllm_worker.py.

Must not be here: vLLM itself, or anything slow to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

END_S_MAX = 20.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM's processes have theirs
# What they make there: queues between them, and what tensor ranks exchange.
SHARED_NAMES = ("psm_", "sem.mp-", "vllm_dist_")
CONNECTOR = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore.engine_adapter.vllm_connector",
    "kv_role": "kv_both",
}


class EngineError(Exception):
    """The engine ended, or could not do what was asked; the message says which."""


class VllmEngine:
    """One engine process with its children; use it in a `with` statement."""

    def __init__(
        self,
        model: Path,
        log: TextIO,
        *,
        extra_config: Mapping[str, Any] | None = None,
        python: str = sys.executable,
        **engine: Any,
    ) -> None:
        """`extra_config` is the connector's; None: an engine without one. Returns at once."""
        if extra_config is not None:
            transfer = {**CONNECTOR, "kv_connector_extra_config": dict(extra_config)}
            engine = {"kv_transfer_config": transfer, **engine}
        task = {"model": str(model), "engine": engine}
        command = [python, "-m", "kvstore.engine_adapter.demo_vllm_worker", json.dumps(task)]
        self._shared: set[Path] = set()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def pid(self) -> int:
        """Of the process that has the LLM; the engine core and the workers are below it."""
        return self._process.pid

    def wait_ready(self) -> VllmEngine:
        """Until the model is loaded."""
        self._event("ready")
        self._shared |= shared_files(self._process.pid)
        return self

    def run(
        self, requests: Sequence[Mapping[str, Any]], *, together: bool = False
    ) -> list[dict[str, Any]]:
        """Have it answer those at once; EngineError when it died of it.

        together: all of them are there before its first step, so that steps have equal shapes.
        """
        self.send("run", requests=list(requests), together=together)
        return self.received()

    def send(self, what: str, **more: Any) -> None:
        """Ask without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what} | more) + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise EngineError(f"the engine is gone: {exc}") from exc

    def received(self) -> list[dict[str, Any]]:
        """The answers to a run that was sent; its CPU seconds are in `last_cpu_s`."""
        event = self._event("run")
        self.last_cpu_s = float(event["cpu_s"])
        answers: list[dict[str, Any]] = event["answers"]
        return answers

    last_cpu_s = 0.0

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache; False when blocks stayed held for too long."""
        self.send("reset")
        return bool(self._event("reset")["done"])

    def call(self, name: str, **arguments: Any) -> None:
        """A method of vLLM's LLM, or else of each of its workers."""
        self.send("call", name=name, arguments=arguments)
        self._event("call")

    def cpu_seconds(self) -> float:
        """Of all its processes until now."""
        self.send("cpu")
        return float(self._event("cpu")["seconds"])

    def metrics(self) -> dict[str, float]:
        """vLLM's counters, by name and labels."""
        self.send("metrics")
        values: dict[str, float] = self._event("metrics")["values"]
        return values

    def end(self) -> None:
        """Let it go, or make it; its children too, and the shared memory that they leave."""
        self._shared |= shared_files(self._process.pid)
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
                self._process.wait(END_S_MAX)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._shared |= shared_files(self._process.pid)  # of one that was still starting, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it left behind
        self._process.wait()
        for path in self._shared:
            path.unlink(missing_ok=True)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def _event(self, wanted: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the engine ended with {self._process.wait()}")
        event: dict[str, Any] = json.loads(line)
        if event["event"] != wanted:
            raise EngineError(str(event.get("text", event)))
        return event


def shared_files(session: int) -> set[Path]:
    """Files of vLLM's that the processes of a session have mapped, and that a kill leaves behind.

    Tensor ranks leave theirs after every end, and the file by which they met, in TMPDIR.
    """
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if int((entry / "stat").read_text().rpartition(") ")[2].split()[3]) != session:
                continue
            lines = (entry / "maps").read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        paths = (Path(line.split(maxsplit=5)[5]) for line in lines if line.count(" ") > 5)
        found |= {each for each in paths if each.parent == SHARED_MEMORY}
    ours = {each for each in found if each.name.startswith(SHARED_NAMES)}
    meeting = {each.name.partition("-")[0] for each in ours if each.name.startswith("vllm_dist_")}
    return ours | {Path(tempfile.gettempdir()) / name for name in meeting}
