"""The dashboard through a real server process: who may see what, what each answer carries."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from command import run
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore import CacheSpec
from kvstore.connect import connect
from kvstore.dashboard import (
    ANSWER_BYTES_MAX,
    BODY_BYTES_MAX,
    CALLERS_MAX,
    FILES,
    PAGE,
    SILENCE_S,
    Dashboard,
)
from kvstore.dashboard_data import DashboardData
from kvstore.dashboard_history import COLUMNS
from kvstore.dashboard_listen import ADDRESS_NAME
from kvstore.errors import DirectoryError
from kvstore.identity import LocalAuthorizer, Role
from kvstore.server_config import ServerConfig
from kvstore.store import Store
from kvstore.tenants import Quota, TenantBook, edit_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = ("--host-bytes=16MiB", "--disk-bytes=64MiB")
VIEWS = ("state", "history", "chains", "tree", "explain")
HOSTILE = "<img src=x onerror=alert(1)>\"'&"


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def ask(port: int, path: str, key: str = "", body: bytes | None = None, **headers: str) -> Answer:
    """One request, as the page makes it; headers by name, _ for -."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        given["Authorization"] = f"Bearer {key}"
    if body is not None:
        given.setdefault("Content-Type", "application/json")
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET" if body is None else "POST", path, body=body, headers=given)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


def view(port: int, name: str, key: str = "") -> Answer:
    """One of VIEWS."""
    asked = {"tokens": "1 2 3 4", "tenant": "acme", "namespace": SPEC.namespace.hex()}
    body = json.dumps(asked).encode() if name == "explain" else None
    return ask(port, f"/api/{name}", key, body)


