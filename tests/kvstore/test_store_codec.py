"""The store with a codec on disk: smaller slots, the same bytes, readable whatever is set later."""

from __future__ import annotations

import io
import re
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plain_spec import make_spec
from redis_server import RedisProcess

from kvstore import CacheSpec, Store
from kvstore.errors import ConfigError
from kvstore.spec import KvQuantization, LayerGroup, PageLayout
from kvstore.tiers import codec_lossless
from kvstore.tiers.codec import LOSSY_CODECS, KvShape
from kvstore.tiers.codec_shape import from_float32

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(
    not codec_lossless.available(), reason="the extra `lossless` is not installed"
)
MIB = 1 << 20
PAGE_BYTES, PAGE_TOKENS = 256 << 10, 16
SPEC = CacheSpec.opaque("codec-test", PAGE_TOKENS, PAGE_BYTES)


def pages_of(count: int, seed: int) -> list[bytes]:
    """Pages as models make them in bfloat16; every fourth is noise, which no codec packs."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        x = rng.standard_normal(PAGE_BYTES // 2).astype(np.float32)
        made.append(from_float32(x, "bfloat16").tobytes())
        if number % 4 == 3:
            made[-1] = rng.bytes(PAGE_BYTES)
    return made


def tokens_of(seed: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50_000, count * PAGE_TOKENS, np.int32)


def opened(path: Path, disk_codec: str, **settings: Any) -> Store:
    sizes = {"host_bytes": 16 * MIB, "disk_bytes": 96 * MIB} | settings
    return Store.open(path / "store", disk_codec=disk_codec, **sizes)


def save(store: Store, seed: int, count: int) -> None:
    pages = pages_of(count, seed)
    with store.session(SPEC).reserve(tokens_of(seed, count), deadline_s=10.0) as run:
        for view, page in zip(run.views(), pages[run.start :], strict=True):
            view[:] = page
        done = run.commit(durable=True)
        assert done.durable, done.reason


def load(store: Store, seed: int, count: int) -> int:
    """Pages that hit; their bytes are compared."""
    with store.session(SPEC).match(tokens_of(seed, count)) as hit:
        pages = hit.stage(5.0)
        wanted = pages_of(count, seed)
        for page, view in enumerate(hit.views(0, pages)):
            assert bytes(view) == wanted[page]
        return pages


def slots(store: Store) -> dict[int, int]:
    """Used slots on disk by their size."""
    assert store.state.disk is not None
    found: dict[int, int] = {}
    for each in store.state.disk.containers():
        found[each.slot_bytes] = found.get(each.slot_bytes, 0) + each.used_slots
    return {size: used for size, used in found.items() if used}


RAW_SLOT, PACKED_SLOT = (256 + 4) << 10, (192 + 4) << 10


@pytest.mark.parametrize("encrypt", [False, True])
def test_packed_pages_take_smaller_slots_and_come_back_byte_for_byte(
    tmp_path: Path, encrypt: bool
) -> None:
    if encrypt:
        pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
    with opened(tmp_path, "lossless", encrypt=encrypt) as store:
        save(store, 1, 16)
        assert slots(store) == {PACKED_SLOT: 12, RAW_SLOT: 4}
        store.check()
    with opened(tmp_path, "lossless") as store:
        assert load(store, 1, 16) == 16
        assert store.stats().counters["pages_staged"] == 16
        store.check()


def test_the_setting_may_change_at_any_start(tmp_path: Path) -> None:
    for seed, codec in enumerate(["raw", "lossless", "raw"]):
        with opened(tmp_path, codec) as store:
            save(store, seed, 8)
            for earlier in range(seed + 1):
                assert load(store, earlier, 8) == 8
            assert slots(store)[RAW_SLOT] == [8, 10, 18][seed]


def test_a_lost_catalog_is_rebuilt_from_packed_slots(tmp_path: Path) -> None:
    with opened(tmp_path, "lossless") as store:
        save(store, 4, 12)
    lost = [path for path in (tmp_path / "store").rglob("data.mdb") if path.is_file()]
    assert lost
    for path in lost:
        path.write_bytes(b"lost" * 1024)
    with opened(tmp_path, "raw") as store:
        assert load(store, 4, 12) == 12
        store.check()


@pytest.mark.parametrize("offset", [10, 60, 5000, 150_000])
def test_a_flipped_byte_of_a_packed_page_is_a_miss(tmp_path: Path, offset: int) -> None:
    """In the frame's head, in zstd's part, in the bytes kept as they are."""
    with opened(tmp_path, "lossless") as store:
        save(store, 5, 3)
    for path in (tmp_path / "store").rglob("segment-*"):
        data = bytearray(path.read_bytes())
        frames = [at.start() for at in re.finditer(codec_lossless.MAGIC, bytes(data))]
        if frames:
            data[frames[1] + offset] ^= 1
            path.write_bytes(data)
    with opened(tmp_path, "lossless") as store:
        assert load(store, 5, 3) == 1
        assert store.stats().counters["corrupt_pages"] == 1
        store.check()


@pytest.mark.slow
def test_the_disk_limit_holds_with_slots_of_several_sizes(tmp_path: Path) -> None:
    with opened(tmp_path, "lossless", disk_bytes=24 * MIB, host_bytes=4 * MIB) as store:
        for seed in range(40):  # 320 pages of 256 KiB, about 64 MiB packed
            save(store, seed, 8)
        used = sum(f.stat().st_blocks * 512 for f in store_files(tmp_path))
        assert used <= 24 * MIB
        assert load(store, 39, 8) == 8
        assert store.stats().counters["disk_evictions"] > 0
        store.check()


def store_files(path: Path) -> list[Path]:
    return [file for file in (path / "store").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("name", "message"), [("int4", "KvQuantization"), ("gzip", "raw, lossless")]
)
def test_other_codecs_are_refused_with_a_way_out(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, name)


def test_quantized_pages_have_a_namespace_of_their_own() -> None:
    """The scheme is in the spec, so that a page in int4 never answers for an exact one."""
    exact = make_spec(dtype="bfloat16", groups=(LayerGroup.uniform(4, 2, 64),), page_tokens=32)
    shape = KvShape("bfloat16", layers=4, kinds=2, heads=2, tokens=32, dim=64)
    assert shape.page_bytes == exact.page_bytes
    specs = {exact.namespace}
    for make in LOSSY_CODECS.values():
        codec = make(shape)
        lossy = replace(
            exact,
            layout=PageLayout.ENGINE,
            quantization=KvQuantization(codec.name, "page"),
            shard_bytes=(codec.encoded_bytes,),
        )
        assert lossy.page_bytes == codec.encoded_bytes
        specs.add(lossy.namespace)
    assert len(specs) == 1 + len(LOSSY_CODECS)


def verified(store: Store, *, repair: bool = False) -> Any:
    *_, last = store.verify(repair=repair)
    return last


def exported(store: Store) -> bytes:
    return b"".join(store.export())


def flip_in_frame(path: Path, number: int, offset: int) -> None:
    """Flip a bit of the number-th packed page on disk."""
    frames = [
        (file, at.start())
        for file in sorted((path / "store").rglob("segment-*"))
        for at in re.finditer(codec_lossless.MAGIC, file.read_bytes())
    ]
    file, at = frames[number]
    data = bytearray(file.read_bytes())
    data[at + offset] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("offset", [10, 5000, 150_000])
def test_verify_reads_packed_pages_and_finds_the_bad_one(tmp_path: Path, offset: int) -> None:
    with opened(tmp_path, "lossless") as store:
        save(store, 6, 8)
    with opened(tmp_path, "raw") as store:
        found = verified(store)
        assert (found.healthy, found.pages, found.payload_bytes) == (True, 8, 8 * PAGE_BYTES)
    flip_in_frame(tmp_path, 3, offset)
    with opened(tmp_path, "lossless") as store:
        found = verified(store)
        assert (found.bad_pages, found.healthy, found.problems[0].tier) == (1, False, "disk")
        repaired = verified(store, repair=True)
        assert (repaired.healthy, verified(store).problems) == (True, ())
        assert load(store, 6, 8) == 8 - repaired.dropped_pages
        store.check()


def test_verify_packs_a_bad_page_again_from_its_copy_in_memory(tmp_path: Path) -> None:
    with opened(tmp_path, "lossless") as store:
        save(store, 7, 3)
        flip_in_frame(tmp_path, 1, 5000)
        found = verified(store, repair=True)
        assert (found.bad_pages, found.dropped_pages, found.healthy) == (1, 0, True)
        assert store.flush(10.0)
        assert slots(store) == {PACKED_SLOT: 3}
        assert verified(store).problems == ()
    with opened(tmp_path, "lossless") as store:
        assert load(store, 7, 3) == 3


@pytest.mark.parametrize(("source", "target"), [("lossless", "raw"), ("raw", "lossless")])
def test_an_export_is_the_same_whatever_the_codec_of_either_side(
    tmp_path: Path, source: str, target: str
) -> None:
    with opened(tmp_path / "a", source) as store:
        save(store, 8, 8)
        warm = exported(store)
    with opened(tmp_path / "a", source) as store, opened(tmp_path / "b", target) as other:
        file = exported(store)  # all of it from disk
        assert store.stats().tiers[0].pages == 0
        assert file == warm
        *_, done = other.import_pages(io.BytesIO(file).read)
        assert (done.stored, done.on_disk) == (8, True)
        assert slots(other) == ({RAW_SLOT: 8} if target == "raw" else {PACKED_SLOT: 6, RAW_SLOT: 2})
    with opened(tmp_path / "b", source) as other:
        assert load(other, 8, 8) == 8
        assert verified(other).healthy


@pytest.mark.slow
def test_redis_holds_what_was_stored_not_the_packed_bytes(tmp_path: Path) -> None:
    """The writer packs for its disk only: a store without the codec reads it, and packs anew."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    with RedisProcess(tmp_path / "redis") as server:
        more = {"redis_url": server.url, "secret_file": secret, "redis_lookup_s": 0.05}
        with (
            opened(tmp_path / "a", "lossless", **more) as first,
            opened(tmp_path / "b", "raw", **more) as second,
        ):
            save(first, 9, 6)
            assert slots(first) == {PACKED_SLOT: 5, RAW_SLOT: 1}
            pages = 0
            for _ in range(50):  # a look-up that a busy machine makes too late is a miss
                assert first._share is not None
                assert second._share is not None
                assert first._share.writer.flush(time.monotonic() + 20.0)
                second._share.finder._absent.clear()
                pages = load(second, 9, 6)
                if pages == 6:
                    break
            assert pages == 6
            second.check()
        with opened(tmp_path / "a", "raw", **more) as first:  # from the packed disk again
            assert load(first, 9, 6) == 6
            assert first.stats().counters["corrupt_pages"] == 0
