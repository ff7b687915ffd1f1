"""The parts of a client that need no server: addresses, settings, breaker, giving back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.breaker import Breaker
from kvstore.client_config import ClientConfig
from kvstore.connect import connect
from kvstore.errors import ConfigError
from kvstore.give_back import GiveBack
from kvstore.private_server import PrivateServer
from kvstore.server_address import parse_address
from kvstore.socket_probe import why_unreachable
from kvstore.store import Store


@pytest.mark.parametrize(
    ("where", "target", "path"),
    [
        ("kvstore://unix:/run/kv.sock", "unix:/run/kv.sock", "/run/kv.sock"),
        ("kvstore://cache-host:7070", "cache-host:7070", None),
        ("kvstore://[::1]:7070", "[::1]:7070", None),
        ("/var/cache/kv", "unix:/var/cache/kv/kvstore.sock", "/var/cache/kv/kvstore.sock"),
    ],
)
def test_an_address_names_a_socket_or_a_port(where: str, target: str, path: str | None) -> None:
    address = parse_address(where)
    assert address.target == target
    assert address.socket == (Path(path) if path else None)
    assert address.directory == (None if "://" in where else Path(where))


@pytest.mark.parametrize(
    "where",
    [
        "",
        "a\0b",
        "redis://host:1",
        "kvstore://",
        "kvstore://host",
        "kvstore://host:0",
        "kvstore://host:65536",
        "kvstore://a b:1",
        "kvstore://unix:relative.sock",
        "kvstore://host:70/x",
        "/" + "d" * 100,
    ],
)
def test_a_malformed_address_is_refused(where: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(where)


@pytest.mark.parametrize(
    "settings",
    [
        {"lookup_deadline_s": -1},
        {"lookup_deadline_s": float("nan")},
        {"stage_deadline_s": 61},
        {"open_wait_s": "soon"},
        {"cert_file": "/x"},
    ],
)
def test_bad_client_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ClientConfig(**settings)


def test_connect_refuses_settings_that_do_not_fit_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        connect("kvstore://unix:/nowhere.sock", host_bytes="1GiB")
    with pytest.raises(ConfigError, match="no_such_setting"):
        connect(tmp_path / "store", no_such_setting=1)
    assert not (tmp_path / "store").exists()


def test_connect_to_nothing_is_a_store_in_this_process() -> None:
    with connect(None, host_bytes="1MiB") as store:
        assert isinstance(store, Store)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 40)
    path.chmod(0o644)
    with pytest.raises(ConfigError):
        connect("kvstore://localhost:1", token_file=path, insecure_network=True)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="5 characters"):
        connect("kvstore://localhost:1", token_file=path, insecure_network=True)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 5000, 1_000_000])
def test_an_encoded_request_is_what_protobuf_would_have_made(count: int) -> None:
    from kvstore import kvstore_pb2 as pb
    from kvstore.client_channel import with_tokens

    tokens = b"\x07\0\0\0" * count
    extras = pb.Extras(page_index=[3], content=[b"x"])
    for kind in (pb.MatchRequest, pb.ReserveRequest):
        encoded = with_tokens(kind(session=b"s" * 16, extras=extras), tokens)
        whole = kind(session=b"s" * 16, tokens=tokens, extras=extras)
        assert kind.FromString(encoded) == whole


def test_the_breaker_opens_after_failures_in_a_row_and_closes_on_a_sign_of_life() -> None:
    breaker = Breaker(failures_max=3, pause_s_min=1.0, pause_s_max=3.0)
    assert not breaker.failed(0)
    assert not breaker.failed(0)
    assert not breaker.is_open
    assert breaker.failed(0)
    assert breaker.is_open
    assert not breaker.alive(0.5), "a sign of life within the pause"
    assert breaker.alive(1.0)
    assert not breaker.is_open


def test_a_breaker_that_opens_again_pauses_for_longer() -> None:
    breaker = Breaker(failures_max=3, pause_s_min=1.0, pause_s_max=3.0)
    for _ in range(3):
        breaker.failed(0)
    for now, next_pause_s in ((10, 2.0), (20, 3.0), (30, 3.0)):
        assert breaker.alive(now)
        assert breaker.failed(now), "one failure is enough now"
        assert not breaker.alive(now + next_pause_s - 0.1)
    assert breaker.times_opened == 4
    assert breaker.succeeded()
    assert not breaker.failed(40)
    assert not breaker.failed(40)
    assert breaker.failed(40)
    assert breaker.alive(41.0), "a success made the pause short again"


class Peer:
    """What GiveBack sees of a session and a server."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.calls: list[tuple[str, list[int]]] = []
        self.answers: list[bool] = []
        self.called = threading.Semaphore(0)

    def send(self, session: Any, method: str, numbers: list[int]) -> bool:
        assert session is self
        self.calls.append((method, numbers))
        self.called.release()
        return self.answers.pop() if self.answers else True


def test_many_releases_go_back_in_one_call() -> None:
    peer = Peer()
    back = GiveBack(peer.send)
    for number in range(100):
        back.release(peer, number)  # type: ignore[arg-type]
    assert peer.called.acquire(timeout=5)
    back.stop(5)
    assert sorted(n for _, numbers in peer.calls for n in numbers) == list(range(100))
    assert len(peer.calls) <= 3


