"""The exposition: it parses, says what happened, names nobody; docs and dashboard agree with it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_BYTES, SPEC, load, prompt, save
from prometheus_client.parser import text_string_to_metric_families

from kvstore import Store
from kvstore.auth import CredentialAuthorizer
from kvstore.connect import connect
from kvstore.errors import ConfigError, DirectoryError
from kvstore.identity import Role
from kvstore.meters import ENGINES_MAX, OTHER, TENANTS_MAX, Histogram, Meters
from kvstore.metrics import METRICS, Kind, StoreMetrics, tenant_label
from kvstore.metrics_http import CALLERS_MAX, MetricsServer
from kvstore.metrics_listen import check_metrics_listen
from kvstore.removal import Selection
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.tenant_watch import TenantWatch
from kvstore.tenants import Quota, TenantBook, edit_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


def samples(exposition: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of ours, parsed by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(exposition: bytes, name: str, **labels: str) -> float:
    found = samples(exposition)
    return sum(
        number
        for (each, given), number in found.items()
        if each == name and labels.items() <= dict(given).items()
    )


def test_what_happens_is_in_the_exposition(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB") as store:
        session = store.session(SPEC, tenant="acme", writer="engine-1")
        save(session, prompt(0, 4), durable=True)
        assert load(session, prompt(0, 4)) == 4
        session.match(prompt(9, 2))
        session.report_saved(1.5)
        store.evict(Selection(tenant="acme"))
        save(session, prompt(0, 4), durable=True)
        text = StoreMetrics(store).render()
        who = {"tenant": tenant_label(store.state.secret, "acme"), "engine": "engine-1"}
    assert value(text, "kvstore_requests_total", **who) == 2
    assert value(text, "kvstore_request_hits_total", **who) == 1
    assert value(text, "kvstore_requested_tokens_total", **who) == 24
    assert value(text, "kvstore_hit_tokens_total", tier="host", **who) == 16
    assert value(text, "kvstore_hit_tokens_total", tier="disk", **who) == 0
    assert value(text, "kvstore_stored_pages_total", **who) == 8
    assert value(text, "kvstore_prefill_saved_seconds_total", **who) == 1.5
    assert value(text, "kvstore_moved_bytes_total", source="writer") == 8 * PAGE_BYTES
    assert value(text, "kvstore_moved_bytes_total", target="disk") == 8 * PAGE_BYTES
    assert value(text, "kvstore_left_pages_total", reason="operator") == 4
    assert value(text, "kvstore_missed_pages_total", reason="operator") == 4
    assert value(text, "kvstore_lookup_duration_seconds_count") == 2
    assert value(text, "kvstore_store_duration_seconds_count") == 2
    assert value(text, "kvstore_load_duration_seconds_count") == 1
    assert value(text, "kvstore_tier_pages", tier="disk") == 4
    assert value(text, "kvstore_tenant_used_bytes", tenant=who["tenant"], tier="disk") > 0
    assert value(text, "kvstore_warm") == 1


def test_pages_that_only_the_disk_had_are_counted_there_and_staged(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, 4), durable=True)
    with Store.open(tmp_path / "s", host_bytes="8MiB") as store:
        assert load(store.session(SPEC), prompt(0, 4)) == 4
        text = StoreMetrics(store).render()
    assert value(text, "kvstore_hit_tokens_total", tier="disk") == 16
    assert value(text, "kvstore_stage_duration_seconds_count") == 1
    assert value(text, "kvstore_moved_bytes_total", source="disk", target="host") == 4 * PAGE_BYTES


def test_no_tenant_and_no_token_stands_in_a_label() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        save(store.session(SPEC, tenant="acme-secret-name"), prompt(0, 2))
        text = StoreMetrics(store).render()
        assert b"acme" not in text
        assert str(int(prompt(0, 2)[0])).encode() not in text
        assert tenant_label(b"k" * 32, "acme") != tenant_label(b"j" * 32, "acme")


def test_rows_are_bounded_and_a_tenant_can_take_no_others() -> None:
    meters = Meters()
    for number in range(100):
        meters.of("loud", f"engine-{number}").requests += 1
    meters.of("quiet", "engine").requests += 1
    engines = [engine for tenant, engine, _ in meters.traffic() if tenant == "loud"]
    assert len(engines) == ENGINES_MAX + 1
    assert meters.of("loud", "engine-99") is meters.of("loud", OTHER)
    assert sum(row.requests for _, _, row in meters.traffic()) == 101
    for number in range(2 * TENANTS_MAX):
        meters.of(f"t{number}", "e").requests += 1
    assert len({tenant for tenant, _, _ in meters.traffic()}) == TENANTS_MAX + 1


def test_a_histogram_counts_each_value_in_the_first_bound_that_holds_it() -> None:
    histogram = Histogram()
    for seconds in (25e-6, 26e-6, 99.0):
        histogram.observe(seconds)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1]) == (1, 1, 1)
    assert histogram.sum_s == pytest.approx(99.000051)


def test_names_and_units_keep_to_the_conventions() -> None:
    for each in METRICS:
        assert re.fullmatch(r"kvstore_[a-z]+(_[a-z]+)*", each.name), each.name
        assert not each.name.endswith("_total"), each.name
        assert each.help.endswith("."), each.name
        if each.kind is Kind.HISTOGRAM:
            assert each.name.endswith("_seconds"), each.name
    assert len({each.name for each in METRICS}) == len(METRICS)


def test_every_metric_of_the_table_is_in_the_exposition_and_no_other(tmp_path: Path) -> None:
    config = ServerConfig(directory=tmp_path / "s", host_bytes="16MiB", disk_bytes="64MiB")
    server = Server(config)
    server.start()
    server.store.wait_warm(10.0)
    save(server.store.session(SPEC), prompt(0, 1))
    text = StoreMetrics(server.store, server.service_stats).render()
    server.stop()
    typed = dict(re.findall(r"^# TYPE (kvstore_\w+) (\w+)$", text.decode(), re.MULTILINE))
    assert typed == {each.exposed_name: each.kind.value for each in METRICS}
    for each in METRICS:
        names = {name for name, _ in samples(text)}
        suffix = "_count" if each.kind is Kind.HISTOGRAM else ""
        # There are no quotas here, and no shadows.
        absent = each.name in ("kvstore_tenant_share_bytes", "kvstore_policy_hit_ratio")
        assert absent or each.exposed_name + suffix in names, each.name


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert rows == [
        (each.exposed_name, each.kind.value, ", ".join(each.labels) or "-", each.help)
        for each in METRICS
    ]


def expressions() -> list[str]:
    """All queries of the dashboard and of the alert rules."""
    board = json.loads((ROOT / "deploy/grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = (ROOT / "deploy/alerts.yml").read_text()
    return found + [
        json.loads(line) for line in re.findall(r"^\s+expr: (.*)$", rules, re.MULTILINE)
    ]


def test_dashboard_and_alerts_name_metrics_and_labels_that_there_are() -> None:
    queries = expressions()
    assert len(queries) > 25
    labels = {each.exposed_name: {*each.labels} for each in METRICS}
    for each in METRICS:
        if each.kind is Kind.HISTOGRAM:
            del labels[each.name]
            labels |= {f"{each.name}_{part}": {"le"} for part in ("bucket", "sum", "count")}
    for query in queries:
        used = re.findall(r"kvstore_\w+", query)
        assert used, query
        assert set(used) <= set(labels), query
        known = set.union(*(labels[name] for name in used)) | {"instance", "le"}
        grouped = {
            name.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", query)
            for name in group.split(",")
        }
        matched = set(re.findall(r"(\w+)=~?\"", query))
        assert grouped | matched <= known, query
        assert query.count("(") == query.count(")"), query


def test_only_this_host_can_be_asked_to_listen_for() -> None:
    for good in (
        "",
        "unix:/run/m.sock",
        "127.0.0.1:9464",
        "[::1]:9464",
        "localhost:0",
        "127.9.9.9:1",
    ):
        assert check_metrics_listen(good) == good
    for bad in ("0.0.0.0:9464", "9464", "10.0.0.1:9464", "127.0.0.1:x", "[::]:1", "unix:relative"):
        with pytest.raises(ConfigError, match="metrics_listen"):
            check_metrics_listen(bad)


def get(
    port: int, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def nothing(tenant: str | None) -> bytes:
    return b""


@pytest.fixture
def exporter() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", lambda tenant: b"kvstore_pages 1.0\n", None)
    server.start()
    yield server
    server.stop()


def test_there_is_one_page_and_it_can_only_be_read(exporter: MetricsServer) -> None:
    assert get(exporter.port) == (200, b"kvstore_pages 1.0\n")
    assert get(exporter.port, "/")[0] == 404
    assert get(exporter.port, "/metrics/../etc")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert get(exporter.port, method=method)[0] == 501


def test_callers_that_say_nothing_take_no_more_than_their_places(exporter: MetricsServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(CALLERS_MAX)]
    for each in silent:
        each.sendall(b"GET /metrics HTTP/1.1\r\n")
    extra = socket.create_connection(("127.0.0.1", exporter.port), timeout=10)
    extra.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert extra.recv(100) == b""
    for each in (*silent, extra):
        each.close()


def test_two_cannot_listen_at_one_place(exporter: MetricsServer, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="metrics_listen"):
        MetricsServer(f"unix:{tmp_path}/none/m.sock", nothing, None)
    first = MetricsServer(f"unix:{tmp_path}/m.sock", nothing, None)
    first.start()
    with pytest.raises(DirectoryError, match="in use"):
        MetricsServer(f"unix:{tmp_path}/m.sock", nothing, None)
    assert (tmp_path / "m.sock").stat().st_mode & 0o777 == 0o600
    first.stop()
    assert not (tmp_path / "m.sock").exists()


def test_where_calls_need_a_credential_so_does_the_exposition(tmp_path: Path) -> None:
    tokens: dict[Role, str] = {}

    def edit(book: TenantBook) -> TenantBook:
        book = book.with_tenant("acme", Quota())
        for role in (Role.METRICS, Role.ADMIN, Role.READER, Role.WRITER):
            book, tokens[role] = book.with_token("acme", role, 0.0, None)
        return book

    edit_tenants(tmp_path / "tenants.json", edit, create=True)
    authorizer = CredentialAuthorizer(TenantWatch(tmp_path / "tenants.json"), certificates=False)
    server = MetricsServer("127.0.0.1:0", lambda tenant: f"{tenant}\n".encode(), authorizer)
    server.start()
    answers = {
        role: get(server.port, Authorization=f"Bearer {token}") for role, token in tokens.items()
    }
    none, junk = get(server.port)[0], get(server.port, Authorization="Bearer nonsense")[0]
    server.stop()
    assert answers.pop(Role.METRICS) == (200, b"acme\n")
    assert answers.pop(Role.ADMIN) == (200, b"None\n")
    assert {role: status for role, (status, _) in answers.items()} == {
        Role.READER: 403,
        Role.WRITER: 403,
    }
    assert (none, junk) == (401, 401)


def test_one_tenants_part_has_no_number_of_others(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB") as store:
        metrics = StoreMetrics(store, dict)
        for number, tenant in enumerate(("acme", "globex", OTHER)):
            session = store.session(SPEC, tenant=tenant, writer=f"engine-of-{tenant}")
            save(session, prompt(number, 2 + number), durable=True)
            assert load(session, prompt(number, 2)) == 2
        before = samples(metrics.render("acme"))
        session = store.session(SPEC, tenant="globex", writer="engine-of-globex")
        save(session, prompt(7, 9))
        session.match(prompt(8, 1))
        mine = metrics.render("acme")
        label = tenant_label(store.state.secret, "acme")
        nobody = metrics.render("nobody")
        shared = metrics.render(OTHER)
    assert samples(mine) == before, "what others do changes nothing"
    assert value(mine, "kvstore_requests_total", tenant=label, engine="engine-of-acme") == 1
    assert value(mine, "kvstore_hit_tokens_total", tenant=label, tier="host") == 8
    assert value(mine, "kvstore_tenant_used_bytes", tenant=label, tier="disk") > 0
    assert {name for name, labels in before if not dict(labels).get("tenant")} == {
        "kvstore_build_info",
        "kvstore_warm",
    }
    assert {dict(labels).get("tenant", label) for _, labels in before} == {label}
    assert b"globex" not in mine
    assert b"process_" not in mine
    assert value(nobody, "kvstore_tenant_used_bytes") == 0
    assert b"kvstore_requests" not in nobody
    assert b"kvstore_requests" not in shared, "that row may be of tenants past the bound"


@pytest.mark.slow
def test_a_server_with_tenants_shows_each_credential_its_own_part(tmp_path: Path) -> None:
    """As SECURITY.md says it: admin all, metrics its own tenant's numbers, others nothing."""
    from server_process import ServerProcess

    tokens: dict[tuple[str, Role], str] = {}

    def edit(book: TenantBook) -> TenantBook:
        for tenant in ("acme", "globex"):
            book = book.with_tenant(tenant, Quota())
            for role in (Role.METRICS, Role.ADMIN, Role.WRITER):
                book, tokens[tenant, role] = book.with_token(tenant, role, 0.0, None)
        return book

    edit_tenants(tmp_path / "tenants.json", edit, create=True)
    path = tmp_path / "metrics.sock"
    flags = (
        *("--host-bytes=16MiB", "--disk-bytes=64MiB", f"--metrics-listen=unix:{path}"),
        f"--tenants-file={tmp_path}/tenants.json",
    )
    with ServerProcess(tmp_path / "store", *flags) as server:
        server.start()
        for number, tenant in enumerate(("acme", "globex")):
            file = tmp_path / f"{tenant}.token"
            file.touch(mode=0o600)
            file.write_text(tokens[tenant, Role.WRITER])
            with connect(server.address, token_file=file, open_wait_s=10.0) as store:
                assert save(store.session(SPEC, writer=tenant), prompt(number, 3 + number)) > 0
        seen = {
            who: samples(ask(path, token))
            for who, token in tokens.items()
            if who[1] is not Role.WRITER
        }
        with pytest.raises(AssertionError, match="403"):
            ask(path, tokens["acme", Role.WRITER])
        with pytest.raises(AssertionError, match="401"):
            ask(path)
        assert server.terminate() == 0

    def engines(who: tuple[str, Role]) -> dict[str, float]:
        return {
            dict(labels)["engine"]: number
            for (name, labels), number in seen[who].items()
            if name == "kvstore_stored_pages_total"
        }

    assert engines(("acme", Role.METRICS)) == {"acme": 3}
    assert engines(("globex", Role.METRICS)) == {"globex": 4}
    assert engines(("acme", Role.ADMIN)) == {"acme": 3, "globex": 4}
    assert ("kvstore_pages", ()) in seen["acme", Role.ADMIN]
    for tenant in ("acme", "globex"):
        part = seen[tenant, Role.METRICS]
        assert len({dict(labels)["tenant"] for _, labels in part if "tenant" in dict(labels)}) == 1
        assert {name for name, labels in part if "tenant" not in dict(labels)} == {
            "kvstore_build_info",
            "kvstore_warm",
        }


