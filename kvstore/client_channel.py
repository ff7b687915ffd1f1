"""The gRPC side of a client: one channel to one server, and what its errors mean.

The only module of the client that speaks gRPC's language. Every call has a deadline, reconnecting
is never slower than a quarter of a second, and an error comes back as CallFailed with one of few
meanings. Must not be here: sessions, memory, policy.
"""

from __future__ import annotations

import contextlib
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import grpc

from kvstore import kvstore_pb2
from kvstore.errors import ConfigError
from kvstore.heap import reuse_large_buffers
from kvstore.kvstore_pb2_grpc import KVStoreStub
from kvstore.private_file import read_private, read_public
from kvstore.tenants import load_token
from kvstore.wire import DOCUMENT_BYTES_MAX, RETRY_KEY, SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.message import Message

    from kvstore.client_config import ClientConfig
    from kvstore.server_address import ServerAddress

PEM_BYTES_MAX = 1 << 20
HOLD_S_MAX = 1.0

_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # the time that one attempt may take
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", DOCUMENT_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # Pages come in one stream at a time: reading it needs no thread of its own.
    ("SingleThreadedUnaryStream", 1),
)

_BYTES_FIELD = 2  # protobuf's wire type of what has a length
_TOKENS_TAG = bytes([kvstore_pb2.MatchRequest.TOKENS_FIELD_NUMBER << 3 | _BYTES_FIELD])


class Failure(Enum):
    """What an unanswered call means to a client."""

    UNREACHABLE = auto()  # nobody is there, or the connection broke
    TIMEOUT = auto()
    UNKNOWN = auto()  # the server knows the session not, or no more, or not what it names
    BUSY = auto()  # too many calls, or over a quota; `hold_s` says for how long
    DENIED = auto()  # the credential is not known, or not for this
    INVALID = auto()  # the call's arguments
    REFUSED = auto()  # anything else, as this version


class CallFailed(Exception):
    """A call that got no reply. Never leaves kvstore."""

    def __init__(
        self, failure: Failure, text: str, *, hold_s: float | None = None, details: str = ""
    ) -> None:
        """hold_s: for how long the server asks to be left alone. details: its own words."""
        super().__init__(text)
        self.failure = failure
        self.hold_s = hold_s
        self.details = details


_MEANINGS = {
    grpc.StatusCode.UNAVAILABLE: Failure.UNREACHABLE,
    grpc.StatusCode.CANCELLED: Failure.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Failure.TIMEOUT,
    grpc.StatusCode.NOT_FOUND: Failure.UNKNOWN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.BUSY,
    grpc.StatusCode.UNAUTHENTICATED: Failure.DENIED,
    grpc.StatusCode.PERMISSION_DENIED: Failure.DENIED,
    grpc.StatusCode.INVALID_ARGUMENT: Failure.INVALID,
}


