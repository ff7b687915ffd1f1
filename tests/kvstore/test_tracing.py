"""Spans of the service's calls: children of the client's, and they tell nothing of anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="spans need opentelemetry-sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402 # of the same package
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)

from kvstore import kvstore_pb2 as messages  # noqa: E402
from kvstore._version import __version__  # noqa: E402
from kvstore.identity import LocalAuthorizer  # noqa: E402
from kvstore.rpc_guard import Guard  # noqa: E402
from kvstore.tracing import span, tracer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[tuple[Any, InMemorySpanExporter]]:
    """A tracer of our own, and what it has sent."""
    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test"), exporter
    provider.shutdown()


class Context:
    """What the guard asks of a call."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("traceparent", PARENT), ("authorization", "Bearer secret")]

    def time_remaining(self) -> float:
        return 5.0

    def cancel(self) -> None:
        pass


def test_without_a_provider_there_is_no_tracer_and_no_span() -> None:
    assert tracer() is None
    with span(None, "Match", ()):
        pass


def test_a_call_is_a_child_of_its_clients_span(spans: tuple[Any, InMemorySpanExporter]) -> None:
    made, exporter = spans
    guard = Guard(LocalAuthorizer(), made)
    behaviour = guard._single(
        "Open", lambda request, call: request.client_version, messages.OpenRequest.FromString
    )
    request = messages.OpenRequest(client_version=__version__, spec_json=SPEC.to_json())
    assert behaviour(request.SerializeToString(), Context()) == __version__
    (found,) = exporter.get_finished_spans()
    assert found.name == "kvstore.v1.KVStore/Open"
    assert format(found.parent.span_id, "016x") == "b7ad6b7169203331"
    assert dict(found.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "kvstore.v1.KVStore",
        "rpc.method": "Open",
    }


def test_an_error_is_named_by_its_kind_and_says_nothing_more(
    spans: tuple[Any, InMemorySpanExporter],
) -> None:
    made, exporter = spans
    with pytest.raises(ValueError, match="prompt"), span(made, "Match", ()):
        raise ValueError("the prompt itself")
    (found,) = exporter.get_finished_spans()
    assert (found.status.is_ok, found.status.description) == (False, "ValueError")
    assert "prompt" not in found.to_json()