@pytest.mark.slow
def test_a_server_process_serves_its_metrics_at_a_socket(tmp_path: Path) -> None:
    from server_process import ServerProcess

    path = tmp_path / "metrics.sock"
    flags = ("--host-bytes=16MiB", "--disk-bytes=64MiB", f"--metrics-listen=unix:{path}")
    with ServerProcess(tmp_path / "store", *flags) as server:
        server.start()
        assert value(ask(path), "kvstore_warm") == 1
        assert server.terminate() == 0
    assert not path.exists()
    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvstore.cli",
            "serve",
            str(tmp_path / "store"),
            "--check-config",
            "--metrics-listen=0.0.0.0:1",
        ],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1
    assert "loopback" in refused.stderr


def ask(path: Path, token: str = "") -> bytes:
    """GET /metrics from a Unix socket."""
    credential = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(10)
        caller.connect(str(path))
        caller.sendall(f"GET /metrics HTTP/1.0\r\n{credential}\r\n".encode())
        answer = b"".join(iter(lambda: caller.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head, head
    return body


def test_the_registry_of_the_process_is_left_alone() -> None:
    from prometheus_client import REGISTRY

    before: list[Any] = list(REGISTRY.collect())
    with Store.open(None, host_bytes="4MiB") as store:
        StoreMetrics(store).render()
    assert len(list(REGISTRY.collect())) == len(before)


@pytest.mark.slow
def test_what_a_client_says_it_saved_reaches_the_server_with_its_heartbeat(tmp_path: Path) -> None:
    from kvstore.connect import connect

    config = ServerConfig(directory=tmp_path / "s", host_bytes="16MiB", disk_bytes="64MiB")
    server = Server(config)
    server.start()
    with connect(f"kvstore://{config.address}", lookup_deadline_s=5.0) as store:
        session = store.session(SPEC, writer="engine-1")
        session.match(prompt(0, 1))
        session.report_saved(2.5)
        row = server.store.state.meters.of("default", "engine-1")
        pause, tries = threading.Event(), 0
        while not row.prefill_saved_s and tries < 400:  # a heartbeat is a second away
            tries += 1
            pause.wait(0.025)
    assert row.prefill_saved_s == 2.5
    server.stop()
