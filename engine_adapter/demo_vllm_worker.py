"""A vLLM engine in a process of its own, for the demo, the bench and the tests: JSON lines in, out.

    python -m kvstore.engine_adapter.demo_vllm_worker '{"model": DIR, "engine": {...}}'

`engine` are arguments of vllm.LLM. It says {"event": "ready"}, then answers each line:

    {"do": "run", "requests": [{"tokens": [...], "max_tokens": 8, ...}]}   all at once; also
                         with "salt", "lora" (a path), "params", "abort_after" (engine steps);
                         "together": the first step that computes is to have them all
    {"do": "reset"}      empty vLLM's own prefix cache, until it is
    {"do": "call", "name": "sleep", "arguments": {...}}   the LLM's method, or its workers'
    {"do": "cpu"}        CPU seconds of this process and all below it
    {"do": "metrics"}    vLLM's counters by name

What vLLM itself prints goes to stderr. Must not be here: the store, what is measured, tables.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

RESET_S_MAX = 20.0
LOOKUP_S = 0.5  # more than a connector needs to look some requests up
# The CPU backend as these runs want it, unless the caller says otherwise.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {"enforce_eager": True, "max_model_len": 4096, "disable_log_stats": False, "seed": 0}


class Engine:
    """An LLM and what it is asked."""

    def __init__(self, task: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm: Any = LLM(model=task["model"], **(ENGINE | task.get("engine", {})))
        self._engine = self._llm.llm_engine
        self._numbers = itertools.count(1)
        self._adapters: dict[str, int] = {}  # by their path

    def run(
        self, requests: list[dict[str, Any]], *, together: bool = False
    ) -> list[dict[str, Any]]:
        """Answers in the order of the requests; `abort_after` is in engine steps.

        `step` of an answer: which of the steps that gave tokens gave its first one.
        """
        if together:
            self._engine.engine_core.call_utility("pause_scheduler", "keep", False)
        began_s, aborted = time.perf_counter(), set()
        asked = {self._add(request): request for request in requests}
        if together:
            time.sleep(LOOKUP_S)
            self._engine.engine_core.call_utility("resume_scheduler")
            began_s = time.perf_counter()
        found: dict[str, dict[str, Any]] = {}
        gave = 0
        for step in itertools.count():
            gone = [
                name
                for name, request in asked.items()
                if request.get("abort_after") == step and name not in found
            ]
            if gone:
                self._engine.abort_request(gone)
                aborted |= set(gone)
            if not self._engine.has_unfinished_requests():
                break
            outputs = self._engine.step()
            gave += any(output.outputs[0].token_ids for output in outputs)
            for output in outputs:
                seen = found.setdefault(output.request_id, {})
                if output.outputs[0].token_ids:
                    seen.setdefault("ttft_s", time.perf_counter() - began_s)
                    seen.setdefault("step", gave)
                if output.finished:
                    seen |= answer_of(output) | {"total_s": time.perf_counter() - began_s}
        return [found.get(name, {}) | {"aborted": name in aborted} for name in asked]

    def reset(self) -> bool:
        """Whether vLLM's prefix cache could be emptied: not while blocks are held."""
        until = time.monotonic() + RESET_S_MAX
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        """A method of the LLM, or else of each of its workers."""
        method = getattr(self._llm, name, None)
        if callable(method):
            method(**arguments)
        else:
            self._llm.collective_rpc(name, kwargs=arguments)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges."""
        return {
            f"{each.name}{json.dumps(each.labels, sort_keys=True)}": float(each.value)
            for each in self._llm.get_metrics()
            if hasattr(each, "value")
        }

    def _add(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": request["params"]} if "params" in request else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.get("max_tokens", 1),
            ignore_eos=True,
            logprobs=2,
            extra_args=extra,
        )
        prompt = {"prompt_token_ids": request["tokens"]}
        if "salt" in request:
            prompt["cache_salt"] = request["salt"]
        name = f"request-{next(self._numbers)}"
        adapter = request.get("lora")
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            adapter = LoRARequest(Path(adapter).name, number, adapter)
        self._engine.add_request(name, prompt, sampling, lora_request=adapter)
        return name


def answer_of(output: Any) -> dict[str, Any]:
    """What a finished request brought."""
    [completion] = output.outputs
    tokens = list(completion.token_ids)
    by_place = list(zip(tokens, completion.logprobs or (), strict=False))
    probabilities = [each[token].logprob for token, each in by_place]
    # How far the second choice is behind: where it is close, noise decides.
    behind = [
        min((each[token].logprob - other.logprob for name, other in each.items() if name != token))
        for token, each in by_place
    ]
    return {
        "tokens": tokens,
        "logprobs": probabilities,
        "margins": behind,
        "reason": completion.finish_reason,
        "cached_tokens": output.num_cached_tokens or 0,
        "params": output.kv_transfer_params,
    }


def cpu_seconds(root: int) -> float:
    """User and system time of a process and all below it, dead children included."""
    times: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        times[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family, before = {root}, 0
    while len(family) != before:
        before = len(family)
        family |= {pid for pid, (parent, _) in times.items() if parent in family}
    ticks = sum(times[pid][1] for pid in family if pid in times)
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM and its children print what they like
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    def say(event: str, **more: Any) -> None:
        answers.write(json.dumps({"event": event} | more) + "\n")
        answers.flush()

    try:
        engine = Engine(json.loads(sys.argv[1]))
        say("ready")
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "run":
                before = cpu_seconds(os.getpid())
                found = engine.run(asked["requests"], together=asked.get("together", False))
                say("run", answers=found, cpu_s=cpu_seconds(os.getpid()) - before)
            elif asked["do"] == "reset":
                say("reset", done=engine.reset())
            elif asked["do"] == "call":
                engine.call(asked["name"], asked["arguments"])
                say("call")
            elif asked["do"] == "cpu":
                say("cpu", seconds=cpu_seconds(os.getpid()))
            else:
                say("metrics", values=engine.metrics())
    except Exception as exc:
        say("failed", text=f"{type(exc).__name__}: {exc}")
        raise


if __name__ == "__main__":
    main()
