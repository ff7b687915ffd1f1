"""The server by its wire: sessions, matches, reservations, streams, refusals; bare stubs."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, content, prompt
from raw_client import RawClient, status_of, wait_until

from kvstore import kvstore_pb2 as messages
from kvstore.errors import ConfigError, DirectoryError
from kvstore.identity import ROLES, Identity, NotAuthenticated, Role
from kvstore.kvstore_pb2_grpc import KVStoreStub
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.shared_memory import attach
from kvstore.wire import CONTROL_BYTES_MAX, ENDLESS, RETRY_KEY, SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_BYTES = 16 << 20
Status = grpc.StatusCode


class ByMetadata:
    """Takes tenant and role from metadata, as a credential would say them."""

    def identify(self, context: Any) -> Identity:
        said = dict(context.invocation_metadata())
        if "who" not in said:
            raise NotAuthenticated("say who")
        tenant, role = said["who"].split("/")
        return Identity(tenant, Role(role))


def config_of(directory: Path, **settings: Any) -> ServerConfig:
    """A small server's settings."""
    return ServerConfig(
        **{"directory": directory, "host_bytes": HOST_BYTES, "disk_bytes": "64MiB"} | settings
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(config_of(tmp_path_factory.mktemp("server") / "store"))
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
    wait_until(lambda: not len(server.registry))


_seeds = iter(range(1000))


def fresh(pages: int) -> np.ndarray:
    """A prompt that no other test has."""
    return prompt(next(_seeds), pages)


def test_what_one_client_stores_another_finds(server: Server, client: RawClient) -> None:
    tokens = fresh(5)
    assert client.save(tokens) == 5
    other = RawClient(server.config.address)
    other.open()
    found = other.match(tokens)
    assert found.pages == 5
    assert list(other.pages(found.places)) == [content(tokens, page) for page in range(5)]
    other.close()


def test_a_durable_commit_says_so(client: RawClient) -> None:
    tokens = fresh(3)
    reserved = client.reserve(tokens)
    client.fill(tokens, reserved)
    done = client.commit(reserved.reservation, durable=True)
    assert (done.pages, done.durable) == (3, True)
    present = client.reserve(tokens)
    assert (present.count, present.reason) == (0, "present")
    assert client.commit(present.reservation, durable=True).durable


def test_pages_travel_without_shared_memory(server: Server) -> None:
    client = RawClient(server.config.address)
    reply = client.open(shared_memory=False)
    assert (reply.attach_token, reply.staging_bytes) == (b"", 0)
    tokens = fresh(3)
    reserved = client.reserve(tokens)
    assert reserved.staging_offsets == b""
    whole = b"".join(content(tokens, page) for page in range(3))
    pieces = [whole[:1], whole[1:5000], whole[5000:]]  # across the pages' ends
    assert client.write_stream(reserved.reservation, pieces).pages == 3
    found = client.match(tokens)
    assert client.read_stream(found.match, 0, 3) == whole
    assert client.read_stream(found.match, 1, 2) == content(tokens, 1)
    assert status_of(client.read_stream, found.match, 0, 4) is Status.INVALID_ARGUMENT
    client.close()


@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1, 2 * PAGE_BYTES + 1, 4 * PAGE_BYTES])
def test_a_stream_of_the_wrong_length_stores_nothing(client: RawClient, size: int) -> None:
    tokens = fresh(2)
    reserved = client.reserve(tokens)
    status = status_of(client.write_stream, reserved.reservation, [bytes(size)])
    assert status is Status.INVALID_ARGUMENT
    assert client.match(tokens).pages == 0
    assert client.save(tokens) == 2  # and the slots are free again


def test_a_writer_that_scribbles_changes_no_published_page(client: RawClient) -> None:
    tokens = fresh(2)
    reserved = client.reserve(tokens)
    client.fill(tokens, reserved)
    client.commit(reserved.reservation)
    assert client.attachment is not None
    assert client.attachment.staging is not None
    view = client.attachment.staging.view(0, client.attachment.staging.size)
    view[:] = bytes(len(view))
    view.release()
    assert list(client.pages(client.match(tokens).places)) == [
        content(tokens, page) for page in range(2)
    ]


