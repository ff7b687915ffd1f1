"""Every method of the service x every credential, enumerated from the descriptor.

A new method fails here until this file says who may call it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.identity import ROLES, Role, misplaced
from kvstore.spec import CacheSpec
from kvstore.tenant_watch import TenantWatch
from kvstore.tenants import Quota, TenantBook, edit_tenants

grpc = pytest.importorskip("grpc", reason="the service needs grpcio")

from kvstore import kvstore_pb2 as messages  # noqa: E402 # needs protobuf, which comes with grpcio
from kvstore._version import __version__  # noqa: E402
from kvstore.auth import CredentialAuthorizer  # noqa: E402
from kvstore.server import Server  # noqa: E402
from kvstore.server_config import ServerConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

METHODS = {
    method.name: method for method in messages.DESCRIPTOR.services_by_name["KVStore"].methods
}
ADMIN = frozenset({Role.ADMIN})
WRITE = ADMIN | {Role.WRITER, Role.PUBLISHER}
READ = WRITE | {Role.READER}
# The specification, apart from the code's own table.
MAY_CALL = {
    **dict.fromkeys(("Open", "Heartbeat", "Close", "Match", "Stage", "Release"), READ),
    **dict.fromkeys(("Attach", "ReadPages", "Watch"), READ),
    **dict.fromkeys(("Reserve", "Commit", "Abort", "WritePages"), WRITE),
    **dict.fromkeys(("Flush", "Pin", "Unpin", "Hint"), WRITE),
    **dict.fromkeys(("Evict", "List", "Inspect", "Explain"), ADMIN),
    **dict.fromkeys(("Tree", "PinChain", "Record", "Verify", "Export", "Import"), ADMIN),
    "Stats": ADMIN | {Role.METRICS},
}
RAW_REQUESTS = {"WritePages"}
REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED")
SPEC = CacheSpec.opaque("matrix", page_tokens=16, page_bytes=4096)
TOKENS = b"".join(number.to_bytes(4, "little") for number in range(64))


@dataclass(frozen=True)
class Service:
    """A running server, its address, and a token of every kind."""

    channel: Any
    tokens: dict[str, str]

    def call(self, name: str, request: bytes, *metadata: tuple[str, str]) -> tuple[str, Any]:
        """The status of a call, and its reply or what was said."""
        method = METHODS[name]
        kinds = {False: "unary", True: "stream"}
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        function = getattr(self.channel, kind)(f"/kvstore.v1.KVStore/{name}")
        sent = iter([request]) if method.client_streaming else request
        try:
            # A stream that lasts until its client goes is let go after the first answer.
            answer = function(
                sent, timeout=2 if name in ("Watch", "Heartbeat") else 20, metadata=metadata
            )
            reply = b"".join(answer) if method.server_streaming else answer
        except grpc.RpcError as exc:
            return exc.code().name, exc.details()
        if not method.server_streaming:
            reply = method.output_type._concrete_class.FromString(reply)
        return "OK", reply

    def call_as(self, who: str, name: str, request: bytes) -> tuple[str, Any]:
        return self.call(name, request, ("authorization", f"Bearer {self.tokens[who]}"))

    def open(self, who: str, *metadata: tuple[str, str]) -> bytes:
        request = messages.OpenRequest(client_version=__version__, spec_json=SPEC.to_json())
        bearer = ("authorization", f"Bearer {self.tokens[who]}")
        status, reply = self.call("Open", request.SerializeToString(), bearer, *metadata)
        assert status == "OK", reply
        return bytes(reply.session)


def make_tokens(path: Path) -> dict[str, str]:
    """Tokens by name; "expired" and "revoked" were good once."""
    tokens: dict[str, str] = {}

    def edit(book: TenantBook) -> TenantBook:
        for tenant in ("acme", "other", "public"):
            book = book.with_tenant(tenant, Quota())
            for role in (each for each in Role if not misplaced(tenant, each)):
                book, tokens[f"{tenant} {role.value}"] = book.with_token(tenant, role, 0.0, None)
        book, tokens["expired"] = book.with_token("acme", Role.ADMIN, 0.0, 1.0)
        gone, tokens["revoked"] = book.with_tenant("gone", Quota()).with_token(
            "gone", Role.ADMIN, 0.0, None
        )
        return gone.without_tenant("gone")

    edit_tenants(path, edit, create=True)
    return tokens


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("matrix")
    tokens = make_tokens(folder / "tenants.json")
    authorizer = CredentialAuthorizer(TenantWatch(folder / "tenants.json"), certificates=False)
    config = ServerConfig(directory=folder / "kv", host_bytes="16MiB", disk_bytes="64MiB")
    server = Server(config, authorizer=authorizer)
    server.start()
    with grpc.insecure_channel(config.address) as channel:
        yield Service(channel, tokens)
    server.stop()


def test_every_method_has_a_row_here_and_in_the_table_of_the_code() -> None:
    assert set(METHODS) == set(MAY_CALL) == set(ROLES)


def request_for(name: str) -> bytes:
    """A request that is well formed and names a session that is not there."""
    if name in RAW_REQUESTS:
        return messages.WritePagesHeader(session=bytes(16)).SerializeToString()
    return b"\n\x10" + bytes(16) if "session" in fields_of(name) else b""


def fields_of(name: str) -> set[str]:
    message = METHODS[name].input_type
    if name in RAW_REQUESTS:
        message = messages.WritePagesHeader.DESCRIPTOR
    return {each.name for each in message.fields}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Basic YWRtaW46YWRtaW4=",
        "Bearer kvs1.000000000000." + "A" * 43,
        "EXPIRED",
        "REVOKED",
        "NO SCHEME",
    ],
)
def test_nobody_calls_anything_without_a_good_credential(
    service: Service, name: str, authorization: str | None
) -> None:
    made = {
        "EXPIRED": "Bearer " + service.tokens["expired"],
        "REVOKED": "Bearer " + service.tokens["revoked"],
        "NO SCHEME": service.tokens["acme admin"],
    }
    metadata = (
        [] if authorization is None else [("authorization", made.get(authorization, authorization))]
    )
    status, said = service.call(name, request_for(name), *metadata)
    assert status == "UNAUTHENTICATED", said
    for token in service.tokens.values():
        assert token.rpartition(".")[2] not in said


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("role", Role)
def test_a_role_calls_what_is_its_own_and_nothing_else(
    service: Service, name: str, role: Role
) -> None:
    tenant = "public" if role is Role.PUBLISHER else "acme"
    status, said = service.call_as(f"{tenant} {role.value}", name, request_for(name))
    if role in MAY_CALL[name]:
        assert status not in REFUSALS, said
    else:
        assert status == "PERMISSION_DENIED", said


def test_a_method_that_is_not_there_is_refused(service: Service) -> None:
    for path in ("/kvstore.v1.KVStore/Shutdown", "/kvstore.v1.Other/Open", "/x/y"):
        with pytest.raises(grpc.RpcError) as refused:
            service.channel.unary_unary(path)(b"", timeout=10)
        assert refused.value.code().name == "UNIMPLEMENTED"


@pytest.mark.parametrize("name", [name for name in METHODS if "session" in fields_of(name)])
def test_a_session_means_nothing_to_another_tenant(service: Service, name: str) -> None:
    """The answer is the one for a session that never was, so that it tells nothing either."""
    mine = service.open("acme writer")
    for who in ("other writer", "other admin", "acme admin"):
        never = service.call_as(who, name, request_for(name))
        assert service.call_as(who, name, b"\n\x10" + mine) == never
        assert never[0] == "NOT_FOUND"
    alive = messages.FlushRequest(session=mine).SerializeToString()
    assert service.call_as("acme writer", "Flush", alive)[0] == "OK"
    close(service, "acme writer", mine)


def close(service: Service, who: str, session: bytes) -> None:
    request = messages.CloseRequest(session=session).SerializeToString()
    assert service.call_as(who, "Close", request)[0] == "OK"


def store_prompt(service: Service, who: str, session: bytes) -> int:
    """Store TOKENS through the raw stream; how many pages were new."""
    wanted = messages.ReserveRequest(session=session, tokens=TOKENS, deadline_s=5)
    status, run = service.call_as(who, "Reserve", wanted.SerializeToString())
    assert status == "OK", run
    if not run.count:
        return 0
    header = messages.WritePagesHeader(session=session, reservation=run.reservation, deadline_s=5)
    write = service.channel.stream_unary("/kvstore.v1.KVStore/WritePages")
    bearer = (("authorization", f"Bearer {service.tokens[who]}"),)
    pieces = [header.SerializeToString(), b"\xa5" * (run.count * SPEC.page_bytes)]
    reply = messages.CommitReply.FromString(write(iter(pieces), timeout=20, metadata=bearer))
    return int(reply.pages)


def matched(service: Service, who: str, session: bytes) -> int:
    request = messages.MatchRequest(session=session, tokens=TOKENS).SerializeToString()
    status, reply = service.call_as(who, "Match", request)
    assert status == "OK", reply
    return int(reply.pages)


def test_no_tenant_sees_pages_of_another_whatever_it_says(service: Service) -> None:
    """The first tenant's own hit is the control: without it, the misses would prove nothing."""
    mine = service.open("acme writer")
    assert store_prompt(service, "acme writer", mine) == 4
    assert matched(service, "acme writer", mine) == 4
    assert matched(service, "acme reader", service.open("acme reader")) == 4
    for name in ("tenant", "x-tenant", "kvstore-tenant", "x-forwarded-user", "salt"):
        theirs = service.open("other writer", (name, "acme"))
        assert matched(service, "other writer", theirs) == 0
        close(service, "other writer", theirs)
    close(service, "acme writer", mine)


