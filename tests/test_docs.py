"""README and docs/: links lead somewhere, Python blocks run, and every command runs as it stands.

Commands stand in sh blocks, one page after another in a directory of its own that holds a store
`my-cache` with the prompt of the README's ten lines. What can't run here says so on its line,
`# not run here: why`, and stands in NOT_RUN below, so that the list can't grow unseen.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from small_trace import records
from tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "deploy/README.md"),
    *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")),
]
LANGUAGES = {"sh", "python", "text", "toml"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
PROGRAMS = r"(kvstore|python|make|pip|vllm|docker|curl|openssl|sh) "
MARK = "# not run here: "
# Every command of README and docs that no test runs: page, how it begins, why.
NOT_RUN = {
    ("README.md", "vllm serve", "needs vLLM"),
    ("deploy/README.md", "docker build", "needs Docker"),
    ("deploy/README.md", "docker run", "needs Docker"),
    ("docs/quickstart.md", "sh docs/examples/vllm_serve.sh", "needs vLLM"),
    ("docs/redis.md", "kvstore serve", "needs a Redis"),
    ("docs/vllm.md", "vllm serve", "needs vLLM"),
}
START_S_MAX = 30.0
# What the pages say, and where it lies in a test.
PLACES = ("/var/cache/kv", "/var/lib/kvstore", "/run/kvstore", "/tmp/my-kv-store")  # noqa: S108


def blocks(page: str, *languages: str) -> list[str]:
    """The page's code of these languages."""
    text = (ROOT / page).read_text()
    return [code for language, code in FENCE.findall(text) if language in languages]


def block_commands(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, and why it is not run, or nothing."""
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        command, _, why = line.partition(MARK)
        command = re.sub(r"(^|\s)# .*", "", command).strip()
        if command:
            yield command, why.strip()


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Those of all blocks of a page."""
    for block in blocks(page, "sh"):
        yield from block_commands(block)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text())
    for target in LINK.findall(text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_where_they_are_run(page: str) -> None:
    """In sh blocks: an indented command, or a block of no language, would never be tried."""
    text = (ROOT / page).read_text()
    assert {language for language, _ in FENCE.findall(text)} <= LANGUAGES
    hidden = re.findall(rf"^    {PROGRAMS}.*", FENCE.sub("", text), re.MULTILINE)
    hidden += re.findall(rf"^{PROGRAMS}.*", "".join(blocks(page, "text")), re.MULTILINE)
    assert not hidden


def test_what_is_not_run_is_known() -> None:
    found = {(page, command, why) for page in PAGES for command, why in commands(page) if why}
    for page, command, why in found:
        assert any((page, why) == (p, w) and command.startswith(c) for p, c, w in NOT_RUN), command
    for page, begins, why in NOT_RUN:
        assert any((page, why) == (p, w) and c.startswith(begins) for p, c, w in found), begins


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [page for page in PAGES if page.startswith("docs/") and page[5:] not in index]
    assert not missing


def test_pictures_follow_the_readers_colours() -> None:
    for file in (ROOT / "docs").glob("*.svg"):
        assert re.search(r"prefers-color-scheme: ?dark", file.read_text()), file.name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder)
    return folder