def test_what_could_not_be_given_back_is_tried_again() -> None:
    peer = Peer()
    peer.answers = [False]
    back = GiveBack(peer.send)
    back.abort(peer, 7)  # type: ignore[arg-type]
    assert peer.called.acquire(timeout=5)
    assert peer.called.acquire(timeout=5)
    back.stop(5)
    assert peer.calls[:2] == [("Abort", [7]), ("Abort", [7])]


def test_settling_waits_for_what_is_on_its_way_and_what_is_not_yet() -> None:
    peer, answering = Peer(), threading.Event()

    def send(session: Any, method: str, numbers: list[int]) -> bool:
        done = peer.send(session, method, numbers)
        return answering.wait(20) and done

    back = GiveBack(send)
    back.settle(20.0)  # nothing to wait for
    back.gather_s = 600.0
    back.release(peer, 1)  # type: ignore[arg-type]
    back.settle(0.0)
    assert peer.called.acquire(timeout=5), "the wait for company is over"
    back.release(peer, 2)  # type: ignore[arg-type]
    back.settle(0.0)
    assert back.released == 0, "no longer than it may"
    answering.set()
    back.settle(20.0)
    assert back.released == 2
    assert [numbers for _, numbers in peer.calls] == [[1], [2]]
    back.stop(5)
    back.settle(20.0)


def test_nothing_is_given_back_to_a_session_that_is_over() -> None:
    peer, other = Peer(), Peer()
    peer.over.set()
    back = GiveBack(other.send)
    back.release(peer, 1)  # type: ignore[arg-type]
    back.release(other, 2)  # type: ignore[arg-type]
    back.stop(5)
    assert other.calls == [("Release", [2])]


def test_with_a_server_that_takes_no_call_back_a_session_ends_after_some() -> None:
    from kvstore.kvstore_pb2 import OpenReply
    from kvstore.live_session import ABANDONED_MAX, LiveSession

    old = OpenReply.FromString(OpenReply(session=b"s" * 16, boot_epoch=1).SerializeToString())
    live = LiveSession(old, None)
    assert not live.takes_back
    for _ in range(ABANDONED_MAX - 1):
        live.abandoned("Match")
    assert not live.over.is_set()
    live.abandoned("Match")
    assert live.over.is_set()
    live = LiveSession(old, None)
    live.abandoned("Reserve")
    assert live.over.is_set(), "nobody else could write those pages"


def test_a_socket_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert "No such file" in why_unreachable(path, os.geteuid())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert "refused" in why_unreachable(path, os.geteuid())
        listener.listen()
        assert why_unreachable(path, os.geteuid()) == ""
        assert "not trusted" in why_unreachable(path, os.geteuid() + 1)


def test_a_private_server_is_started_once_and_again_only_after_a_pause(tmp_path: Path) -> None:
    now = [100.0]
    starter = PrivateServer(tmp_path / "store", {"host_bytes": 1}, clock=lambda: now[0])
    starter._command = [sys.executable, "-c", "import sys; print('no'); sys.exit(3)"]
    starter.ensure()
    first = starter._process
    assert first is not None
    assert first.wait(10) == 3
    starter.ensure()
    assert starter._process is first, "it failed just now"
    now[0] += 1.0
    starter.ensure()
    assert starter._process is not first
    assert starter.trouble == "its server ended with 3: no"
    assert starter.log.parent == tmp_path
    assert starter.log.stat().st_mode & 0o777 == 0o600
    assert starter._process is not None
    starter._process.wait(10)


@pytest.mark.slow
def test_connecting_to_nothing_and_a_store_in_memory_load_no_grpc() -> None:
    code = (
        "import sys; from kvstore.connect import connect; connect(None, host_bytes='1MiB').close();"
        "assert 'grpc' not in sys.modules and 'google.protobuf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_busy_server_that_says_nothing_is_left_alone_for_longer_each_time() -> None:
    """gRPC itself refuses calls past its limit, and gives no hint."""
    from kvstore.client_channel import CallFailed, Failure
    from kvstore.client_link import HOLD_S_MIN, ServerLink, _accepted
    from kvstore.kvstore_pb2 import OpenReply
    from kvstore.live_session import LiveSession

    link = ServerLink(parse_address("kvstore://unix:/nowhere.sock"), ClientConfig())
    live = LiveSession(OpenReply(), None)
    holds = []
    for _ in range(8):
        link.failed(live, "Match", CallFailed(Failure.BUSY, "too many"))
        holds.append(live.holds["Match"].doubled_s)
    assert holds[:3] == [HOLD_S_MIN, 2 * HOLD_S_MIN, 4 * HOLD_S_MIN]
    assert holds[-1] == 1.0
    assert not link._may_call(live, "Match")
    assert link._may_call(live, "Reserve")
    assert link._may_call(LiveSession(OpenReply(), None), "Match"), "another session's"
    _accepted(live, "Match")
    assert not link._may_call(live, "Match"), "an answer to an earlier call ends no hold"
    link.failed(live, "Match", CallFailed(Failure.BUSY, "too many"))
    assert live.holds["Match"].doubled_s == HOLD_S_MIN
    link.close()
