"""Pages in fp8, int8 and int4: usable as any, and never an answer for who asked for others."""

from __future__ import annotations

import io
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plain_spec import make_spec
from redis_server import RedisProcess
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.errors import InvalidRequest, SpecError
from kvstore.page_layout import KvQuantization, LayerGroup, PageLayout, ShardGeometry
from kvstore.quantized_session import SCHEMES, codec_of, quantized_session, quantized_spec
from kvstore.tiers import codec_lossless
from kvstore.tiers.codec_shape import from_float32

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore import CacheSpec
    from kvstore.interface import SessionLike

PAGES = 6
SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
SPEC = make_spec(dtype="bfloat16", groups=(LayerGroup.uniform(4, 2, 64),), page_tokens=32)
SESSIONS = ("none", *SCHEMES)
needs_zstandard = pytest.mark.skipif(
    not codec_lossless.available(), reason="the extra `lossless` is not installed"
)


def prompt(seed: int, pages: int = PAGES) -> NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50_000, pages * SPEC.page_tokens, np.int32)


def plain_pages(seed: int, pages: int = PAGES) -> list[bytes]:
    """What a model computed for prompt(seed)."""
    rng = np.random.default_rng(seed)
    size = SPEC.page_bytes // 2
    x = rng.standard_normal((pages, size), np.float32)
    return [from_float32(row, "bfloat16").tobytes() for row in x]


def opened(store: Any, scheme: str, spec: CacheSpec = SPEC) -> SessionLike:
    session: SessionLike
    session = store.session(spec) if scheme == "none" else quantized_session(store, spec, scheme)
    return session


def answer(scheme: str, seed: int) -> list[bytes]:
    """What a session must give for prompt(seed): exact, or after the codec, and nothing else."""
    pages = plain_pages(seed)
    if scheme == "none":
        return pages
    codec, out = codec_of(SPEC, scheme), [bytearray(len(page)) for page in pages]
    for page, target in zip(pages, out, strict=True):
        codec.decode(codec.encode(page), target)
    return [bytes(page) for page in out]


def save(session: SessionLike, seed: int) -> int:
    with session.reserve(prompt(seed), deadline_s=10.0) as run:
        if not run.count:
            return 0
        for view, page in zip(run.views(), plain_pages(seed)[run.start :], strict=True):
            view[:] = page
        return run.commit(durable=True).pages


def load(session: SessionLike, scheme: str, seed: int) -> int:
    """Pages that hit; their bytes are compared."""
    with session.match(prompt(seed)) as hit:
        pages = hit.stage(10.0)
        assert [bytes(view) for view in hit.views(0, pages)] == answer(scheme, seed)[:pages]
        assert hit.valid() or not pages
        return pages


def test_no_scheme_answers_for_another_nor_for_exact_pages(tmp_path: Path) -> None:
    """All are asked for the same prompt before and after each one is stored, and after a start."""
    with Store.open(tmp_path / "s", **SIZES) as store:
        for number, scheme in enumerate(SESSIONS):
            assert save(opened(store, scheme), 0) == PAGES
            hits = [load(opened(store, each), each, 0) for each in SESSIONS]
            assert hits == [PAGES] * (number + 1) + [0] * (len(SESSIONS) - number - 1)
        assert len({usage.namespace for usage in store.namespaces()}) == len(SESSIONS)
        store.check()
    with Store.open(tmp_path / "s", **SIZES) as store:
        assert [load(opened(store, each), each, 0) for each in SESSIONS] == [PAGES] * 4
        store.check()


def test_pages_stored_exact_are_not_handed_out_quantized_from_another_layout() -> None:
    """Equal tokens, equal page bytes: the spec alone keeps them apart."""
    turned = replace(SPEC, layout=PageLayout.LAYER_KV_TOKEN_HEAD_DIM)
    assert turned.page_bytes == SPEC.page_bytes
    with Store.open(None, host_bytes="8MiB") as store:
        save(opened(store, "none"), 1)
        for scheme in SCHEMES:
            with opened(store, scheme, turned).match(prompt(1)) as hit:
                assert hit.pages == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_layouts_share_codes_and_each_gets_its_own_order(scheme: str) -> None:
    turned = replace(SPEC, layout=PageLayout.LAYER_KV_TOKEN_HEAD_DIM)
    with Store.open(None, host_bytes="8MiB") as store:
        save(opened(store, scheme), 2)
        with opened(store, scheme, turned).match(prompt(2)) as hit:
            assert hit.pages == PAGES
            for view, wanted in zip(hit.views(), answer(scheme, 2), strict=True):
                rows = np.frombuffer(view, np.int16).reshape(8, 32, 2, 64)
                heads = np.frombuffer(wanted, np.int16).reshape(8, 2, 32, 64)
                assert np.array_equal(rows.transpose(0, 2, 1, 3), heads)


