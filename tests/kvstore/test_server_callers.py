"""Callers that go, change or age: what they would have got goes back, whoever they were."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from known_pages import PAGE_TOKENS, SPEC, load, prompt, save
from raw_client import RawClient, status_of, wait_until

from kvstore import kvstore_pb2 as messages
from kvstore import rpc_guard, servicer, session_registry
from kvstore._version import __version__
from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.identity import Identity, NotAuthenticated, Role
from kvstore.prompt_lookups import PROMPT_BYTES_MAX
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.server_session import TAKEN_BACK_MAX
from kvstore.wire import CONTROL_BYTES_MAX, check_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Status = grpc.StatusCode


class Tokens:
    """Bearer tokens that are good now."""

    def __init__(self) -> None:
        self.good = {"first"}

    def identify(self, context: Any) -> Identity:
        said = dict(context.invocation_metadata() or ()).get("authorization", "Bearer first")
        if said.removeprefix("Bearer ") not in self.good:
            raise NotAuthenticated("the token is not valid here")
        return Identity("default", Role.ADMIN, "token")


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


@pytest.fixture
def server(tmp_path: Path, tokens: Tokens) -> Iterator[Server]:
    config = ServerConfig(directory=tmp_path / "store", host_bytes="16MiB", disk_bytes="64MiB")
    made = Server(config, authorizer=tokens)
    made.store.wait_warm(10.0)
    made.start()
    yield made
    made.store.check()
    assert made.stop()


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    made = RawClient(server.config.address)
    made.open()
    yield made
    made.close()


def is_at_work(function: str) -> bool:
    """Whether a thread of the server is in that call."""
    codes = (
        frame.f_code
        for top in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(top)
    )
    return any(code.co_name == function and code.co_filename == servicer.__file__ for code in codes)


def cancelled(server: Server, client: RawClient, name: str, request: Any) -> None:
    """A call whose client goes while the server works on it."""
    held = threading.Event()
    free = threading.Event()

    def hold() -> None:
        with server.store.state.lock:
            held.set()
            free.wait(20.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5.0)
    before = server.store.state.counters.lookups
    call = getattr(client.stub, name).future(request, timeout=20.0)
    wait_until(lambda: is_at_work(name.lower()))
    call.cancel()
    check = health_pb2_grpc.HealthStub(client.channel).Check
    for _ in range(3):  # the call's end has come before these
        check(health_pb2.HealthCheckRequest(), timeout=20.0)
    free.set()
    holder.join()
    if name == "Match":
        wait_until(lambda: server.store.state.counters.lookups > before)
    assert call.cancelled()


def test_a_match_that_nobody_waits_for_leases_nothing(server: Server, client: RawClient) -> None:
    client.save(prompt(0, 3))
    request = messages.MatchRequest(session=client.session, tokens=prompt(0, 3).tobytes())
    cancelled(server, client, "Match", request)
    wait_until(lambda: server.store.stats().leases == 0, 5.0)
    assert client.match(prompt(0, 3)).pages == 3
    assert server.store.stats().leases == 1, "the session is the same, and still there"


def test_a_reservation_that_nobody_waits_for_keeps_no_pages(
    server: Server, client: RawClient
) -> None:
    request = messages.ReserveRequest(
        session=client.session, tokens=prompt(0, 3).tobytes(), deadline_s=5.0
    )
    cancelled(server, client, "Reserve", request)
    other = RawClient(server.config.address)
    other.open()
    wait_until(lambda: other.reserve(prompt(0, 3)).count == 3, 5.0)
    other.close()


def test_what_a_call_made_is_taken_back_by_its_number_also_before_it_comes(
    server: Server, client: RawClient
) -> None:
    client.save(prompt(0, 3))
    assert client.match(prompt(0, 3), call=7).pages == 3
    other = RawClient(server.config.address)
    other.open()
    wanted = messages.ReserveRequest(
        session=client.session, tokens=prompt(1, 3).tobytes(), deadline_s=5.0, call=8
    )
    assert client.call("Reserve", wanted).count == 3
    assert other.reserve(prompt(1, 3)).reason == "in progress"
    client.call("Release", messages.ReleaseRequest(session=client.session, call=[7, 8, 9, 10]))
    wait_until(lambda: server.store.stats().leases == 0)
    assert other.reserve(prompt(1, 3)).count == 3
    assert status_of(client.match, prompt(0, 3), call=9) is grpc.StatusCode.NOT_FOUND
    wanted.call, wanted.tokens = 10, prompt(2, 3).tobytes()
    assert status_of(client.call, "Reserve", wanted) is grpc.StatusCode.NOT_FOUND
    wait_until(lambda: server.store.stats().leases == 0)
    assert other.reserve(prompt(2, 3)).count == 3
    client.call("Release", messages.ReleaseRequest(session=client.session, call=[0]))
    assert client.match(prompt(0, 3)).pages == 3, "a call without a number is never meant"
    assert client.match(prompt(0, 3), call=11).pages == 3
    assert sorted(each.counts[0] for each in server.registry.sessions()) == [0, 2]
    other.close()


def test_of_calls_taken_back_that_never_came_only_the_last_are_remembered(
    client: RawClient,
) -> None:
    client.save(prompt(0, 3))
    release = messages.ReleaseRequest(session=client.session, call=range(1, TAKEN_BACK_MAX + 2))
    client.call("Release", release)
    assert client.match(prompt(0, 3), call=1).pages == 3
    assert status_of(client.match, prompt(0, 3), call=2) is grpc.StatusCode.NOT_FOUND


def test_a_stream_does_not_outlive_its_credential(
    server: Server, client: RawClient, tokens: Tokens
) -> None:
    """The session ends soon after: leases of a credential that was taken back are nobody's."""
    now = 0.0
    server.registry._clock = lambda: now
    client.save(prompt(0, 2))
    client.match(prompt(0, 2))
    client.beat()
    (session,) = server.registry.sessions()
    session._clock = lambda: now
    session.sign_of_life()
    tokens.good = {"second"}
    assert rpc_guard.CONFIRM_S + session_registry.DOUBT_S < 5.0
    wait_until(lambda: status_of(client.beat) is Status.UNAUTHENTICATED, 5.0)
    server.registry.sweep()
    assert len(server.registry) == 1, "its client may come with a new credential"
    now = session_registry.DOUBT_S + 0.1
    server.registry.sweep()
    assert len(server.registry) == 0
    assert server.store.stats().leases == 0


