"""A real server under a chat trace, with its dashboard: to look at, and for the pictures in docs/.

Three tenants share the trace by conversation; each block of it is a small page, so that an hour of
a chat service fits a laptop. Requests come in the order of the trace, spread over --seconds. Needs
pip install 'kvstore-llm[dashboard]', --pictures also playwright, pillow and a Chromium here.

    python bench/dashboard.py TRACE                        replay, say the address, wait for Ctrl-C
    python bench/dashboard.py TRACE --pictures docs        replay, take the four pictures, end
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import CacheSpec
from kvstore.client import RemoteStore
from kvstore.client_config import ClientConfig
from kvstore.dashboard_listen import ADDRESS_NAME
from kvstore.identity import Role
from kvstore.server_address import parse_address
from kvstore.tenants import Quota, edit_tenants
from kvstore.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.tenants import TenantBook
    from kvstore.trace import Trace

PAGE_TOKENS = 16
PAGE_BYTES = 4096 - 64
TENANTS = {"chat-eu": "Llama-3.1-8B", "chat-us": "Llama-3.1-8B", "assistants": "Qwen3-32B"}
SHARES = (0.5, 0.8, 1.0)  # of conversations, summed up
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
START_S = 30.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class TraceServer:
    """`kvstore serve` in a process of its own, with three tenants and an operator."""

    def __init__(self, folder: Path, host_bytes: str, disk_bytes: str) -> None:
        self.directory = folder / "kv"
        self._folder = folder
        self._tokens = {name: folder / f"{name}.token" for name in (*TENANTS, "ops")}
        edit_tenants(folder / "tenants.json", self._fill, create=True)
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(self.directory)]
        command += [f"--host-bytes={host_bytes}", f"--disk-bytes={disk_bytes}"]
        command += [f"--tenants-file={folder / 'tenants.json'}", "--dashboard-listen=127.0.0.1:0"]
        with open(folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        note = self.directory / ADDRESS_NAME
        deadline = time.monotonic() + START_S
        while not note.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.05)
        self.address = f"{note.read_text().strip()}#key={self._tokens['ops'].read_text()}"

    def connect(self, tenant: str) -> RemoteStore:
        """A client with that tenant's token."""
        config = ClientConfig(token_file=self._tokens[tenant], lookup_deadline_s=5.0)
        return RemoteStore(parse_address(f"kvstore://unix:{self.directory}/kvstore.sock"), config)

    def stop(self) -> None:
        """End it well."""
        self._process.terminate()
        self._process.wait(30)

    def _fill(self, book: TenantBook) -> TenantBook:
        for name, path in self._tokens.items():
            role = Role.ADMIN if name == "ops" else Role.WRITER
            book, token = book.with_tenant(name, Quota()).with_token(name, role, 0.0, None)
            path.touch(mode=0o600)
            path.write_text(token)
        return book


def tokens_of(blocks: np.ndarray) -> np.ndarray:
    """A page of tokens that no other block has."""
    first = blocks.astype(np.int64)[:, None] * PAGE_TOKENS
    return ((first + np.arange(PAGE_TOKENS)) * 7919 % 128_000_003).astype(np.int32).reshape(-1)


def tenant_of(path: np.ndarray) -> str:
    """Whose conversation this is: told by its first block that is not everybody's."""
    draw = int(path[min(1, len(path) - 1)]) * 2654435761 % (1 << 32) / (1 << 32)
    return list(TENANTS)[next(at for at, share in enumerate(SHARES) if draw < share)]


def replay(server: TraceServer, trace: Trace, seconds: float, then: Callable[[], object]) -> None:
    """Look each prompt up, load what hits, store the rest; then what is to be done at once."""
    with contextlib.ExitStack() as stack:
        sessions = {}
        for tenant, model in TENANTS.items():
            store = stack.enter_context(server.connect(tenant))
            spec = CacheSpec.opaque(model, page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
            sessions[tenant] = store.session(spec, writer="replay")
        began = time.monotonic()
        for number in range(trace.requests):
            path = trace.blocks[trace.starts[number] : trace.starts[number + 1]]
            time.sleep(max(0.0, began + seconds * number / trace.requests - time.monotonic()))
            session, tokens = sessions[tenant_of(path)], tokens_of(path)
            with session.match(tokens) as hit:
                hit.stage(2.0)
            with session.reserve(tokens) as run:
                for view in run.views():
                    view[:] = bytes(len(view))
                if run.count:
                    run.commit()
        then()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """The Chromium of this machine, without a window."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(f"--pictures needs one of {', '.join(CHROMIUM)}")
    with sync_playwright() as player:
        flags = ["--no-sandbox", "--disable-lcd-text", "--font-render-hinting=none"]
        made = player.chromium.launch(executable_path=found, args=flags)
        yield made
        made.close()


def take_pictures(address: str, folder: Path, prompt: np.ndarray) -> None:
    """Desktop and phone, light and dark, with a prompt explained."""
    with browser() as chromium:
        for size, (width, height) in SIZES.items():
            for scheme in SCHEMES:
                page = chromium.new_page(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                page.goto(address)
                page.locator("#tree-chart g").first.wait_for()
                page.locator("#why-prompt").fill(", ".join(map(str, prompt.tolist())))
                page.get_by_role("button", name="Explain").click()
                page.locator(".verdict").wait_for()
                page.locator("#why-prompt").evaluate("box => { box.scrollTop = 0; }")
                page.evaluate("document.activeElement.blur()")
                path = folder / f"dashboard-{size}-{scheme}.png"
                page.screenshot(path=path, full_page=True)
                make_smaller(path)
                print(path, path.stat().st_size, "bytes")
                page.close()


def make_smaller(path: Path) -> None:
    """256 colours: no difference to see, and half the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def prompt_to_explain(trace: Trace) -> np.ndarray:
    """A long one that was asked for lately, with another end."""
    lengths = np.diff(trace.starts)[-50:]
    number = trace.requests - len(lengths) + int(lengths.argmax())
    tokens = tokens_of(trace.blocks[trace.starts[number] : trace.starts[number + 1]])
    tokens[-3 * PAGE_TOKENS :] += 1
    return tokens


def main() -> None:
    """Serve, replay, show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="Mooncake's JSONL, as for kvstore simulate")
    parser.add_argument("--requests", type=int, default=3000, help="the first so many")
    parser.add_argument("--seconds", type=float, default=300.0, help="to spread them over")
    parser.add_argument("--host-bytes", default="48MiB")
    parser.add_argument("--disk-bytes", default="160MiB")
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures; then end")
    options = parser.parse_args()
    trace = read_trace(options.trace).head(options.requests)
    with tempfile.TemporaryDirectory() as folder:
        server = TraceServer(Path(folder), options.host_bytes, options.disk_bytes)
        try:
            print(server.address, flush=True)
            wanted = options.pictures
            replay(
                server,
                trace,
                options.seconds,
                lambda: wanted and take_pictures(server.address, wanted, prompt_to_explain(trace)),
            )
            if wanted:
                return
            print("replayed; Ctrl-C ends it", flush=True)
            while True:
                time.sleep(60)
        except KeyboardInterrupt:
            print()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