@pytest.mark.parametrize("disk_codec", ["raw", pytest.param("lossless", marks=needs_zstandard)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_verify_export_and_import_take_quantized_pages_as_any(
    tmp_path: Path, scheme: str, disk_codec: str
) -> None:
    with Store.open(tmp_path / "a", disk_codec=disk_codec, **SIZES) as store:
        save(opened(store, scheme), 3)
        save(opened(store, "none"), 3)
    with (
        Store.open(tmp_path / "a", disk_codec=disk_codec, **SIZES) as store,
        Store.open(tmp_path / "b", disk_codec=disk_codec, **SIZES) as target,
    ):
        *_, found = store.verify()
        assert (found.healthy, found.pages, found.problems) == (True, 2 * PAGES, ())
        namespace = quantized_spec(SPEC, codec_of(SPEC, scheme)).namespace
        file = b"".join(store.export(namespace=namespace))
        *_, done = target.import_pages(io.BytesIO(file).read)
        assert (done.stored, done.on_disk) == (PAGES, True)
        assert load(opened(target, scheme), scheme, 3) == PAGES
        assert load(opened(target, "none"), "none", 3) == 0
        assert len(file) < 0.7 * PAGES * SPEC.page_bytes
        target.check()
    with Store.open(tmp_path / "b", **SIZES) as target:
        assert load(opened(target, scheme), scheme, 3) == PAGES


@pytest.mark.slow
def test_quantized_pages_travel_through_redis_and_stay_what_they_are(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    with RedisProcess(tmp_path / "redis") as server:
        more: dict[str, Any] = {"redis_url": server.url, "secret_file": secret}
        more |= {"redis_lookup_s": 0.05, "host_bytes": "8MiB"}
        with Store.open(None, **more) as first, Store.open(None, **more) as second:
            for scheme in SCHEMES:
                save(opened(first, scheme), 4)
            assert first._share is not None
            assert second._share is not None
            for scheme in (*SCHEMES, "none"):
                wanted = 0 if scheme == "none" else PAGES
                pages = -1
                for _ in range(50):  # a look-up that a busy machine makes too late is a miss
                    assert first._share.writer.flush(time.monotonic() + 20.0)
                    second._share.finder._absent.clear()
                    pages = load(opened(second, scheme), scheme, 4)
                    if pages == wanted:
                        break
                assert pages == wanted, scheme
            second.check()


@pytest.mark.slow
def test_a_server_s_clients_quantize_as_well(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "s") as server:
        server.start()
        with connect(server.address, lookup_deadline_s=10.0) as store:
            session = opened(store, "int8")
            assert save(session, 5) == PAGES
            assert load(session, "int8", 5) == PAGES
            assert load(opened(store, "none"), "none", 5) == 0
            assert session.pin(prompt(5), 60.0) == session.unpin(prompt(5)) == PAGES
            assert session.hint(prompt(5), priority=1, conversation="c") == PAGES
            assert session.end_conversation("c") == PAGES
            assert session.flush()
            session.close()


def test_a_session_is_a_session(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", **SIZES) as store:
        with quantized_session(store, SPEC, "int4", tenant="acme", writer="w") as session:
            assert session.spec == SPEC
            assert session.stored_spec.quantization == KvQuantization("int4-g32-g32", "page")
            assert save(session, 6) == PAGES
            with session.reserve(prompt(6)) as run:
                assert (run.count, run.reason, run.views()) == (0, "present", [])
            with session.reserve(prompt(7)) as run:
                assert (run.start, run.count) == (0, PAGES)
            with session.match(prompt(6)) as hit:
                assert (hit.pages, hit.tokens, hit.host_pages) == (PAGES, PAGES * 32, PAGES)
                assert hit.tiers == ["host"] * PAGES
                with pytest.raises(TypeError, match="read-only"):
                    hit.views(0, 1)[0][0] = 1
            session.report_saved(0.1)
            session.report_prefill(2000, 0, 1.0)
        assert {(chain.tenant, chain.writer) for chain in store.chains()[0]} == {("acme", "w")}
        assert not store.state.index.leases


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_that_are_not_finite_store_nothing(scheme: str) -> None:
    with Store.open(None, host_bytes="8MiB") as store:
        with opened(store, scheme).reserve(prompt(8)) as run:
            for view, page in zip(run.views(), plain_pages(8), strict=True):
                view[:] = page
            run.views()[3][100:102] = b"\xc0\x7f"  # a bfloat16 NaN
            with pytest.raises(InvalidRequest, match="not finite"):
                run.commit()
        assert load(opened(store, scheme), scheme, 8) == 0
        assert store.stats().pages == 0
        assert save(opened(store, scheme), 8) == PAGES  # nothing is left reserved
        store.check()


@pytest.mark.parametrize(
    ("changes", "scheme", "message"),
    [
        ({}, "int3", "'int3' is not one of fp8, int8, int4"),
        ({"quantization": KvQuantization("fp8", "none")}, "int8", "already"),
        ({"groups": (LayerGroup.uniform(4, 2, 63),)}, "int4", "even dim"),
        ({"kv_dtype": "int8"}, "int8", "dtype 'int8'"),
        ({"layout": PageLayout.ENGINE, "shard_bytes": (4096,)}, "int8", "not known here"),
        ({"geometry": ShardGeometry(1, 1, 2)}, "int8", "one shard"),
    ],
)
def test_specs_that_no_codec_takes_are_refused(
    changes: dict[str, Any], scheme: str, message: str
) -> None:
    with Store.open(None, host_bytes="8MiB") as store, pytest.raises(SpecError, match=message):
        quantized_session(store, replace(SPEC, **changes), scheme)
