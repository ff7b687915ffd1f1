"""The weights' digest sees every byte, and forgets nothing that could be stale."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import SpecError
from kvstore.spec import CacheSpec, KvQuantization, LayerGroup, PageLayout, ShardGeometry
from kvstore.weights import MEMORY_NAME, weights_digest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of two old weight files and a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        write(folder / f"model-{number}.safetensors", bytes([number]) * 5_000_000)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where digests are remembered."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def write(file: Path, content: bytes) -> None:
    """A weight file as a download leaves it."""
    file.write_bytes(content)


def tomorrow() -> int:
    """The clock when files written by a test have long settled."""
    return time.time_ns() + 86_400 * 10**9


def digest(path: Path, store: Path | None = None) -> str:
    """weights_digest, a day after the files were written."""
    return weights_digest(path, store, clock_ns=tomorrow)


def read_bytes(path: Path, store: Path | None) -> int:
    """How many bytes of weights a call reads."""
    seen = [0]
    weights_digest(path, store, lambda done, total: seen.append(done), clock_ns=tomorrow)
    return max(seen)


def flip(file: Path, offset: int) -> None:
    """Change one byte in place, keeping size, inode and the time of content."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_digest_fits_a_spec(model: Path) -> None:
    found = digest(model)
    whole = LayerGroup.uniform(2, 2, 8)
    spec = CacheSpec(
        model="m",
        weights=found,
        config_digest="0" * 32,
        backend="b",
        page_format="plain",
        kv_dtype="float32",
        groups=(whole,),
        rope="{}",
        page_tokens=16,
        layout=PageLayout.LAYER_KV_HEAD_TOKEN_DIM,
        quantization=KvQuantization.none(),
        adapter="none",
        geometry=ShardGeometry.single(),
    )
    assert spec.weights == found == digest(model)


@pytest.mark.parametrize("offset", [0, 4_194_303, 4_194_304, 4_999_999])
def test_one_flipped_byte_is_another_model(model: Path, store: Path, offset: int) -> None:
    """Equal names, shapes, headers and even times are not equal weights."""
    before = digest(model, store)
    flip(model / "model-1.safetensors", offset)
    assert digest(model, store) != before
    flip(model / "model-1.safetensors", offset)
    assert digest(model, store) == before


def test_files_are_read_once(model: Path, store: Path) -> None:
    assert read_bytes(model, store) == 10_000_000
    assert read_bytes(model, store) == 0
    assert read_bytes(model / "model-0.safetensors", store) == 0
    assert digest(model, store) == digest(model)


def test_only_the_changed_file_is_read_again(model: Path, store: Path) -> None:
    digest(model, store)
    (model / "model-1.safetensors").unlink()
    write(model / "model-1.safetensors", b"new" * 1000)
    changed = digest(model)
    assert read_bytes(model, store) == 3000
    assert digest(model, store) == changed


def test_a_file_that_changed_just_now_is_not_remembered(model: Path, store: Path) -> None:
    """It could change again within one tick of the file system's clock."""
    written = (model / "model-0.safetensors").stat().st_ctime_ns
    weights_digest(model, store, clock_ns=lambda: written + 10**9)
    assert not (store / MEMORY_NAME).exists()
    assert read_bytes(model, store) == 10_000_000


def test_memory_is_private(model: Path, store: Path) -> None:
    before = os.umask(0)
    try:
        digest(model, store)
    finally:
        os.umask(before)
    assert (store / MEMORY_NAME).stat().st_mode & 0o777 == 0o600
    assert os.listdir(store) == [MEMORY_NAME]


@pytest.mark.slow
def test_a_damaged_memory_costs_time_and_never_lies(model: Path, store: Path) -> None:
    """Every single-byte change of the memory is noticed or harmless."""
    truth = digest(model, store)
    good = (store / MEMORY_NAME).read_bytes()
    for offset in range(len(good)):
        damaged = bytearray(good)
        damaged[offset] ^= 4
        (store / MEMORY_NAME).write_bytes(damaged)
        if read_bytes(model, store):
            break
    else:
        pytest.fail("no damage was ever noticed")
    for content in (b"", b"{", b"[]", b"null", b'{"version":1}', b"\xff" * 99, good[:-40]):
        (store / MEMORY_NAME).write_bytes(content)
        assert digest(model, store) == truth
    for offset in range(0, len(good), 17):
        damaged = bytearray(good)
        damaged[offset] ^= 4
        (store / MEMORY_NAME).write_bytes(damaged)
        assert digest(model, store) == truth


def test_a_memory_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    assert digest(model, tmp_path / "absent") == digest(model)


def test_names_of_files_do_not_count(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    (model / "model-0.safetensors").rename(model / "zzz.safetensors")
    assert digest(model) == before
    copy = tmp_path / "copy.gguf"
    copy.write_bytes((model / "model-1.safetensors").read_bytes())
    (model / "zzz.safetensors").unlink()
    assert digest(copy) == digest(model)


def test_a_link_is_its_target(model: Path, store: Path, tmp_path: Path) -> None:
    """A hub snapshot is a directory of links to blobs."""
    digest(model, store)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in model.glob("*.safetensors"):
        (snapshot / file.name).symlink_to(file)
    assert digest(snapshot, store) == digest(model, store)
    assert read_bytes(snapshot, store) == 0


def test_two_equal_files_are_not_one(model: Path) -> None:
    write(model / "model-1.safetensors", (model / "model-0.safetensors").read_bytes())
    both = digest(model)
    (model / "model-1.safetensors").unlink()
    assert digest(model) != both


def test_no_weights_is_an_error_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecError, match="no weight files"):
        digest(tmp_path)
    with pytest.raises(SpecError, match="absent"):
        digest(tmp_path / "absent")


def test_weights_that_change_while_they_are_read_are_refused(model: Path) -> None:
    def meddle(done: int, total: int) -> None:
        if done == total:
            with (model / "model-1.safetensors").open("ab") as stream:
                stream.write(b"more")

    with pytest.raises(SpecError, match="changed while it was read"):
        weights_digest(model, None, meddle)
