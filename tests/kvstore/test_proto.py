"""The generated code is what the proto says, and what the proto says stays readable by others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvstore import kvstore_pb2 as messages
from kvstore.kvstore_pb2_grpc import KVStoreStub

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py")


@pytest.mark.slow
def test_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    """`make proto` makes it anew."""
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed: nothing to generate the code with")
    made_by = importlib.metadata.version("grpcio-tools")
    kept = (ROOT / "kvstore" / "kvstore_pb2_grpc.py").read_text()
    if f"GRPC_GENERATED_VERSION = '{made_by}'" not in kept:
        pytest.skip(f"grpcio-tools {made_by} is not the version that made the code kept here")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}", "kvstore/kvstore.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    for name in GENERATED:
        fresh = (tmp_path / "kvstore" / name).read_bytes()
        assert (ROOT / "kvstore" / name).read_bytes() == fresh, f"{name}: run `make proto`"


def test_generated_code_loads_with_protobuf_5() -> None:
    version = (ROOT / "kvstore" / "kvstore_pb2.py").read_text()
    assert "Protobuf Python Version: 5." in version
    assert KVStoreStub is not None


def test_no_page_bytes_travel_in_fields() -> None:
    """Only the raw streams carry them; every other bytes field is named and small by design."""
    known = {
        *("session", "salt", "attach_token", "tokens", "content", "staging_offsets"),
        *("host_slots", "host_generations", "namespace_prefix", "keys"),
    }
    for name, message in messages.DESCRIPTOR.message_types_by_name.items():
        for field in message.fields:
            if field.type == field.TYPE_BYTES and name != "RawPiece":
                assert field.name in known, f"{name}.{field.name}"


def test_no_request_names_a_tenant_but_the_operators() -> None:
    for name, message in messages.DESCRIPTOR.message_types_by_name.items():
        if any(field.name == "tenant" for field in message.fields):
            assert name in {
                *("EvictRequest", "ExplainRequest", "Event", "TreeRequest", "ExportRequest"),
                "ImportHeader",
            }


def test_peers_from_before_the_reasons_and_numbers_of_calls_are_understood_and_understand() -> None:
    newer = {
        "MatchReply": ("reason",),
        "OpenReply": ("takes_back",),
        "MatchRequest": ("call",),
        "ReserveRequest": ("call",),
        "ReleaseRequest": ("call",),
    }
    file = descriptor_pb2.FileDescriptorProto()
    messages.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        kept = [each for each in message.field if each.name not in newer.get(message.name, ())]
        assert len(message.field) - len(kept) == len(newer.get(message.name, ())), message.name
        del message.field[:]
        message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    old = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"kvstore.v1.{name}"))
        for name in newer
    }
    cut = messages.MatchReply(match=3, pages=2, reason="lease limit").SerializeToString()
    read = old["MatchReply"].FromString(cut)
    assert (read.match, read.pages) == (3, 2)
    opened = messages.OpenReply(page_bytes=7, takes_back=True).SerializeToString()
    assert old["OpenReply"].FromString(opened).page_bytes == 7
    for name, message in (
        ("MatchRequest", messages.MatchRequest(tokens=b"abcd", after_match=2, call=9)),
        ("ReserveRequest", messages.ReserveRequest(tokens=b"abcd", after_match=2, call=9)),
        ("ReleaseRequest", messages.ReleaseRequest(match=[4, 5], call=[9])),
    ):
        without = type(message).FromString(message.SerializeToString())
        without.ClearField("call")
        sent = old[name].FromString(without.SerializeToString())
        assert type(message).FromString(sent.SerializeToString()) == without
    reply = messages.OpenReply.FromString(old["OpenReply"](page_bytes=7).SerializeToString())
    assert (reply.page_bytes, reply.takes_back) == (7, False)
