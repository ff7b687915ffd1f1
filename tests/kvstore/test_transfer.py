"""`kvstore export` and `import`: the same tokens and bytes on another server, or a refusal."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import pytest
from command import run, run_json, shape
from known_pages import PAGE_BYTES, SPEC, content, load, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.export_file import FrameWriter, PieceReader, frames
from kvstore.importer import Importer

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}


def forked() -> np.ndarray:
    """A prompt that shares two pages with prompt(0, ...)."""
    tokens = prompt(0, 5).copy()
    tokens[9] = 7
    return tokens


def fill(store: Any) -> None:
    session = store.session(SPEC, writer="engine-1")
    save(session, prompt(0, 6), durable=True)
    save(session, forked(), durable=True)
    with store.session(SPEC, tenant="acme").reserve(prompt(1, 3), {1: b"image"}) as made:
        for view in made.views():
            view[:] = b"x" * PAGE_BYTES
        made.commit(durable=True)


def exported(store: Any, **chosen: Any) -> bytes:
    return b"".join(store.export(**chosen))


def taken_in(store: Any, file: bytes, **chosen: Any) -> Any:
    *_, last = store.import_pages(io.BytesIO(file).read, **chosen)
    assert last.finished
    return last


@pytest.fixture
def source(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "source", **SIZES) as store:
        fill(store)
        yield store


def test_an_import_hits_with_the_same_bytes_under_its_own_keys(
    source: Store, tmp_path: Path
) -> None:
    file = exported(source)
    with Store.open(tmp_path / "target", **SIZES) as target:
        done = taken_in(target, file)
        assert (done.trees, done.pages, done.stored, done.left_out) == (2, 12, 12, 0)
        assert done.on_disk
        session = target.session(SPEC)
        assert load(session, prompt(0, 6)) == 6
        assert load(session, forked()) == 5
        with target.session(SPEC, tenant="acme").match(prompt(1, 3), {1: b"image"}) as hit:
            assert hit.stage() == 3
            assert bytes(hit.views()[2]) == b"x" * PAGE_BYTES
        theirs = {chain.chain_id for chain in source.chains()[0]}
        ours = {chain.chain_id for chain in target.chains()[0]}
        assert len(ours) == 3
        assert not theirs & ours
        assert {chain.writer for chain in target.chains()[0]} == {"engine-1", ""}
        again = taken_in(target, file)
        assert (again.stored, again.present) == (0, 12)
        target.check()


def test_no_secret_and_no_key_stands_in_the_file(source: Store) -> None:
    file = exported(source)
    assert source.state.secret not in file
    for chain in source.chains()[0]:
        assert bytes.fromhex(chain.chain_id) not in file


def test_pages_from_disk_are_the_same(source: Store, tmp_path: Path) -> None:
    file = exported(source)
    source.close()
    with Store.open(tmp_path / "source", host_bytes="8MiB") as cold:
        assert cold.stats().tiers[0].pages == 0
        assert exported(cold) == file or len(exported(cold)) == len(file)
        with Store.open(tmp_path / "target", **SIZES) as target:
            assert taken_in(target, exported(cold)).stored == 12


def test_one_tenant_namespace_or_chain_can_be_chosen(source: Store, tmp_path: Path) -> None:
    def pages(**chosen: Any) -> int:
        *_, end = frames(io.BytesIO(exported(source, **chosen)).read)
        return int(end.head["pages"])

    assert pages(tenant="acme") == 3
    assert pages(namespace=SPEC.namespace[:4]) == 12
    assert pages(namespace=bytes(16)) == 0
    (longest, *_) = source.chains(sort="size")[0]
    assert pages(chain=longest.chain_id) == 6
    with pytest.raises(InvalidRequest, match="no page's id begins"):
        source.export(chain="0" * 32)


def test_pages_can_become_another_tenants(source: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "target", **SIZES) as target:
        taken_in(target, exported(source, tenant="default"), tenant="newco")
        assert load(target.session(SPEC, tenant="newco"), prompt(0, 6)) == 6
        assert load(target.session(SPEC), prompt(0, 6)) == 0


def test_trees_with_a_salt_are_left_out_and_counted(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", **SIZES) as store:
        save(store.session(SPEC, salt=b"user-1"), prompt(0, 2))
        *_, end = frames(io.BytesIO(exported(store)).read)
    assert (end.head["pages"], end.head["trees_with_salt"]) == (0, 1)


def test_every_flipped_byte_is_refused_with_its_place(source: Store) -> None:
    file = bytearray(exported(source, tenant="acme"))
    step = max(1, len(file) // 300)
    for at in range(0, len(file), step):
        file[at] ^= 0x20
        with pytest.raises(InvalidRequest, match=r"^bytes? \d+") as refused:
            list(frames(io.BytesIO(bytes(file)).read))
        numbers = [int(each) for each in re.findall(r"\d+", str(refused.value))]
        assert numbers[0] <= at, str(refused.value)
        if "checksum" in str(refused.value):
            assert numbers[0] <= at <= numbers[1]
        file[at] ^= 0x20
    list(frames(io.BytesIO(bytes(file)).read))


def test_a_file_that_is_cut_longer_or_reordered_is_refused(source: Store) -> None:
    file = exported(source, tenant="acme")
    for size in (0, 7, 16, 30, len(file) // 2, len(file) - 1):
        with pytest.raises(InvalidRequest, match="byte"):
            list(frames(io.BytesIO(file[:size]).read))
    with pytest.raises(InvalidRequest, match="something follows"):
        list(frames(io.BytesIO(file + b"x").read))
    writer = FrameWriter()
    parts = [
        writer.frame(b"FILE", {"format": 1}),
        writer.frame(b"TREE", {}),
        writer.frame(b"END ", {}),
    ]
    with pytest.raises(InvalidRequest, match="frame 2 where 1 should be"):
        list(frames(io.BytesIO(parts[0] + parts[2] + parts[1]).read))


def test_a_damaged_file_leaves_only_sound_pages_and_no_reservation(
    source: Store, tmp_path: Path
) -> None:
    file = bytearray(exported(source))
    file[len(file) * 2 // 3] ^= 1
    with Store.open(tmp_path / "target", **SIZES) as target:
        with pytest.raises(InvalidRequest, match="the checksum fails"):
            taken_in(target, bytes(file))
        assert not target.state.pending
        session = target.session(SPEC)
        for tokens in (prompt(0, 6), forked()):
            assert load(session, tokens) in range(7)
        assert save(session, prompt(0, 6)) >= 0
        target.check()


@pytest.mark.parametrize(
    "parts",
    [
        [(b"FILE", {"format": 2}, b"")],
        [(b"TREE", {"tenant": "a", "spec": {}}, b"")],
        [(b"FILE", {"format": 1}, b""), (b"PAGE", {}, b"x")],
        [(b"FILE", {"format": 1}, b""), (b"RUN ", {"start": 0, "pages": 1}, b"")],
        [(b"FILE", {"format": 1}, b""), (b"TREE", {"tenant": "a", "spec": {"model": "x"}}, b"")],
        [
            (b"FILE", {"format": 1}, b""),
            (b"TREE", {"tenant": "../x", "spec": SPEC.to_json()}, b""),
        ],
    ],
)
def test_a_file_that_is_sound_and_makes_no_sense_is_refused(parts: Any) -> None:
    writer = FrameWriter()
    file = b"".join(writer.frame(*part) for part in parts) + writer.frame(b"END ", {})
    with (
        Store.open(None, host_bytes="4MiB") as store,
        pytest.raises(InvalidRequest, match="byte"),
    ):
        taken_in(store, file)


def test_a_store_without_room_takes_what_fits_and_says_so(source: Store) -> None:
    file = exported(source, tenant="default")
    with Store.open(None, host_bytes=1 << 16) as small:
        save(small.session(SPEC), prompt(5, 10))
        with small.session(SPEC).match(prompt(5, 10)) as held:
            *_, done = Importer(small, None, room_s=0.01).run(io.BytesIO(file).read)
            assert held.pages == 10
        assert done.left_out > 0
        assert done.stored > 0
        assert done.stored + done.left_out + done.present == 9
        assert not small.state.pending
        small.check()


def test_pieces_of_any_size_read_as_a_file() -> None:
    data = bytes(range(200))
    read = PieceReader(iter([data[:1], b"", data[1:3], data[3:150], data[150:]]))
    assert b"".join(read(size) for size in (0, 2, 100, 3, 500)) == data
    assert read(1) == b""


@pytest.mark.slow
def test_the_commands_carry_chains_from_one_server_to_another(tmp_path: Path) -> None:
    file = tmp_path / "chains.kv"
    with ServerProcess(tmp_path / "a") as first, ServerProcess(tmp_path / "b") as second:
        first.start()
        second.start()
        with connect(first.address, lookup_deadline_s=5.0) as store:
            save(store.session(SPEC), prompt(0, 6), durable=True)  # type: ignore[arg-type]
        said = run_json("export", first.address, str(file))
        assert shape(said) == {
            "file": "str",
            "file_bytes": "int",
            "pages": "int",
            "payload_bytes": "int",
            "runs": "int",
            "trees": "int",
            "trees_with_salt": "int",
            "trees_without_spec": "int",
            "damaged_pages": "int",
        }
        assert file.stat().st_mode & 0o777 == 0o600
        assert "--force" in run("export", first.address, str(file), code=1)
        whole = file.read_bytes()
        file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
        assert "the checksum fails" in run("import", second.address, str(file), code=1)
        assert run_json("ls", second.address)["chains_total"] == 0
        file.write_bytes(whole)
        done = run_json("import", second.address, str(file))
        assert shape(done) == {
            **dict.fromkeys(("trees", "pages", "payload_bytes"), "int"),
            **dict.fromkeys(("stored", "present", "left_out"), "int"),
            "on_disk": "bool",
            "finished": "bool",
        }
        assert (done["stored"], done["on_disk"]) == (6, True)
        with (
            connect(second.address, lookup_deadline_s=5.0) as store,
            store.session(SPEC).match(prompt(0, 6)) as hit,
        ):
            assert hit.stage(5.0) == 6
            assert bytes(hit.views()[5]) == content(prompt(0, 6), 5)
        assert second.terminate() == 0
    assert "6 were there already" in run("import", str(tmp_path / "b"), "-", stdin=whole)
    assert run_any_bytes("export", str(tmp_path / "b"), "-")[:14] == b"KVSTORE-EXPORT"


def run_any_bytes(*arguments: str) -> bytes:
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments], capture_output=True, check=True
    ).stdout