class ServerChannel:
    """One channel. Thread-safe; connects by itself, when it is first used and after a loss."""

    def __init__(self, address: ServerAddress, config: ClientConfig) -> None:
        """Raises ConfigError when the address needs TLS and there is none, or files are missing."""
        reuse_large_buffers()
        self.address = address
        self._token_file = config.token_file
        self._metadata: tuple[tuple[str, str], ...] = ()
        self.reload_token()
        self._channel = _make_channel(address, config)
        self._stub = KVStoreStub(self._channel)
        replies: dict[str, Any] = {
            "Match": kvstore_pb2.MatchReply,
            "Reserve": kvstore_pb2.ReserveReply,
        }
        self._encoded: dict[str, Any] = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}", response_deserializer=reply.FromString
            )
            for name, reply in replies.items()
        }
        self._read_pages: Any = self._channel.unary_stream(f"/{SERVICE}/ReadPages")
        self._raw: dict[str, Any] = {
            "Export": self._channel.unary_stream(f"/{SERVICE}/Export"),
            "Import": self._channel.stream_stream(
                f"/{SERVICE}/Import", response_deserializer=kvstore_pb2.Document.FromString
            ),
        }
        self._write_pages: Any = self._channel.stream_unary(f"/{SERVICE}/WritePages")

    def call(
        self,
        name: str,
        request: Message | bytes,
        timeout_s: float,
        *,
        wait_for_ready: bool = False,
    ) -> Any:
        """One call and its reply; CallFailed. `request` may be encoded: see with_tokens."""
        method = self._encoded[name] if type(request) is bytes else getattr(self._stub, name)
        ready = wait_for_ready or None
        metadata = self._metadata
        try:
            return method(request, timeout=timeout_s, metadata=metadata, wait_for_ready=ready)
        except (grpc.RpcError, ValueError) as exc:  # ValueError: the channel is closed
            if not self._token_was_changed(exc, metadata):
                raise _failed(exc) from exc
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=ready)
        except (grpc.RpcError, ValueError) as exc:
            raise _failed(exc) from exc

    def heartbeat(self, beats: Iterator[kvstore_pb2.Beat]) -> Any:
        """The server's beats; iterate with `replies`, end with cancel()."""
        try:
            return self._stub.Heartbeat(beats, metadata=self._metadata)
        except ValueError as exc:
            raise _failed(exc) from exc

    def watch(self, request: kvstore_pb2.WatchRequest) -> Any:
        """A stream of events; iterate with `replies`, end with cancel()."""
        try:
            return self._stub.Watch(request, metadata=self._metadata)
        except ValueError as exc:
            raise _failed(exc) from exc

    def stream(self, name: str, request: Any) -> Iterator[Any]:
        """The replies of a call that lasts as long as it takes; CallFailed when it breaks.

        It ends when the iterator is closed. `request`: raw bytes, an iterator of them, or a
        message, as the call wants.
        """
        method = self._raw.get(name) or getattr(self._stub, name)
        try:
            replies = method(request, metadata=self._metadata)
        except ValueError as exc:
            raise _failed(exc) from exc
        try:
            yield from self.replies(replies)
        finally:
            replies.cancel()

    @property
    def credential(self) -> tuple[tuple[str, str], ...]:
        """What calls carry now."""
        return self._metadata

    def has_newer_credential(self, used: tuple[tuple[str, str], ...]) -> bool:
        """Read the token file again; whether it has another credential than was used."""
        with contextlib.suppress(ConfigError):
            self.reload_token()
        return self._metadata != used

    def replies(self, stream: Any) -> Iterator[Any]:
        """What comes over a stream; CallFailed when it breaks."""
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise _failed(exc) from exc

    def read_pages(self, header: kvstore_pb2.ReadPagesHeader, timeout_s: float) -> Iterator[bytes]:
        """The payloads of pages, in pieces; CallFailed when the stream breaks."""
        try:
            yield from self._read_pages(
                header.SerializeToString(), timeout=timeout_s, metadata=self._metadata
            )
        except (grpc.RpcError, ValueError) as exc:
            raise _failed(exc) from exc

    def write_pages(
        self, header: kvstore_pb2.WritePagesHeader, pieces: Iterable[bytes], timeout_s: float
    ) -> kvstore_pb2.CommitReply:
        """Send the payloads of a reservation's pages and commit them; CallFailed."""

        def messages() -> Iterator[bytes]:
            yield header.SerializeToString()
            yield from pieces

        try:
            reply = self._write_pages(messages(), timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as exc:
            raise _failed(exc) from exc
        return kvstore_pb2.CommitReply.FromString(reply)

    def reload_token(self) -> None:
        """Read the token file again; ConfigError when it is not as it has to be."""
        if self._token_file is not None:
            token = load_token(self._token_file)
            self._metadata = (("authorization", f"Bearer {token}"),)

    def close(self) -> None:
        """End all calls."""
        self._channel.close()

    def _token_was_changed(self, exc: Exception, metadata: tuple[tuple[str, str], ...]) -> bool:
        """Whether the credential was refused and its file has another one by now."""
        code = getattr(exc, "code", None)
        if self._token_file is None or code is None or code() != grpc.StatusCode.UNAUTHENTICATED:
            return False
        return self.has_newer_credential(metadata)


def with_tokens(
    request: kvstore_pb2.MatchRequest | kvstore_pb2.ReserveRequest, tokens: bytes | memoryview
) -> bytes:
    """The encoded request with its field `tokens`, for ServerChannel.call.

    A message may be followed by more of its fields. Encoding 128 Ki tokens takes protobuf's own
    encoder 1.1 ms, since it starts small and grows; this takes 0.01.
    """
    length, size = len(tokens), bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return b"".join((request.SerializeToString(), _TOKENS_TAG, size, tokens))


def _make_channel(address: ServerAddress, config: ClientConfig) -> grpc.Channel:
    if address.socket is not None or config.insecure_network:
        return grpc.insecure_channel(address.target, options=_OPTIONS)
    ca = cert = key = None
    if config.ca_file is not None:
        ca = read_public("ca_file", config.ca_file, PEM_BYTES_MAX)
    if config.cert_file is not None and config.key_file is not None:
        cert = read_public("cert_file", config.cert_file, PEM_BYTES_MAX)
        key = read_private("key_file", config.key_file, PEM_BYTES_MAX)
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(address.target, credentials, options=_OPTIONS)


def _failed(exc: Exception) -> CallFailed:
    code = getattr(exc, "code", None)
    if code is None:
        return CallFailed(Failure.UNREACHABLE, str(exc))
    details = exc.details() or ""  # type: ignore[attr-defined]
    failure = _MEANINGS.get(code(), Failure.REFUSED)
    hold_s = _hold_s(exc) if failure is Failure.BUSY else None
    return CallFailed(failure, f"{code().name}: {details}", hold_s=hold_s, details=details)


def _hold_s(exc: Any) -> float | None:
    """How long the server asks to be left alone; gRPC itself, at its limits, says nothing."""
    for key, value in exc.trailing_metadata() or ():
        if key == RETRY_KEY:
            with contextlib.suppress(ValueError):
                return min(max(int(value), 0) / 1e3, HOLD_S_MAX)
    return None