def test_a_longer_prompt_goes_on_from_a_match(client: RawClient) -> None:
    tokens = fresh(6)
    client.save(tokens)
    first = client.match(tokens[: 2 * PAGE_TOKENS])
    assert first.pages == 2
    longer = client.match(tokens[2 * PAGE_TOKENS :], after_match=first.match)
    assert longer.pages == 6
    assert longer.places.host_slots.startswith(first.places.host_slots)


def test_extras_decide_what_matches(client: RawClient) -> None:
    tokens = fresh(2)
    extras = messages.Extras(page_index=[1], content=[b"image"])
    request = messages.ReserveRequest(
        session=client.session, tokens=tokens.tobytes(), extras=extras, deadline_s=1.0
    )
    reserved = client.call("Reserve", request)
    client.fill(tokens, reserved)
    client.commit(reserved.reservation)
    assert client.match(tokens).pages == 1
    assert client.match(tokens, extras=extras).pages == 2
    uneven = messages.Extras(page_index=[1])
    assert status_of(client.match, tokens, extras=uneven) is Status.INVALID_ARGUMENT


def test_a_reservation_takes_no_more_than_staging_has(server: Server) -> None:
    client = RawClient(server.config.address)
    staging = client.open().staging_bytes // PAGE_BYTES
    tokens = fresh(staging + 3)
    first = client.reserve(tokens)
    assert (first.count, first.reason) == (staging, "limit")
    assert (client.reserve(fresh(1)).count, client.reserve(fresh(1)).reason) == (0, "limit")
    client.fill(tokens, first)
    assert client.commit(first.reservation).pages == staging
    assert client.save(tokens) == 3
    client.close()