def test_a_watch_does_not_outlive_its_credential(
    server: Server, client: RawClient, tokens: Tokens
) -> None:
    events = client.stub.Watch(messages.WatchRequest())
    assert next(events).kind == "watching"
    tokens.good = set()
    assert status_of(list, events) is Status.UNAUTHENTICATED


@pytest.mark.slow
def test_a_client_with_a_new_token_keeps_its_session(
    server: Server, tokens: Tokens, tmp_path: Path
) -> None:
    first, second = "first-token-" + "x" * 32, "second-token-" + "x" * 32
    path = tmp_path / "token"
    path.write_text(first)
    path.chmod(0o600)
    tokens.good = {first}
    with connect(
        f"kvstore://{server.config.address}", token_file=path, lookup_deadline_s=5.0
    ) as store:
        assert isinstance(store, RemoteStore)
        session = store.session(SPEC)
        save(session, prompt(0, 2))
        with session.match(prompt(0, 2)) as held:
            path.write_text(second)
            tokens.good = {second}
            live = session._live
            used = store._link.channel.credential
            wait_until(lambda: store._link.channel.credential != used, 10.0)
            assert load(session, prompt(0, 2)) == 2
            assert session._live is live, "a new session would have lost the match"
            assert held.valid()
        assert store.client_counters()["sessions_opened"] == 1