def place(server: ServerProcess) -> tuple[int, str]:
    """Port and key, as `kvstore dashboard` says them."""
    address = urlsplit(run("dashboard", str(server.directory)).strip())
    assert (address.scheme, address.hostname, address.path) == ("http", "127.0.0.1", "/")
    assert address.port is not None
    return address.port, address.fragment.removeprefix("key=")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Without credentials, with a few pages, some of a model with a hostile name."""
    folder = tmp_path_factory.mktemp("dashboard")
    with ServerProcess(folder / "kv", *SIZES, "--dashboard-listen=127.0.0.1:0") as made:
        made.start()
        with connect(made.address, open_wait_s=10.0, lookup_deadline_s=5.0) as store:
            hostile = replace(SPEC, model=HOSTILE)
            for spec in (SPEC, hostile):
                session = store.session(spec, writer="w1")
                for seed in range(3):
                    save(session, prompt(seed, 2))
                assert load(session, prompt(0, 2)) == 2
        yield made


@pytest.mark.slow
def test_all_views_answer_who_has_the_key(server: ServerProcess) -> None:
    port, key = place(server)
    state = view(port, "state", key).document
    now = dict(zip(state["columns"], state["reading"], strict=True))
    assert (now["requests"], now["stored_pages"], now["pages"]) == (2, 12, 12)
    assert [tier["name"] for tier in state["tiers"]] == ["host", "disk"]
    assert state["there"]["trees"] == 2
    history = view(port, "history", key).document
    assert history["columns"] == list(COLUMNS)
    assert len(history["rows"]) >= 1
    chains = view(port, "chains", key).document
    assert (chains["in_all"], len(chains["cold"])) == (6, 6)
    tree = view(port, "tree", key).document
    assert [(chain["pages"], chain["hits"]) for chain in tree["hot"]] == [(2, 1), (2, 1)]
    assert sum(box["own_pages"] for box in tree["boxes"]) == 12
    assert {box["model"] for box in tree["boxes"] if not box["runs"]} == {"unit", HOSTILE}
    tokens = prompt(0, 3).tolist()
    asked = {"tokens": str(tokens), "namespace": SPEC.namespace.hex()}
    found = ask(port, "/api/explain", key, json.dumps(asked).encode()).document
    assert (found["matched_pages"], found["prompt_pages"]) == (2, 3)
    assert found["verdict"].startswith("hit on 2 of 3 pages")


@pytest.mark.slow
def test_without_the_key_there_is_the_page_and_no_data(server: ServerProcess) -> None:
    port, key = place(server)
    for name in VIEWS:
        for wrong in ("", "x", key + "x", key[:-1]):
            answer = view(port, name, wrong)
            assert answer.status == 401, (name, wrong)
            assert "kvstore dashboard DIR" in answer.document["error"]
    for path in FILES:
        assert ask(port, path).status == 200
    assert ask(port, "/api/state?key=" + key).status == 401
    assert ask(port, "/api/state", Cookie=f"kvstore-key={key}").status == 401
    log = server.log.read_text()
    assert key not in log
    assert f"dashboard at http://127.0.0.1:{port}/" in log
    assert (server.directory / ADDRESS_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_it_can_only_be_read(server: ServerProcess) -> None:
    port, key = place(server)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, "/api/state", headers={"Authorization": f"Bearer {key}"})
        assert connection.getresponse().status == 405, method
        connection.close()
    for path in ("/api", "/api/evict", "/app.py", "/../secret", "/%2e%2e/secret", "//etc/passwd"):
        assert ask(port, path, key).status == 404, path


@pytest.mark.slow
def test_every_answer_carries_the_headers_that_keep_it_in_place(server: ServerProcess) -> None:
    port, key = place(server)
    answers = [ask(port, path) for path in (*FILES, "/none")]
    answers += [view(port, name, key) for name in VIEWS]
    answers += [view(port, "state"), ask(port, "/", Host="evil.example")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


@pytest.mark.slow
def test_a_page_of_elsewhere_can_not_ask(server: ServerProcess) -> None:
    """By another name for this host (DNS rebinding), across sites, or as a plain form."""
    port, key = place(server)
    for host in ("evil.example", f"evil.example:{port}", "10.0.0.1", "127.0.0.1.evil.example"):
        for path in ("/", "/api/state"):
            answer = ask(port, path, key, Host=host)
            assert answer.status == 421, host
            assert b"tiers" not in answer.body
    assert ask(port, "/api/state", key, Host=f"localhost:{port + 1}").status == 200
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403)):
        assert ask(port, "/api/state", key, Sec_Fetch_Site=site).status == status
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert ask(port, "/api/explain", key, b"{}", Content_Type=kind).status == 415, kind


@pytest.mark.slow
def test_what_is_no_question_is_refused_with_a_sentence(server: ServerProcess) -> None:
    port, key = place(server)
    nested = b"[" * 100_000
    for body in (b"", b"[]", b"{", b'{"tokens": 1}', b'{"tokens": "a"}', b"\xff", nested):
        answer = ask(port, "/api/explain", key, body)
        assert answer.status == 400, body[:20]
        assert answer.document["error"]
    large = b'{"tokens": "' + b"1 " * (BODY_BYTES_MAX // 2) + b'"}'
    with contextlib.suppress(ConnectionError):  # it may hang up while we still send
        assert ask(port, "/api/explain", key, large).status == 413
    assert ask(port, "/api/history?after=x", key).status == 400
    for junk in ("acme\n", "\u00fc", "a" * 300):
        asked = {"tokens": "1 2 3 4", "tenant": junk, "namespace": SPEC.namespace.hex()}
        assert ask(port, "/api/explain", key, json.dumps(asked).encode()).status == 400
    assert ask(port, "/api/state", key).status == 200


@pytest.mark.slow
def test_a_hostile_name_stays_a_string_of_a_document(server: ServerProcess) -> None:
    port, key = place(server)
    for name, rows in (("tree", "boxes"), ("chains", "cold")):
        answer = view(port, name, key)
        assert answer.headers["content-type"] == "application/json"
        assert HOSTILE in {row["model"] for row in answer.document[rows]}


ROLES_TO_STATUS = {
    Role.ADMIN: dict.fromkeys(VIEWS, 200),
    Role.METRICS: dict.fromkeys(VIEWS, 403) | {"state": 200},
    Role.READER: dict.fromkeys(VIEWS, 403),
    Role.WRITER: dict.fromkeys(VIEWS, 403),
}


@pytest.mark.slow
def test_where_calls_need_a_credential_each_role_sees_what_is_its_own(tmp_path: Path) -> None:
    tokens: dict[Role | str, str] = {}

    def edit(book: TenantBook) -> TenantBook:
        book = book.with_tenant("acme", Quota()).with_tenant("globex", Quota())
        for role in ROLES_TO_STATUS:
            book, tokens[role] = book.with_token("acme", role, 0.0, None)
        book, tokens["globex"] = book.with_token("globex", Role.WRITER, 0.0, None)
        return book

    edit_tenants(tmp_path / "tenants.json", edit, create=True)
    flags = (*SIZES, f"--tenants-file={tmp_path}/tenants.json", "--dashboard-listen=127.0.0.1:0")
    with ServerProcess(tmp_path / "kv", *flags) as server:
        server.start()
        port, key = place(server)
        assert key == ""  # whoever has no token gets in by nothing else
        for tenant, token in (("acme", tokens[Role.WRITER]), ("globex", tokens["globex"])):
            file = tmp_path / f"{tenant}.token"
            file.touch(mode=0o600)
            file.write_text(token)
            with connect(server.address, token_file=file, open_wait_s=10.0) as store:
                assert save(store.session(SPEC), prompt(0, 2)) == 2
        for name in VIEWS:
            assert view(port, name).status == 401, name
            assert view(port, name, "kvs1.nonsense").status == 401, name
        for role, statuses in ROLES_TO_STATUS.items():
            found = {name: view(port, name, tokens[role]).status for name in VIEWS}
            assert found == statuses, role
        mine = view(port, "state", tokens[Role.METRICS])
        assert [each["tenant"] for each in mine.document["tenants"]] == ["acme"]
        assert b"globex" not in mine.body
        everyone = view(port, "state", tokens[Role.ADMIN]).document["tenants"]
        assert {each["tenant"]: each["pages"] for each in everyone} == {"acme": 2, "globex": 2}
        assert server.terminate() == 0
    assert not (tmp_path / "kv" / ADDRESS_NAME).exists()


@pytest.mark.slow
def test_at_a_private_socket_no_key_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "dashboard.sock"
    with ServerProcess(tmp_path / "kv", *SIZES, f"--dashboard-listen=unix:{path}") as server:
        server.start()
        assert path.stat().st_mode & 0o777 == 0o600
        assert run("dashboard", str(server.directory)).strip() == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(20)
            caller.connect(str(path))
            caller.sendall(b"GET /api/state HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: caller.recv(65536), b""))
        assert b" 200 " in answer.partition(b"\r\n")[0]
        assert server.terminate() == 0
    assert not path.exists()


@pytest.mark.slow
def test_a_server_without_a_dashboard_or_its_packages_says_so(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "kv", *SIZES) as server:
        server.start()
        assert "--dashboard-listen" in run("dashboard", str(server.directory), code=1)
    refused = run("serve", str(tmp_path / "kv"), "--dashboard-listen=0.0.0.0:9465", code=1)
    assert "ssh -L" in refused
    script = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['kvstore', 'serve', "
        f"{str(tmp_path / 'kv2')!r}, '--dashboard-listen=127.0.0.1:0', *{SIZES!r}]; "
        "from kvstore.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'kvstore-llm[dashboard]'" in done.stderr


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Dashboard]:
    """One in this process, of a store in memory."""
    with Store.open(None, host_bytes="4MiB") as store:
        data = DashboardData(store, lambda: {"sessions": 0})
        made = Dashboard("127.0.0.1:0", data, LocalAuthorizer(), tmp_path)
        made.start()
        yield made
        made.stop()


def port_and_key(dashboard: Dashboard) -> tuple[int, str]:
    address = urlsplit(dashboard.address)
    assert address.port is not None
    return address.port, address.fragment.removeprefix("key=")


@pytest.mark.slow
def test_silent_callers_take_no_more_than_their_places_and_are_cut_off(small: Dashboard) -> None:
    port, key = port_and_key(small)
    began = time.monotonic()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CALLERS_MAX + 5)]
    for number, each in enumerate(silent):
        each.settimeout(3 * SILENCE_S)
        with contextlib.suppress(OSError):
            each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" if number % 2 else b"")
    for each in silent:
        with contextlib.suppress(ConnectionError):
            assert each.recv(1) == b""
        each.close()
    assert time.monotonic() - began < 3 * SILENCE_S
    assert ask(port, "/api/state", key).status == 200


@pytest.mark.slow
def test_two_cannot_listen_at_one_place(small: Dashboard, tmp_path: Path) -> None:
    port, _ = port_and_key(small)
    with Store.open(None, host_bytes="4MiB") as store:
        data = DashboardData(store, dict)
        with pytest.raises(DirectoryError, match="dashboard_listen"):
            Dashboard(f"127.0.0.1:{port}", data, LocalAuthorizer(), tmp_path)
        with pytest.raises(DirectoryError, match="dashboard_listen"):
            Dashboard(f"unix:{tmp_path}/none/d.sock", data, LocalAuthorizer(), tmp_path)


def test_a_store_that_is_closed_is_an_answer_and_no_crash(tmp_path: Path) -> None:
    store = Store.open(None, host_bytes="4MiB")
    data = DashboardData(store, dict)
    made = Dashboard("127.0.0.1:0", data, LocalAuthorizer(), tmp_path)
    made.start()
    store.close()
    port, key = port_and_key(made)
    answer = ask(port, "/api/tree", key)
    made.stop()
    assert answer.status == 503
    assert "closed" in answer.document["error"]


@pytest.mark.slow
def test_answers_stay_small_however_large_the_store_is(tmp_path: Path) -> None:
    with Store.open(None, host_bytes="64MiB") as store:
        session = store.session(CacheSpec.opaque("m" * 60, page_tokens=4, page_bytes=512))
        for seed in range(2000):
            save_fast(session, seed)
        for number in range(300):
            store.session(SPEC, tenant=f"{number:03}".ljust(64, "x"))
        data = DashboardData(store, lambda: {"sessions": 0})
        made = Dashboard("127.0.0.1:0", data, LocalAuthorizer(), tmp_path)
        for _ in range(3000):
            data.sample()
        made.start()
        port, key = port_and_key(made)
        sizes = {name: len(view(port, name, key).body) for name in ("state", "history")}
        sizes |= {name: len(view(port, name, key).body) for name in ("chains", "tree")}
        made.stop()
    assert sizes["state"] < 64 << 10, sizes
    assert sizes["chains"] < 16 << 10, sizes
    assert sizes["tree"] < 192 << 10, sizes
    assert sizes["history"] < ANSWER_BYTES_MAX // 2, sizes


def save_fast(session: Any, seed: int) -> None:
    with session.reserve(prompt(seed, 1 + seed % 3)) as made:
        for each in made.views():
            each[:] = bytes(len(each))
        made.commit()


def test_the_page_asks_nobody_else_and_takes_no_name_for_markup() -> None:
    ours = re.compile(r"https?://[^\s\"'<>)]+")
    for name, _ in FILES.values():
        text = (PAGE / name).read_text()
        assert text.isascii(), name
        assert set(ours.findall(text)) <= {"http://www.w3.org/2000/svg"}, name
        assert "//cdn" not in text, name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "@import",
        ):
            assert word not in text, (name, word)
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=\"/)", page)
    assert {file.name for file in PAGE.iterdir()} == {name for name, _ in FILES.values()}


def test_settings_of_the_dashboard_are_settings_of_the_server(tmp_path: Path) -> None:
    made = ServerConfig(directory=tmp_path, dashboard_listen="127.0.0.1:9465")
    assert made.dashboard_listen == "127.0.0.1:9465"
    assert made.dashboard_tokenizer is None