def test_a_session_leases_at_most_a_quarter_of_the_arena(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    cut = server.store.state.counters.lookups_cut
    client = RawClient(server.config.address)
    client.open()
    whole = server.store.config.host_bytes // PAGE_BYTES
    tokens = fresh(whole // 3)
    client.save(tokens)
    held = client.match(tokens)
    assert 0 < held.pages <= whole // 4
    assert held.reason == "lease limit"
    again = client.match(tokens)
    assert again.pages == held.pages, "the same pages count once"
    other = fresh(2)
    client.save(other)
    refused = client.match(other)
    assert (refused.match, refused.pages, refused.reason) == (0, 0, "lease limit")
    assert client.match(fresh(1)).reason == "", "nothing is stored of it"
    assert server.store.state.counters.lookups_cut == cut + 3
    lines = [each for each in caplog.messages if "raise host_bytes" in each]
    assert len(lines) == 1, "said once"
    assert f"{held.pages} of {whole // 3} stored pages" in lines[0]
    client.call("Release", messages.ReleaseRequest(session=client.session, match=[held.match]))
    assert client.match(other).pages == 0
    client.call("Release", messages.ReleaseRequest(session=client.session, match=[again.match]))
    found = client.match(other)
    assert (found.pages, found.reason) == (2, "")
    client.close()


def test_pages_on_disk_come_back_by_stage(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    tokens = fresh(4)
    for is_first in (True, False):
        server = Server(config_of(directory))
        server.store.wait_warm(10.0)
        server.start()
        client = RawClient(server.config.address)
        client.open()
        if is_first:
            client.save(tokens, durable=True)
        else:
            found = client.match(tokens)
            assert np.frombuffer(found.places.host_slots, "<i8").tolist() == [-1] * 4
            request = messages.StageRequest(
                session=client.session, match=found.match, deadline_s=5.0
            )
            staged = client.call("Stage", request)
            assert staged.host_pages == 4
            assert list(client.pages(staged.places)) == [content(tokens, i) for i in range(4)]
        client.close()
        assert server.stop()


@pytest.mark.parametrize("way", ["close", "stream", "attachment"])
def test_the_end_of_a_client_gives_everything_back(server: Server, way: str) -> None:
    client = RawClient(server.config.address)
    client.open()
    client.beat()
    tokens = fresh(4)
    client.save(tokens[: 2 * PAGE_TOKENS])
    client.match(tokens)
    reserved = client.reserve(tokens)
    assert reserved.count == 2
    assert server.store.stats().leases > 0
    if way == "close":
        client.call("Close", messages.CloseRequest(session=client.session))
    elif way == "stream":
        client._stream.cancel()
    else:
        assert client.attachment is not None
        client.attachment.close()
    wait_until(lambda: server.store.stats().leases == 0, 5.0)
    wait_until(lambda: server._staging.used_bytes == 0, 5.0)
    assert status_of(client.match, tokens) is Status.NOT_FOUND
    other = RawClient(server.config.address)
    other.open()
    assert other.save(tokens) == 2  # the dead writer's run is free
    other.close()
    client.close()


@pytest.mark.slow
def test_a_hundred_deaths_leak_nothing(server: Server) -> None:
    tokens = fresh(4)
    first = RawClient(server.config.address)
    first.open()
    first.save(tokens[: 2 * PAGE_TOKENS])
    first.close()
    wait_until(lambda: not len(server.registry))
    host = server.store.state.host
    assert host is not None
    before = host.usage().used_slots
    for number in range(100):
        client = RawClient(server.config.address)
        client.open(shared_memory=number % 2 == 0)
        client.beat()
        client.match(tokens)
        wait_until(lambda held=client: held.reserve(tokens, 0.0).count == 2, 1.0)
        client.die()
    # A session is out of the registry a moment before all of it is given back.
    wait_until(lambda: not len(server.registry) and server.store.stats().leases == 0, 5.0)
    wait_until(lambda: server._staging.used_bytes == 0, 5.0)
    wait_until(lambda: host.usage().used_slots == before, 5.0)
    server.store.check()


def test_a_tenant_can_map_no_extent_of_another(tmp_path: Path) -> None:
    server = Server(config_of(tmp_path / "store", disk_bytes=0), authorizer=ByMetadata())
    server.start()
    channel = grpc.insecure_channel(server.config.address)
    stub = KVStoreStub(channel)
    request = messages.OpenRequest(
        client_version="0.1.0", spec_json=SPEC.to_json(), shared_memory=True
    )
    held: dict[str, set[int]] = {}
    for tenant in ("a", "b"):
        who = {"metadata": (("who", f"{tenant}/writer"),), "timeout": 5.0}
        opened = stub.Open(request, **who)
        tokens = prompt(1, 2).tobytes()
        reserve = messages.ReserveRequest(session=opened.session, tokens=tokens, deadline_s=1.0)
        made = stub.Reserve(reserve, **who)
        assert made.count == 2, "the other tenant's pages are not present for this one"
        commit = messages.CommitRequest(
            session=opened.session, reservation=made.reservation, deadline_s=1.0
        )
        stub.Commit(commit, **who)
        with attach(Path(opened.attach_path), opened.attach_token) as attachment:
            held[tenant] = set(attachment.extents)
    assert held["a"]
    assert held["b"]
    assert not held["a"] & held["b"]
    channel.close()
    server.stop()


def test_silence_ends_a_session(tmp_path: Path) -> None:
    server = Server(config_of(tmp_path / "store", disk_bytes=0))
    now = 0.0
    server.registry._clock = lambda: now
    server.start()
    client = RawClient(server.config.address)
    client.open(shared_memory=False)
    now = 9.0
    client.beat()
    now = 18.0
    server.registry.sweep()
    assert len(server.registry) == 1
    now = 19.1
    server.registry.sweep()
    assert len(server.registry) == 0
    client.close()
    server.stop()


def test_an_upload_that_nobody_goes_on_with_ends(tmp_path: Path) -> None:
    server = Server(config_of(tmp_path / "store", disk_bytes=0))
    now = 0.0
    server.registry._clock = lambda: now
    server.start()
    client = RawClient(server.config.address)
    client.open(shared_memory=False)
    reserved = client.reserve(fresh(2))
    for seconds in (8.0, 16.0, 24.0, 31.0):
        now = seconds
        client.beat()
        server.registry.sweep()
    assert status_of(client.commit, reserved.reservation) is Status.NOT_FOUND
    client.close()
    server.stop()


def test_a_beat_says_which_boot_it_is(server: Server, client: RawClient) -> None:
    other = RawClient(server.config.address)
    reply = other.open(shared_memory=False)
    assert client.beat().boot_epoch == reply.boot_epoch != 0
    other.close()


@pytest.mark.parametrize("name", [b"", bytes(16), b"x" * 17])
def test_an_unknown_session_is_not_found(client: RawClient, name: bytes) -> None:
    client.session = name
    assert status_of(client.match, fresh(1)) is Status.NOT_FOUND
    assert status_of(client.reserve, fresh(1)) is Status.NOT_FOUND
    assert status_of(client.beat) is Status.NOT_FOUND


def test_unknown_matches_and_reservations_are_not_found(client: RawClient) -> None:
    stage = messages.StageRequest(session=client.session, match=999, deadline_s=1.0)
    assert status_of(client.call, "Stage", stage) is Status.NOT_FOUND
    assert status_of(client.commit, 999) is Status.NOT_FOUND
    assert status_of(client.write_stream, 999, [b""]) is Status.NOT_FOUND
    assert status_of(client.read_stream, 999, 0, 1) is Status.NOT_FOUND
    assert status_of(client.match, fresh(1), after_match=999) is Status.NOT_FOUND


def test_a_call_without_a_deadline_is_refused(client: RawClient) -> None:
    for timeout_s in (None, 3600.0):
        request = messages.StatsRequest()
        assert status_of(client.stub.Stats, request, timeout=timeout_s) is Status.INVALID_ARGUMENT


@pytest.mark.parametrize("deadline_s", [-1.0, 61.0, float("nan"), float("inf")])
def test_a_wait_out_of_bounds_is_refused(client: RawClient, deadline_s: float) -> None:
    assert status_of(client.reserve, fresh(1), deadline_s) is Status.INVALID_ARGUMENT


def test_malformed_tokens_are_refused(client: RawClient) -> None:
    for tokens in (np.zeros(5, np.uint8), np.array([-1] * 4, np.int32)):
        assert status_of(client.match, tokens) is Status.INVALID_ARGUMENT
        assert status_of(client.reserve, tokens) is Status.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_refused_and_the_client_goes_on(client: RawClient) -> None:
    huge = np.zeros(CONTROL_BYTES_MAX // 4 + 1, np.int32)
    assert status_of(client.match, huge) is Status.RESOURCE_EXHAUSTED
    assert client.match(fresh(1)).pages == 0


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.1.9", Status.OK),
        ("0.0.1", Status.OK),
        ("0.2.0", Status.FAILED_PRECONDITION),
        ("1.1.0", Status.FAILED_PRECONDITION),
        ("", Status.INVALID_ARGUMENT),
        ("x.y", Status.INVALID_ARGUMENT),
    ],
)
def test_versions_that_fit_are_served(server: Server, version: str, status: Status) -> None:
    client = RawClient(server.config.address)
    request = messages.OpenRequest(client_version=version, spec_json=client.spec.to_json())
    assert status_of(client.call, "Open", request) is status
    client.close()
    server.registry.end_all()


def test_an_incomplete_spec_is_refused_by_its_field(client: RawClient) -> None:
    request = messages.OpenRequest(client_version="0.1.0", spec_json="{}")
    with pytest.raises(grpc.RpcError) as caught:
        client.call("Open", request)
    assert caught.value.code() is Status.INVALID_ARGUMENT
    assert "page_tokens" in caught.value.details()


def test_too_many_sessions_are_refused_with_a_hint(tmp_path: Path) -> None:
    server = Server(config_of(tmp_path / "store", disk_bytes=0, sessions_max=2))
    server.start()
    client = RawClient(server.config.address)
    for _ in range(2):
        client.open(shared_memory=False)
    with pytest.raises(grpc.RpcError) as caught:
        client.open(shared_memory=False)
    assert caught.value.code() is Status.RESOURCE_EXHAUSTED
    assert int(dict(caught.value.trailing_metadata())[RETRY_KEY]) > 0
    client.close()
    server.stop()


def test_calls_past_the_limit_are_refused_and_none_hangs(tmp_path: Path) -> None:
    config = config_of(tmp_path / "store", disk_bytes=0, max_rpcs=4, sessions_max=1, workers=1)
    server = Server(config)
    server.start()
    clients = [RawClient(server.config.address) for _ in range(5)]
    clients[0].open(shared_memory=False)
    block = threading.Event()
    server._quick.submit(block.wait)
    request = messages.ReleaseRequest(session=clients[0].session)
    calls = [each.stub.Release.future(request, timeout=10.0) for each in clients for _ in range(4)]
    wait_until(lambda: any(call.done() for call in calls))
    block.set()
    codes = [call.code() for call in calls]
    assert set(codes) <= {Status.OK, Status.RESOURCE_EXHAUSTED}
    assert codes.count(Status.OK) >= 1
    for client in clients:
        client.close()
    server.stop()


def test_every_method_of_the_descriptor_has_its_roles() -> None:
    service = messages.DESCRIPTOR.services_by_name["KVStore"]
    assert {method.name for method in service.methods} == set(ROLES)


def test_roles_and_tenants_come_from_the_credential(tmp_path: Path) -> None:
    server = Server(config_of(tmp_path / "store", disk_bytes=0), authorizer=ByMetadata())
    server.start()
    client = RawClient(server.config.address)

    def status(method: str, who: str | None) -> Status:
        metadata = (("who", who),) if who else ()
        handle = client.channel.stream_stream(f"/{SERVICE}/{method}")
        timeout_s = 0.3 if method in ENDLESS else 30.0
        return status_of(list, handle(iter([b""]), timeout=timeout_s, metadata=metadata))

    for method, roles in ROLES.items():
        assert status(method, None) is Status.UNAUTHENTICATED, method
        for role in Role:
            found = status(method, f"a/{role}")
            assert (found is Status.PERMISSION_DENIED) == (role not in roles), (method, role)
    request = messages.OpenRequest(client_version="0.1.0", spec_json=client.spec.to_json())
    opened = client.stub.Open(request, timeout=5.0, metadata=(("who", "a/writer"),))
    close = messages.CloseRequest(session=opened.session)
    other = (("who", "b/writer"),)
    assert status_of(client.stub.Close, close, timeout=5.0, metadata=other) is Status.NOT_FOUND
    client.stub.Close(close, timeout=5.0, metadata=(("who", "a/writer"),))
    client.close()
    server.stop()


def test_operators_calls(server: Server, client: RawClient) -> None:
    tokens = fresh(2)
    client.save(tokens, durable=True)  # nothing of it is being written any more
    listing = json.loads(client.call("List", messages.ListRequest(limit=1000)).json)
    assert listing["namespaces"][0]["tenant"] == "default"
    chain = listing["chains"][0]["chain_id"]
    inspected = json.loads(client.call("Inspect", messages.InspectRequest(chain=chain)).json)
    assert inspected["chain"]["chain_id"] == chain
    explain = messages.ExplainRequest(tokens=tokens.tobytes())
    assert json.loads(client.call("Explain", explain).json)["matched_pages"] == 2
    stats = json.loads(client.call("Stats", messages.StatsRequest()).json)
    assert stats["service"]["sessions"] == 1
    nothing = messages.EvictRequest()
    assert status_of(client.call, "Evict", nothing) is Status.INVALID_ARGUMENT
    first = tokens[:PAGE_TOKENS].tobytes()
    evict = messages.EvictRequest(tokens=first, has_prefix=True, dry_run=True)
    assert client.call("Evict", evict).pages == 2
    evict.dry_run = False
    assert client.call("Evict", evict).pages == 2
    assert client.match(tokens).pages == 0


def test_watchers_see_what_comes_and_goes(client: RawClient) -> None:
    events = client.stub.Watch(messages.WatchRequest())
    tokens = fresh(2)
    seen: list[messages.Event] = []
    reader = threading.Thread(target=lambda: seen.extend(_until_cancelled(events)))
    reader.start()
    wait_until(lambda: client.save(fresh(1)) and seen)  # it has begun
    client.save(tokens, durable=True)
    evict = messages.EvictRequest(tokens=tokens[:PAGE_TOKENS].tobytes(), has_prefix=True)
    client.call("Evict", evict)
    wait_until(lambda: (seen[-1].kind, seen[-1].medium) == ("removed", "disk"))
    events.cancel()
    reader.join()
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    keys = next(e.keys for e in seen if (e.kind, e.medium, len(e.keys)) == ("stored", "host", 32))
    mine = [(e.kind, e.medium) for e in seen if e.keys.find(keys[:16]) % 16 == 0]
    assert mine[0] == ("stored", "host")
    assert {("stored", "disk"), ("removed", "host"), ("removed", "disk")} <= set(mine)
    late = client.stub.Watch(messages.WatchRequest(after_sequence=10**9))
    assert next(late).kind == "lost"
    late.cancel()
    again = client.stub.Watch(messages.WatchRequest(after_sequence=numbers[0]))
    assert next(again).sequence == numbers[1]
    again.cancel()


def _until_cancelled(events: Any) -> Iterator[messages.Event]:
    try:
        yield from events
    except grpc.RpcError as exc:
        if exc.code() is not Status.CANCELLED:
            raise


def test_pins_keep_a_chain(client: RawClient) -> None:
    tokens = fresh(2)
    client.save(tokens)
    pin = messages.PinRequest(session=client.session, tokens=tokens.tobytes(), ttl_s=60.0)
    assert client.call("Pin", pin).pages == 2
    evict = messages.EvictRequest(tokens=tokens[:PAGE_TOKENS].tobytes(), has_prefix=True)
    assert client.call("Evict", evict).kept_pinned == 2
    unpin = messages.UnpinRequest(session=client.session, tokens=tokens.tobytes())
    assert client.call("Unpin", unpin).pages == 2
    flush = messages.FlushRequest(session=client.session, deadline_s=10.0)
    assert client.call("Flush", flush).done


def test_health_is_open_and_constant(server: Server, client: RawClient) -> None:
    check = health_pb2_grpc.HealthStub(client.channel).Check
    for name in ("", SERVICE):
        reply = check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_sockets_are_for_their_owner_only(server: Server) -> None:
    path = server.config.socket_path
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    assert (path.parent / "extents.sock").stat().st_mode & 0o777 == 0o600


def test_a_second_server_finds_directory_and_socket_in_use(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="in use"):
        Server(config_of(server.config.directory))
    second = Server(config_of(tmp_path / "other", listen=server.config.address))
    with pytest.raises(DirectoryError, match="in use"):
        second.start()


def test_a_stale_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kv.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fspath(path))
    server = Server(config_of(tmp_path / "store", disk_bytes=0, listen=f"unix:{path}"))
    server.start()
    server.stop()
    path.write_text("mine")
    server = Server(config_of(tmp_path / "store", disk_bytes=0, listen=f"unix:{path}"))
    with pytest.raises(DirectoryError, match="not a socket"):
        server.start()
    assert path.read_text() == "mine"


def test_a_network_address_needs_credentials_or_the_operators_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--insecure-network"):
        Server(config_of(tmp_path / "store", listen="127.0.0.1:0"))
    config = config_of(
        tmp_path / "store", listen="127.0.0.1:0", insecure_network=True, disk_bytes=0
    )
    server = Server(config)
    server.start()
    client = RawClient(f"127.0.0.1:{server.port}")
    client.open(shared_memory=False)
    client.close()
    server.stop()


def test_random_frames_do_no_harm(client: RawClient) -> None:
    rng = np.random.default_rng(7)
    for method in ROLES:
        handle = client.channel.stream_stream(f"/{SERVICE}/{method}")
        for _ in range(20):
            junk = rng.integers(0, 256, int(rng.integers(0, 200)), np.uint8).tobytes()
            status_of(list, handle(iter([junk]), timeout=2.0))
    assert client.match(fresh(1)).pages == 0