def test_a_reservation_while_the_server_warms_up_is_refused_with_that_reason(
    server: Server,
) -> None:
    with connect(f"kvstore://{server.config.address}", lookup_deadline_s=5.0) as store:
        session = store.session(SPEC)
        with server.store.state.lock:
            server.store.state.warm = False
        with session.reserve(prompt(0, 2)) as run:
            assert (run.count, run.reason) == (0, "warming up")
        assert session.match(prompt(0, 2)).pages == 0
        with server.store.state.lock:
            server.store.state.warm = True
        assert save(session, prompt(0, 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_prompt_longer_than_a_message_is_stored_found_and_pinned(
    tmp_path: Path, shared_memory: bool
) -> None:
    """Its first message is all stored: only a match to go on from reaches the rest."""
    spec = SPEC.opaque("long", page_tokens=1 << 16, page_bytes=4096)
    whole = np.arange(22 << 16, dtype=np.int32)  # 5.5 MiB
    assert 2 * PROMPT_BYTES_MAX > whole.nbytes > CONTROL_BYTES_MAX
    extras = {3: b"early", 19: b"late"}
    config = ServerConfig(directory=tmp_path / "store", host_bytes="16MiB", disk_bytes="64MiB")
    server = Server(config)
    server.store.wait_warm(10.0)
    server.start()
    address = f"kvstore://{config.address}"
    settings: dict[str, Any] = {"shared_memory": shared_memory, "lookup_deadline_s": 10.0}
    with connect(address, **settings) as store:
        session = store.session(spec)
        reasons, pages = [], 0
        while True:
            with session.reserve(whole, extras) as run:
                reasons.append(run.reason)
                if not run.count:
                    break
                assert run.start == pages
                for offset, view in enumerate(run.views()):
                    view[:] = bytes([run.start + offset]) * 4096
                pages += run.commit(durable=True).pages
        assert (pages, reasons[0], reasons[-1]) == (22, "limit", "present")
        with session.match(whole, extras) as hit:
            assert hit.pages == hit.stage(10.0) == 22
            assert [view[0] for view in hit.views()] == list(range(22))
        assert session.match(whole, {3: b"early"}).pages == 19
        assert session.match(whole, {3: b"other", 19: b"late"}).pages == 3
        assert session.match(whole[: 20 << 16], extras).pages == 20
        assert session.pin(whole, 60.0, extras) == 22
        assert session.unpin(whole, extras) == 22
        assert store.client_counters().get("calls_busy", 0) == 0
        assert isinstance(store, RemoteStore)
        with pytest.raises(InvalidRequest, match="shorter beginning"):
            store.explain(whole, namespace=spec.namespace)
        wait_until(lambda: server.store.stats().leases <= 3, 5.0)
    wait_until(lambda: server.store.stats().leases == 0, 5.0)
    assert server.stop()


def neighbours(version: str) -> dict[str, Status]:
    """Forged versions of a client, and what this server says to them."""
    major, minor, *_ = (int(part) for part in version.split("."))
    found = {
        version: Status.OK,
        f"{major}.{minor}.99": Status.OK,
        f"{major}.{minor}.0rc1": Status.OK,
        f"{major}.{minor + 1}.0": Status.FAILED_PRECONDITION,
        f"{major + 1}.{minor}.0": Status.FAILED_PRECONDITION,
        f"{major}.999999.0": Status.FAILED_PRECONDITION,
    }
    found |= {f"{major}.{minor - 1}.7": Status.OK} if minor else {}
    found |= {f"{major}.{minor - 2}.0": Status.FAILED_PRECONDITION} if minor > 1 else {}
    garbage = ("", "x.y", "1", "..", f" {version}", f"{major}.-{minor}.0", "1" * 999, "\u0661.0")
    return found | dict.fromkeys(garbage, Status.INVALID_ARGUMENT)


@pytest.mark.parametrize(("version", "status"), neighbours(__version__).items())
def test_a_client_of_another_version_is_served_or_both_are_named(
    server: Server, version: str, status: Status
) -> None:
    client = RawClient(server.config.address)
    request = messages.OpenRequest(client_version=version, spec_json=SPEC.to_json())
    if status is Status.OK:
        assert client.call("Open", request).server_version == __version__
    else:
        with pytest.raises(grpc.RpcError) as refused:
            client.call("Open", request)
        said = refused.value.details()
        assert refused.value.code() is status, said
        assert len(said) < 300
        if status is Status.FAILED_PRECONDITION:
            assert version in said
            assert __version__ in said
    client.close()


def test_a_server_serves_its_own_and_the_previous_minor_version() -> None:
    for theirs in ("2.5.0", "2.5.9", "2.4.1", "2.4"):
        assert check_version(theirs, "2.5.3") == ""
    for theirs in ("2.3.9", "2.6.0", "1.5.3", "3.5.3"):
        said = check_version(theirs, "2.5.3")
        assert theirs in said
        assert "2.5.3" in said


def test_what_a_newer_client_says_besides_is_ignored(server: Server, client: RawClient) -> None:
    """Fields that this version does not know: field 2000, of each wire type."""
    unknown = b"\x80\x7d\x01" + b"\x82\x7d\x03abc" + b"\x85\x7d\x00\x00\x00\x00"
    handle = client.channel.unary_unary("/kvstore.v1.KVStore/Match")
    client.save(prompt(0, 2))
    request = messages.MatchRequest(session=client.session, tokens=prompt(0, 2).tobytes())
    reply = messages.MatchReply.FromString(handle(request.SerializeToString() + unknown, timeout=5))
    assert reply.pages == 2
    known = messages.MatchReply.FromString(reply.SerializeToString() + unknown)
    assert known.pages == 2


def test_an_old_request_without_the_new_fields_means_what_it_meant(client: RawClient) -> None:
    client.save(prompt(0, 2))
    old = b"\n\x10" + client.session + b"\x12" + bytes([8 * PAGE_TOKENS])
    old += prompt(0, 2).tobytes() + b"\x21" + np.float64(1.0).tobytes()
    handle = client.channel.unary_unary("/kvstore.v1.KVStore/Reserve")
    assert messages.ReserveReply.FromString(handle(old, timeout=5)).reason == "present"