def test_a_request_has_no_field_for_a_tenant_unless_it_is_the_operators() -> None:
    named = {name for name in METHODS if "tenant" in fields_of(name)}
    assert all(MAY_CALL[name] == ADMIN for name in named)


def test_rates_are_refused_with_a_hint_and_others_go_on(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tenants.json")
    edit_tenants(
        tmp_path / "tenants.json",
        lambda book: book.with_tenant("acme", Quota(calls_per_s_max=5)),
        create=False,
    )
    watch = TenantWatch(tmp_path / "tenants.json")
    config = ServerConfig(directory=tmp_path / "kv", host_bytes="4MiB", disk_bytes="32MiB")
    server = Server(config, authorizer=CredentialAuthorizer(watch, certificates=False))
    server.start()
    try:
        with grpc.insecure_channel(config.address) as channel:
            small = Service(channel, tokens)
            statuses = {small.call_as("acme metrics", "Stats", b"")[0] for _ in range(100)}
            assert statuses == {"OK", "RESOURCE_EXHAUSTED"}
            assert small.call_as("other metrics", "Stats", b"")[0] == "OK"
    finally:
        server.stop()


def test_rotation_under_load_fails_no_good_call_and_ends_the_old_token(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tenants.json")
    config = ServerConfig(directory=tmp_path / "kv", host_bytes="4MiB", disk_bytes="32MiB")
    watch = TenantWatch(tmp_path / "tenants.json")
    server = Server(config, authorizer=CredentialAuthorizer(watch, certificates=False))
    server.start()
    current = [tokens["acme metrics"]]
    statuses: list[str] = []
    stop = threading.Event()
    try:
        with grpc.insecure_channel(config.address) as channel:
            service = Service(channel, tokens)

            def load() -> None:
                while not stop.is_set():
                    bearer = ("authorization", f"Bearer {current[0]}")
                    statuses.append(service.call("Stats", b"", bearer)[0])

            clients = [threading.Thread(target=load) for _ in range(4)]
            for client in clients:
                client.start()
            for _ in range(5):
                current[0] = rotate(tmp_path / "tenants.json", grace_s=2.0)
            rotated = time.monotonic()
            old = ("authorization", f"Bearer {tokens['acme metrics']}")
            while service.call("Stats", b"", old)[0] == "OK":
                assert time.monotonic() < rotated + 5.0, "the old token is still good"
            stop.set()
            for client in clients:
                client.join()
    finally:
        stop.set()
        server.stop()
    assert set(statuses) == {"OK"}
    assert len(statuses) > 100


def rotate(path: Path, grace_s: float) -> str:
    """A new token for acme's metrics; the file has it when this returns."""
    made = []

    def edit(book: TenantBook) -> TenantBook:
        changed, token = book.with_rotated("acme", Role.METRICS, time.time(), None, grace_s)
        made.append(token)
        return changed

    edit_tenants(path, edit, create=False)
    return made[0]


def test_certificates_over_a_network_port_are_held_to_the_same_table(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="certificates are made with cryptography")
    from kvstore.certificates import Authority

    authority = Authority.load_or_create(tmp_path / "certs")
    pair = authority.issue_server(["localhost"], 30)
    ca = tmp_path / "certs" / "ca.pem"
    config = ServerConfig(
        directory=tmp_path / "kv",
        listen="127.0.0.1:0",
        tls_cert=pair.certificate,
        tls_key=pair.key,
        tls_client_ca=ca,
        host_bytes="4MiB",
        disk_bytes="32MiB",
    )
    server = Server(config)
    server.start()
    try:
        for role in (each for each in Role if not misplaced("acme", each)):
            files = authority.issue_client("acme", role, 30)
            credentials = grpc.ssl_channel_credentials(
                ca.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
            )
            options = [("grpc.use_local_subchannel_pool", 1)]
            address = f"localhost:{server.port}"
            with grpc.secure_channel(address, credentials, options=options) as channel:
                over_tls = Service(channel, {})
                for name in METHODS:
                    status, said = over_tls.call(name, request_for(name))
                    allowed = role in MAY_CALL[name]
                    assert (status != "PERMISSION_DENIED") == allowed, (role, name, said)
                    assert status not in ("UNAUTHENTICATED", "UNAVAILABLE"), (role, name, said)
    finally:
        server.stop()
