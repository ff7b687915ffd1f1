"""The store with a disk: restarts, promotion, one read for many, damage, limits, second owners."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, content, load, prompt, save

from kvstore import CacheSpec, Store
from kvstore.errors import CapacityError, DirectoryError
from kvstore.removal import Selection

if TYPE_CHECKING:
    from pathlib import Path

DISK = "64MiB"


def opened(path: Path, host_bytes: int = 1 << 20, **settings: object) -> Store:
    return Store.open(path / "store", host_bytes=host_bytes, **({"disk_bytes": DISK} | settings))


def test_everything_committed_is_a_hit_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        session = store.session(SPEC, writer="first")
        for seed in range(10):
            save(session, prompt(seed, 7))
        shared = np.concatenate([prompt(3, 4), prompt(77, 3)])
        save(session, shared)
    with opened(tmp_path) as store:
        store.check()
        session = store.session(SPEC)
        for seed in range(10):
            assert load(session, prompt(seed, 7)) == 7
        assert load(session, shared) == 7
        assert {chain.writer for chain in store.chains()[0]} == {"first"}
        store.check()


def test_extras_survive_a_restart(tmp_path: Path) -> None:
    tokens = prompt(0, 3)
    with opened(tmp_path) as store, store.session(SPEC).reserve(tokens, {1: b"image"}) as run:
        for view in run.views():
            view[:] = b"x" * PAGE_BYTES
        run.commit()
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        with session.match(tokens, {1: b"image"}) as hit:
            assert hit.stage() == 3
        assert session.match(tokens).pages == 1
        assert session.match(tokens, {1: b"other"}).pages == 1


def test_a_durable_commit_says_so_and_a_store_in_memory_says_why_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store, store.session(SPEC).reserve(prompt(0, 3)) as run:
        done = run.commit(durable=True)
        assert (done.pages, done.durable, done.reason) == (3, True, "")
    with Store.open(None, host_bytes=1 << 20) as memory:
        with memory.session(SPEC).reserve(prompt(0, 3)) as run:
            done = run.commit(durable=True)
        assert (done.pages, done.durable) == (3, False)
        assert "no disk" in done.reason


def test_pages_that_left_the_arena_come_back_from_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        for seed in range(60):  # 600 pages of 4 KiB, an arena of 1 MiB
            assert save(session, prompt(seed, 10)) == 10
        assert session.flush()
        for seed in range(60):
            assert load(session, prompt(seed, 10)) == 10
        counters = store.stats().counters
        assert counters["host_evictions"] > 300
        assert counters["pages_staged"] > 300
        store.check()


def test_sixty_four_threads_cause_one_write_and_one_disk_read_a_page(tmp_path: Path) -> None:
    tokens = prompt(0, 16)
    together = threading.Barrier(64)
    wrong: list[object] = []

    def work(store: Store) -> None:
        session = store.session(SPEC)
        together.wait()
        with session.reserve(tokens) as run:
            for offset, view in enumerate(run.views()):
                view[:] = content(tokens, run.start + offset)
            if run.count:
                run.commit(durable=True)
        together.wait()
        try:
            if load(session, tokens) != 16:
                wrong.append("short")
        except AssertionError as exc:
            wrong.append(exc)

    def crowd(store: Store) -> None:
        threads = [threading.Thread(target=work, args=(store,)) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with opened(tmp_path) as store:
        crowd(store)
        counters = store.stats().counters
        assert (counters["pages_committed"], counters["disk_pages_written"]) == (16, 16)
    with opened(tmp_path) as store:
        crowd(store)
        counters = store.stats().counters
        assert (counters["pages_committed"], counters["disk_reads"]) == (0, 16)
    assert wrong == []


def test_a_flipped_byte_is_a_miss_and_the_rest_still_hits(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        for seed in range(4):
            save(session, prompt(seed, 6))
    marked = content(prompt(2, 6), 3)
    flipped = 0
    for path in (tmp_path / "store").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        place = data.find(marked)
        if place >= 0:
            with path.open("r+b") as file:
                file.seek(place + 100)
                file.write(bytes([data[place + 100] ^ 1]))
            flipped += 1
    assert flipped == 1
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        assert load(session, prompt(2, 6)) == 3
        assert [load(session, prompt(seed, 6)) for seed in (0, 1, 3)] == [6, 6, 6]
        assert store.stats().counters["corrupt_pages"] == 1
        assert save(session, prompt(2, 6)) == 3
        assert load(session, prompt(2, 6)) == 6
        store.check()


def test_a_second_store_on_the_directory_is_refused_with_the_owner(tmp_path: Path) -> None:
    code = (
        "import sys; from kvstore import Store; from kvstore.errors import DirectoryError\n"
        f"try: Store.open({str(tmp_path / 'store')!r}, host_bytes=1<<20, disk_bytes={DISK!r})\n"
        "except DirectoryError as exc: print(exc); sys.exit(3)"
    )
    with opened(tmp_path) as store:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 3
        assert "in use" in done.stdout
        with pytest.raises(DirectoryError, match="in use"):
            opened(tmp_path)
        assert save(store.session(SPEC), prompt(0, 2)) == 2


def test_the_disk_limit_holds_while_more_is_written(tmp_path: Path) -> None:
    limit = 24 << 20
    with opened(tmp_path, disk_bytes=limit, host_bytes=4 << 20) as store:
        session = store.session(SPEC)
        for seed in range(300):  # 12,000 pages of 8 KiB slots: 94 MiB
            save(session, prompt(seed, 40))
            if seed % 10 == 0:
                assert used_bytes(tmp_path / "store") <= limit
        assert session.flush()
        assert used_bytes(tmp_path / "store") <= limit
        assert load(session, prompt(299, 40)) == 40
        assert store.stats().counters["disk_evictions"] > 0
        store.check()
    with opened(tmp_path, disk_bytes=limit, host_bytes=4 << 20) as store:
        hits = sum(load(store.session(SPEC), prompt(seed, 40)) for seed in range(300))
        assert hits > 500


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_specs_of_other_page_sizes_take_over_the_capacity(tmp_path: Path) -> None:
    large = CacheSpec.opaque("large", page_tokens=PAGE_TOKENS, page_bytes=64 << 10)
    with opened(tmp_path, disk_bytes=24 << 20, host_bytes=2 << 20) as store:
        small_session, large_session = store.session(SPEC), store.session(large)
        for seed in range(150):
            save(small_session, prompt(seed, 40))
        for seed in range(30):
            tokens = prompt(seed, 10)
            while True:  # room comes in pieces, as small pages reach the disk and leave
                with large_session.reserve(tokens, deadline_s=10.0) as run:
                    assert run.count or run.reason == "present"
                    for view in run.views():
                        view[:] = bytes([seed]) * len(view)
                    assert run.commit(durable=True).durable
                    if not run.count:
                        break
        with large_session.match(prompt(29, 10)) as hit:
            assert hit.stage() == 10
            assert all(bytes(view) == bytes([29]) * (64 << 10) for view in hit.views())
        store.check()


def test_evicted_chains_do_not_come_back_and_their_bytes_are_gone(tmp_path: Path) -> None:
    tokens = prompt(0, 3)
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        save(session, tokens, durable=True)
        save(session, prompt(1, 3), durable=True)
        root = store.root(SPEC.namespace)
        assert store.evict(Selection(prefix=tokens[:4], root=root)).pages == 3
    with opened(tmp_path) as store:
        assert load(store.session(SPEC), tokens) == 0
        assert load(store.session(SPEC), prompt(1, 3)) == 3


def test_a_stage_that_has_no_time_returns_at_once_and_the_next_one_hits(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        save(store.session(SPEC), prompt(0, 5))
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        with session.match(prompt(0, 5)) as hit:
            assert hit.tiers == ["disk"] * 5
            assert hit.stage(0.0) <= 5
            assert hit.stage(5.0) == 5
            assert hit.tiers == ["host"] * 5
        assert store.stats().leases == 0


def test_old_pages_leave_when_max_age_is_set(tmp_path: Path) -> None:
    with opened(tmp_path, max_age_s=1000.0) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 5), durable=True)
        store._housekeeper.tick()
        assert load(session, prompt(0, 5)) == 5
        later = store.state.wall_clock() + 1002
        store.state.wall_clock = lambda: later
        store._housekeeper.tick()
        assert load(session, prompt(0, 5)) == 0
        store.check()


def test_segments_spread_over_several_directories_and_are_found_again(tmp_path: Path) -> None:
    more = [tmp_path / "a", tmp_path / "b"]
    with opened(tmp_path, disk_bytes=256 << 20, disk_directories=more) as store:
        session = store.session(SPEC)
        for seed in range(200):  # 8,000 slots of 8 KiB: more than one segment
            assert save(session, prompt(seed, 40)) == 40
        assert session.flush()
    assert sum(any(path.rglob("segment-*")) for path in [tmp_path / "store", *more]) >= 2
    with Store.open(tmp_path / "store", host_bytes=1 << 20) as store:  # it remembers where
        assert load(store.session(SPEC), prompt(0, 40)) == 40
        assert load(store.session(SPEC), prompt(199, 40)) == 40


def test_present_pages_can_be_made_durable_by_who_finds_them(tmp_path: Path) -> None:
    tokens = prompt(0, 4)
    with opened(tmp_path) as store:
        session = store.session(SPEC)
        save(session, tokens)
        with session.reserve(tokens) as run:
            assert (run.count, run.reason) == (0, "present")
            assert run.commit(durable=True).durable
        assert store.stats().counters["disk_pages_written"] == 4
    with Store.open(None, host_bytes=1 << 20) as memory, memory.session(SPEC).reserve([]) as run:
        assert not run.commit(durable=True).durable


def test_a_lost_or_changed_secret_is_refused_not_a_silent_loss(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        save(store.session(SPEC), prompt(0, 2))
    secret = tmp_path / "store" / "secret"
    kept = secret.read_bytes()
    secret.unlink()
    with pytest.raises(DirectoryError, match="is missing"):
        opened(tmp_path)
    assert not secret.exists()
    secret.write_bytes(kept[::-1])
    secret.chmod(0o600)
    with pytest.raises(DirectoryError, match="is not the secret"):
        opened(tmp_path)
    secret.write_bytes(kept)
    with opened(tmp_path) as store:
        assert load(store.session(SPEC), prompt(0, 2)) == 2


def test_a_page_too_large_for_the_arena_is_refused_or_a_miss_and_others_go_on(
    tmp_path: Path,
) -> None:
    large = CacheSpec.opaque("large", page_tokens=PAGE_TOKENS, page_bytes=1 << 20)
    with opened(tmp_path, host_bytes=8 << 20) as store:
        assert store.state.host is not None
        assert store.state.host.wait_populated(10.0)
        session = store.session(large)
        with session.reserve(prompt(0, 2)) as run:
            assert run.commit(durable=True).pages == 2
        save(store.session(SPEC), prompt(0, 2), durable=True)
        found = session.match(prompt(0, 2))
        assert found.pages == 2
    with opened(tmp_path, host_bytes=1 << 20) as store:
        with pytest.raises(CapacityError, match="raise host_bytes"):
            store.session(large)
        pages = store.state.index.match(store.root(large.namespace), prompt(0, 2))
        coming = store._stager.begin(pages.tolist())  # as a race would have it
        store._stager.wait(coming, store.state.clock() + 5)
        assert load(store.session(SPEC), prompt(0, 2)) == 2


def test_a_catalog_behind_a_link_is_not_written_through_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        save(store.session(SPEC), prompt(0, 2))
    victim = tmp_path / "victim"
    victim.write_bytes(b"V" * 8192)
    for name in ("lock.mdb", "data.mdb"):
        path = tmp_path / "store" / "catalog" / name
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
        with opened(tmp_path) as store:
            assert load(store.session(SPEC), prompt(0, 2)) == 2
        assert victim.read_bytes() == b"V" * 8192


def test_evicting_from_many_threads_at_once_ends_well(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work(store: Store, number: int) -> None:
        session = store.session(SPEC, writer=f"w{number % 4}")
        try:
            for seed in range(12):
                save(session, prompt(100 * number + seed, 5), wait_s=0.1)
                store.evict(Selection(writer=f"w{seed % 4}"))
        except BaseException as exc:
            failed.append(exc)

    with opened(tmp_path) as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        store.check()
        assert store.flush()
