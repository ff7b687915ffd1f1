"""What stands before every method: who calls, may they, is there a deadline; errors to statuses.

No method is reachable around it: handlers are made here only, from the descriptor's list, and one
whose name is not in identity.ROLES refuses everybody. What an exception of ours says is safe to
send; any other is logged here and told to nobody.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from kvstore.call_budget import TooManyCalls
from kvstore.call_pool import client_has_spoken, said_by_client, waiting_for_client
from kvstore.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    InvalidRequest,
    KVStoreError,
    SpecError,
)
from kvstore.identity import ROLES, NotAuthenticated
from kvstore.kvstore_pb2 import DESCRIPTOR
from kvstore.server_session import UnknownHandle
from kvstore.tiers.tier import TierError
from kvstore.tracing import span
from kvstore.wire import DEADLINE_S_MAX, ENDLESS, RAW_REPLIES, RAW_REQUESTS, RETRY_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import ThreadPoolExecutor

    from kvstore.identity import Authorizer, Identity

RETRY_MS = 100
CONFIRM_S = 2.0  # how long a stream may outlive its credential
CLOCK_SLACK_S = 1.0  # a deadline of exactly the maximum is not refused for rounding

_log = logging.getLogger("kvstore.server")


class Refused(KVStoreError):
    """The server and this client do not fit together."""


class Denied(KVStoreError):
    """The credential is known, but not for this."""


@dataclass(slots=True)
class Call:
    """One call: whose it is and how long its client waits."""

    identity: Identity
    context: grpc.ServicerContext
    authorizer: Authorizer
    confirmed_s: float = field(default_factory=time.monotonic)

    def wait_s(self, wanted_s: float) -> float:
        """A wait that ends before the client stops listening. Raises InvalidRequest."""
        if not 0 <= wanted_s <= DEADLINE_S_MAX:
            raise InvalidRequest(f"deadline_s is {wanted_s}; [0, {DEADLINE_S_MAX:g}] is wanted")
        left = self.context.time_remaining()
        return max(0.0, min(wanted_s, left - min(0.05, left / 10)))

    def confirm(self) -> None:
        """For calls that last: NotAuthenticated once the credential is not good any more.

        Looks every CONFIRM_S at most, and counts as a call of the tenant then.
        """
        now = time.monotonic()
        if now < self.confirmed_s + CONFIRM_S:
            return
        self.confirmed_s = now
        try:
            identity = self.authorizer.identify(self.context)
        except TooManyCalls:  # it is known, and busy
            return
        if identity != self.identity:
            raise NotAuthenticated("the credential is another one's by now; call again")


# The first class that fits counts.
_STATUSES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Denied, grpc.StatusCode.PERMISSION_DENIED),
    (Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownHandle, grpc.StatusCode.NOT_FOUND),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (SpecError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (KVStoreError, grpc.StatusCode.FAILED_PRECONDITION),
    (TierError, grpc.StatusCode.UNAVAILABLE),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
)


class Guard:
    """Makes grpc handlers out of plain functions."""

    def __init__(self, authorizer: Authorizer, tracer: Any = None) -> None:
        """tracer: OpenTelemetry's, for a span a call; None: without."""
        self._authorizer = authorizer
        self._tracer = tracer

    def handlers(
        self,
        functions: Mapping[str, Callable[..., Any]],
        pools: Mapping[str, ThreadPoolExecutor],
    ) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """A handler for every method of the service, by name.

        functions: by method name, called with the request (or an iterator) and a Call. pools: the
        threads of methods that don't run in the server's own.
        """
        made = {}
        for method in DESCRIPTOR.services_by_name["KVStore"].methods:
            name = method.name
            streams = method.client_streaming, method.server_streaming
            parse = None if name in RAW_REQUESTS else method.input_type._concrete_class.FromString
            wrap = self._stream if streams[1] else self._single
            behaviour = wrap(name, functions[name], _parser(parse, is_stream=streams[0]))
            if name in pools:
                behaviour.experimental_thread_pool = pools[name]  # type: ignore[attr-defined]
            make: Any = {
                (False, False): grpc.unary_unary_rpc_method_handler,
                (False, True): grpc.unary_stream_rpc_method_handler,
                (True, False): grpc.stream_unary_rpc_method_handler,
                (True, True): grpc.stream_stream_rpc_method_handler,
            }[streams]
            reply = method.output_type._concrete_class
            made[name] = make(
                behaviour,
                request_deserializer=None,  # grpc would log a stack for each malformed message
                response_serializer=None if name in RAW_REPLIES else reply.SerializeToString,
            )
        return made

    def _single(
        self, name: str, function: Callable[..., Any], parse: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
            client_has_spoken(context.cancel)
            try:
                call = self._admit(name, context)
                if self._tracer is None:
                    return function(parse(request), call)
                with span(self._tracer, name, context.invocation_metadata()):
                    return function(parse(request), call)
            except Exception as exc:
                status, message = _status_of(name, exc, context)
            context.abort(status, message)

        return behaviour

    def _stream(
        self, name: str, function: Callable[..., Any], parse: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        def behaviour(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            client_has_spoken(context.cancel)
            try:
                call = self._admit(name, context)
                for reply in function(parse(request), call):
                    with waiting_for_client():  # until it has taken this one
                        yield reply
                return
            except Exception as exc:
                if not context.is_active():
                    return
                status, message = _status_of(name, exc, context)
            context.abort(status, message)

        return behaviour

    def _admit(self, name: str, context: grpc.ServicerContext) -> Call:
        identity = self._authorizer.identify(context)
        if identity.role not in ROLES.get(name, ()):
            raise Denied(f"{name} is not for the role {identity.role}")
        if name not in ENDLESS and context.time_remaining() > DEADLINE_S_MAX + CLOCK_SLACK_S:
            raise InvalidRequest(f"{name}: a deadline of at most {DEADLINE_S_MAX:g} s is needed")
        return Call(identity, context, self._authorizer)


def _parser(parse: Callable[[bytes], Any] | None, *, is_stream: bool) -> Callable[[Any], Any]:
    """From what grpc hands in to what a function takes; None leaves raw bytes as they are."""
    if not is_stream:
        return parse or (lambda raw: raw)
    return lambda raw: map(parse, said_by_client(raw)) if parse else said_by_client(raw)


def _retry_ms(exc: Exception) -> int:
    """When another try makes sense."""
    return int(exc.retry_after_s * 1000) + 1 if isinstance(exc, TooManyCalls) else RETRY_MS


def _status_of(
    name: str, exc: Exception, context: grpc.ServicerContext
) -> tuple[grpc.StatusCode, str]:
    for kind, status in _STATUSES:
        if isinstance(exc, kind):
            if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
                context.set_trailing_metadata(((RETRY_KEY, str(_retry_ms(exc))),))
            return status, str(exc)
    if context.is_active():  # an ended call makes grpc raise whatever it likes
        _log.error("%s failed", name, exc_info=exc)
    return grpc.StatusCode.INTERNAL, "the server failed; its log says more"