class Scratch:
    """A short directory (sockets lie in it), a store, and the servers that a page has started."""

    def __init__(self, model: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="docs-"))
        self.model = model
        self.servers: list[subprocess.Popen[bytes]] = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "HOME": str(self.folder)}
        self.environment |= {"KVSTORE_HOST_BYTES": "64MiB", "KVSTORE_DISK_BYTES": "256MiB"}
        self.python(self.placed(blocks("README.md", "python")[0]))
        (self.folder / "prompt.json").write_text(json.dumps(list(range(100))))
        lines = "".join(json.dumps(record) + "\n" for record in records(seed=0))
        (self.folder / "conversation_trace.jsonl").write_text(lines)
        shutil.copytree(ROOT / "docs" / "examples", self.folder / "docs" / "examples")

    def placed(self, text: str) -> str:
        """What a page says, with the places of this scratch."""
        for place in PLACES:
            folder = "my-cache" if place.endswith("my-kv-store") else Path(place).name
            text = text.replace(place, str(self.folder / folder))
        text = re.sub(r"\bMODEL\b", str(self.model), text)
        return re.sub(r"\bCHAIN\b", self.chain, text) if "CHAIN" in text else text

    @property
    def chain(self) -> str:
        """The one chain in my-cache."""
        listed = self.run("kvstore ls my-cache --json")
        return str(json.loads(listed)["chains"][0]["chain_id"])

    def python(self, code: str) -> str:
        """Run Python code, as a file of its own would."""
        return self.run(shlex.join([sys.executable, "-c", code]))

    def run(self, command: str) -> str:
        """Run a command of a shell; what it printed. It must end well."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def serve(self, command: str) -> None:
        """A server of the page: in the background until the page ends."""
        log = self.folder / f"server{len(self.servers)}.log"
        for name in ("kvstore", "run"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        with open(log, "wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command.removesuffix('&')}"],
                stdout=file,
                stderr=file,
                cwd=self.folder,
                env=self.environment,
            )
        self.servers.append(process)
        deadline = time.monotonic() + START_S_MAX
        while "serving " not in log.read_text():
            assert process.poll() is None, f"{command}\n{log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{command}\n{log.read_text()[-2000:]}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End the servers of a block."""
        while self.servers:
            process = self.servers.pop()
            process.terminate()
            process.wait(30)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


@pytest.fixture
def scratch(model: Path) -> Iterator[Scratch]:
    made = Scratch(model)
    yield made
    made.close()


def tried_otherwise(command: str) -> bool:
    """Commands of the repository, which would take hours: that they exist, with their flags."""
    words = shlex.split(command)
    words = words[next(n for n, word in enumerate(words) if "=" not in word or n == 1) :]
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return True
    package = r"(kvstore-llm|\.)(\[|$)"  # by its name, or the clone
    if words[:3] == ["pip", "install", words[-1]] and re.match(package, words[-1]):
        project = (ROOT / "pyproject.toml").read_text()
        for extra in re.findall(r"\[([\w,]+)\]", words[-1]):
            assert all(
                re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extra.split(",")
            )
        return True
    if words[0].endswith("python") and words[1].startswith(("bench/", "tests/")):
        helped = subprocess.run(
            [sys.executable, str(ROOT / words[1]), "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert helped.returncode == 0, helped.stderr
        assert all(word in helped.stdout for word in words if word.startswith("--")), command
        return True
    if words[0] == ".ci/run" or words[:3] == [".venv/bin/python", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if "/" in word and word[0] != "-")
        return True
    return False


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh", "python")])
def test_every_command_of_a_page_runs(page: str, scratch: Scratch) -> None:
    """In the page's order; Python blocks too, each in a process of its own."""
    for language, code in FENCE.findall((ROOT / page).read_text()):
        if language == "python":
            scratch.python(scratch.placed(code))
        for command, why in block_commands(code) if language == "sh" else ():
            if why or tried_otherwise(command):
                continue
            if command.startswith("kvstore serve") and "--check-config" not in command:
                scratch.stop()
                scratch.serve(scratch.placed(command))
            else:
                scratch.run(scratch.placed(command))


def test_the_ten_lines_of_the_readme_hit_again_in_a_second_process(tmp_path: Path) -> None:
    code = blocks("README.md", "python")[0].replace(PLACES[3], str(tmp_path / "store"))
    for expected in ("Commit(pages=6, durable=True, reason='')", "all there\n6 pages in memory"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert expected in done.stdout


def test_the_library_page_hits_again_in_a_second_process(tmp_path: Path) -> None:
    code = blocks("docs/library.md", "python")[0].replace(PLACES[3], str(tmp_path / "store"))
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert "Commit(pages=6, durable=True, reason='')" in outputs[0].stdout
    assert "Commit" not in outputs[1].stdout
    assert "96 tokens, 6 pages" in outputs[1].stdout
