"""OpenTelemetry spans around the service's calls, where its packages are there and set up.

Run the server under `opentelemetry-instrument`, or set a tracer provider before making a Server.
Without either nothing happens and nothing is paid. A span names the method and how it ended: no
tenant, no token, no message of an error.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.wire import SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["span", "tracer"]

NAME = "kvstore"
# A client's own span comes in these; all else that a call carries is none of tracing's business.
CARRIED = ("traceparent", "tracestate")


def tracer() -> Any:
    """The process's tracer; None where there are no packages or nobody has set them up."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None  # what the packages give as long as nobody has said where spans go
    return trace.get_tracer(NAME)


@contextmanager
def span(tracer: Any, method: str, metadata: Any) -> Iterator[None]:
    """A span for one call, a child of the client's if `metadata` (of the call) names that one."""
    if tracer is None:
        yield
        return
    from opentelemetry import propagate, trace

    carrier = {key: value for key, value in metadata or () if key in CARRIED}
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
    with tracer.start_as_current_span(
        f"{SERVICE}/{method}",
        context=propagate.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        try:
            yield
        except Exception as exc:
            made.set_status(trace.StatusCode.ERROR, type(exc).__name__)
            raise
