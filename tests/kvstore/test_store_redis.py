"""Stores that share pages through a real Redis: hits, misses, restarts, silence, junk, eviction."""

from __future__ import annotations

import logging
import random
import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, content, load, prompt, save
from redis_server import RULES, RedisProcess

from kvstore import CacheSpec, Store, StoreConfig
from kvstore.errors import ConfigError, DirectoryError
from kvstore.identity import DEFAULT_TENANT, PUBLIC_TENANT
from kvstore.removal import Selection
from kvstore.server_config import ServerConfig
from kvstore.state import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np

WAIT_S = 20.0
PAGES = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return new_secret(tmp_path / "secret")


def new_secret(path: Path) -> Path:
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


def opened(server: RedisProcess, secret_file: Path | None, **settings: Any) -> Store:
    """A store of its own that shares; look-ups wait as long as is allowed, for busy machines."""
    settings = {
        "host_bytes": "4MiB",
        "redis_url": server.url,
        "secret_file": secret_file,
        "redis_lookup_s": 0.05,
    } | settings
    store = Store.open(settings.pop("directory", None), **settings)
    until(lambda: ready(store))
    return store


def ready(store: Store) -> bool:
    return store.state.redis is not None and store.state.redis.link.ready


def until(what: Callable[[], Any]) -> None:
    """Wait for something that threads of a store bring about."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def share(store: Store, tokens: np.ndarray, tenant: str = DEFAULT_TENANT) -> None:
    """Store a prompt, and see it through to Redis even if that takes several tries."""
    save(store.session(SPEC, tenant=tenant), tokens)
    writer = store._share.writer

    def written() -> bool:
        if writer.flush(time.monotonic() + WAIT_S):
            pages = store.state.index.match(store.root(SPEC.namespace, tenant), tokens)
            with store.state.lock:
                records = [store.state.record(page) for page in pages.tolist()]
            if all(store.state.redis.renew(records)):
                return True
            writer.announce()
        return False

    until(lambda: ready(store) and written())


def found(store: Store, tokens: np.ndarray) -> int:
    """Pages that a store gives, compared, when a busy machine is given some tries."""
    pages = 0
    for _ in range(20):
        until(lambda: ready(store))
        store._share.finder._absent.clear()  # as after ABSENT_S
        pages = max(pages, load(store.session(SPEC), tokens))
        store.check()
        if pages == len(tokens) // PAGE_TOKENS:
            break
    return pages


def drop_idle(store: Store, idle_s: float) -> int:
    with store.state.lock:
        return store.state.drop_idle_remote(idle_s)


def counted(store: Store, name: str) -> int:
    return store.stats().counters[name]


def test_what_one_store_has_stored_the_other_loads(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        with second.session(SPEC).match(prompt(1, PAGES)) as hit:
            assert hit.tiers == ["redis"] * PAGES
            assert hit.host_pages == 0
            assert hit.stage(WAIT_S) == PAGES
            assert hit.tiers == ["host"] * PAGES
            for page, view in enumerate(hit.views()):
                assert bytes(view) == content(prompt(1, PAGES), page)
        second.check()
        assert counted(second, "redis_pages_read") == PAGES
        assert counted(second, "redis_pages_written") == 0  # it came from there
        server.kill()
        assert load(second.session(SPEC), prompt(1, PAGES)) == PAGES  # now it is its own


def test_pages_from_redis_go_on_to_disk_and_survive_there(
    server: RedisProcess, secret_file: Path, tmp_path: Path
) -> None:
    disk = {"directory": tmp_path / "b", "disk_bytes": "64MiB"}
    with opened(server, secret_file) as first:
        share(first, prompt(1, PAGES))
        with opened(server, secret_file, **disk) as second:
            assert found(second, prompt(1, PAGES)) == PAGES
            assert second.flush(WAIT_S)
    server.kill()
    again = Store.open(tmp_path / "b", host_bytes="4MiB", secret_file=secret_file)
    with again:
        assert load(again.session(SPEC), prompt(1, PAGES)) == PAGES


def test_a_store_that_restarts_empty_finds_its_pages_again(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as store:
        share(store, prompt(1, PAGES))
    with opened(server, secret_file) as store:
        assert found(store, prompt(1, PAGES)) == PAGES


def test_closing_writes_what_still_waits(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as store:
        save(store.session(SPEC), prompt(1, 2))
    until(lambda: len(server.pages()) == 4)


@pytest.mark.parametrize("other", ["secret", "tenant", "spec", "salt"])
def test_stores_and_tenants_that_differ_never_meet(
    server: RedisProcess, secret_file: Path, tmp_path: Path, other: str
) -> None:
    theirs = new_secret(tmp_path / "theirs") if other == "secret" else secret_file
    spec = CacheSpec.opaque("else", page_tokens=PAGE_TOKENS, page_bytes=4096)
    with opened(server, secret_file) as first, opened(server, theirs) as second:
        share(first, prompt(1, PAGES))
        session = second.session(
            spec if other == "spec" else SPEC,
            tenant="else" if other == "tenant" else "default",
            salt=b"else" if other == "salt" else b"",
        )
        assert load(session, prompt(1, PAGES)) == 0
        assert counted(second, "redis_lookups") == 1
        assert counted(second, "redis_hits") == 0
        assert found(second, prompt(1, PAGES)) == (0 if other == "secret" else PAGES)


def test_public_pages_are_found_in_redis_too(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES), tenant=PUBLIC_TENANT)
        mine = second.session(SPEC, tenant="mine", public=True)
        save(mine, prompt(1, 2))
        until(lambda: load(mine, prompt(1, PAGES)) == PAGES)
        assert load(second.session(SPEC, tenant="mine"), prompt(1, PAGES)) == 2
        second.check()


def test_a_longer_prompt_takes_the_rest_from_redis(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        save(second.session(SPEC), prompt(1, 3))
        with second.session(SPEC).match(prompt(1, PAGES)) as hit:
            assert hit.tiers == ["host"] * 3 + ["redis"] * 5
        assert found(second, prompt(1, PAGES)) == PAGES


def test_extras_are_part_of_a_page_in_redis_too(server: RedisProcess, secret_file: Path) -> None:
    tokens = prompt(1, 2)
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        with first.session(SPEC).reserve(tokens, {1: b"image"}) as run:
            for page, view in enumerate(run.views()):
                view[:] = content(tokens, page)
            run.commit()
        until(lambda: len(server.pages()) == 4)
        session = second.session(SPEC)
        for extras, pages in [({1: b"image"}, 2), ({1: b"other"}, 1), (None, 1)]:
            with session.match(tokens, extras) as hit:
                assert hit.pages == pages


def test_a_full_local_hit_never_touches_redis(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as store:
        share(store, prompt(1, PAGES))
        commands = int(server.ask("INFO", "commandstats").get("cmdstat_get", {}).get("calls", 0))
        for _ in range(50):
            assert load(store.session(SPEC), prompt(1, PAGES)) == PAGES
        after = int(server.ask("INFO", "commandstats")["cmdstat_get"]["calls"])
        assert after - commands <= 2  # the watch's
        assert counted(store, "redis_lookups") == 0


def test_a_prompt_just_found_missing_is_not_asked_about_again(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as store:
        for _ in range(20):
            assert load(store.session(SPEC), prompt(1, PAGES)) == 0
        assert counted(store, "redis_lookups") <= 2  # a second if 20 look-ups took a second
        assert counted(store, "lookups") == 20


def test_another_store_s_page_is_not_written_twice(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        save(second.session(SPEC), prompt(9, 1))
        share(first, prompt(1, PAGES))
        keys = sorted(server.pages())
        share(second, prompt(1, PAGES))
        assert sorted(set(server.pages()) | set(keys)) == sorted(server.pages())
        assert counted(second, "redis_pages_present") >= PAGES


def test_pages_that_nobody_asks_for_leave_the_index_and_stay_in_redis(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        hit = second.session(SPEC).match(prompt(1, PAGES))
        assert hit.pages == PAGES
        assert drop_idle(second, 0.0) == 0  # leased
        hit.release()
        assert drop_idle(second, 60.0) == 0  # asked for a moment ago
        assert drop_idle(second, 0.0) == PAGES
        second.check()
        assert second.stats().pages == 0
        assert len(server.pages()) == 2 * PAGES
        assert found(second, prompt(1, PAGES)) == PAGES


def test_what_redis_has_never_stands_in_the_way_of_room(
    server: RedisProcess, secret_file: Path
) -> None:
    """A page of the arena may not leave while another is known below it; that one goes first."""
    with opened(server, secret_file) as first:
        share(first, prompt(1, PAGES))
        with opened(server, secret_file, host_bytes="64KiB") as second:
            session = second.session(SPEC)
            save(session, prompt(1, 2))
            with session.match(prompt(1, PAGES)) as hit:
                assert hit.pages == PAGES
            for seed in range(2, 8):
                assert save(session, prompt(seed, 4), wait_s=0.0) == 4
            second.check()


def test_few_bytes_for_redis_are_kept_and_mean_shorter_matches(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        second.state.redis._capacity_bytes = 5 * 4096
        with second.session(SPEC).match(prompt(1, PAGES)) as hit:
            assert hit.pages == 5
            second.check()
            assert second.stats().tiers[-1].used_bytes <= 5 * 4096
            assert hit.stage(WAIT_S) == 5
        assert found(second, prompt(1, PAGES)) == PAGES


def test_storing_a_prompt_that_only_redis_has_makes_it_ones_own(
    server: RedisProcess, secret_file: Path
) -> None:
    """An engine that could not load a hit computes it, and stores it all."""
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        session = second.session(SPEC)
        held = session.match(prompt(1, PAGES))
        assert held.pages == PAGES
        with session.reserve(prompt(1, PAGES)) as run:
            assert (run.start, run.count, run.reason) == (0, 0, "in progress")
        held.release()
        assert save(session, prompt(1, PAGES)) == PAGES
        second.check()
        assert load(session, prompt(1, PAGES)) == PAGES


def test_a_page_that_is_being_written_here_is_not_taken_from_redis(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        session = second.session(SPEC)
        with session.reserve(prompt(1, 4)) as run:
            for page, view in enumerate(run.views()):
                view[:] = content(prompt(1, 4), page)
            with session.match(prompt(1, PAGES)) as hit:
                assert hit.pages == 0
            run.commit()
        second.check()
        assert found(second, prompt(1, PAGES)) == PAGES


def test_a_silent_redis_costs_local_hits_nothing_and_is_used_again(
    server: RedisProcess, secret_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstore.redis")
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        save(second.session(SPEC), prompt(2, PAGES))
        server.pause()
        for seed in range(10, 20):
            assert load(second.session(SPEC), prompt(seed, PAGES)) == 0
            assert load(second.session(SPEC), prompt(2, PAGES)) == PAGES
        until(lambda: "breaker open" in second.stats().tiers[-1].state)
        asked = counted(second, "redis_lookups")
        assert load(second.session(SPEC), prompt(1, PAGES)) == 0
        assert counted(second, "redis_lookups") == asked
        assert save(second.session(SPEC), prompt(3, PAGES)) == PAGES
        assert counted(second, "redis_dropped") >= PAGES
        server.resume()
        assert found(second, prompt(1, PAGES)) == PAGES
        second.check()


def test_a_redis_that_dies_in_a_load_is_a_miss_of_what_did_not_come(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        with second.session(SPEC).match(prompt(1, PAGES)) as hit:
            assert hit.pages == PAGES
            server.kill()
            assert hit.stage(WAIT_S) == 0
        second.check()
        assert load(second.session(SPEC), prompt(1, PAGES)) == 0
        assert save(second.session(SPEC), prompt(1, PAGES)) == PAGES
        second.check()


def test_pages_are_offered_again_to_a_redis_that_came_back_empty(
    server: RedisProcess, secret_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.redis_writer.ANNOUNCE_WITHIN_S", 0.1)
    with opened(server, secret_file) as store:
        share(store, prompt(1, PAGES))
        server.kill()
        until(lambda: "breaker open" in store.stats().tiers[-1].state)
        save(store.session(SPEC), prompt(2, PAGES))  # meanwhile
        with RedisProcess(tmp_path / "redis", port=server.port) as again:
            until(lambda: len(again.pages()) == 4 * PAGES)
            again.ask("FLUSHALL")
            store.state.redis.link._wake.set()  # as WATCH_EVERY_S later
            until(lambda: len(again.pages()) == 4 * PAGES)
        assert load(store.session(SPEC), prompt(1, PAGES)) == PAGES  # nothing was dropped here


def test_flushall_between_look_up_and_load_is_a_miss(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        save(second.session(SPEC), prompt(1, 2))
        with second.session(SPEC).match(prompt(1, PAGES)) as hit:
            assert hit.pages == PAGES
            server.ask("FLUSHALL")
            assert hit.stage(WAIT_S) == 2
        second.check()
        assert load(second.session(SPEC), prompt(1, PAGES)) == 2  # what is its own stays


@pytest.mark.slow
def test_junk_in_every_key_never_gives_wrong_bytes(server: RedisProcess, secret_file: Path) -> None:
    """Any number of keys are flipped, cut, swapped, emptied, of another type; load compares."""
    rng = random.Random(3)
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        got = []
        for turn in range(30):
            share(first, prompt(1, PAGES))
            keys = server.pages()
            for key in rng.sample(keys, rng.randrange(1, len(keys))):
                spoil(server, key, rng, keys)
            second.evict(Selection(everything=True)) if turn % 2 else None
            drop_idle(second, 0.0)
            server_was_asked = counted(second, "redis_lookups")
            second._share.finder._absent.clear()
            got.append(load(second.session(SPEC), prompt(1, PAGES)))
            assert counted(second, "redis_lookups") >= server_was_asked
            second.check()
            first.check()
            with second.session(SPEC).match(prompt(1, PAGES)) as hit:
                hit.release()
            server.ask("FLUSHALL")
            remove_here(second)
        assert counted(second, "redis_bad_pages") > 10
        assert min(got) == 0
        assert load(first.session(SPEC), prompt(1, PAGES)) == PAGES


def remove_here(store: Store) -> None:
    """Evict all of a store's pages, in Redis too if it can be asked."""
    try:
        store.evict(Selection(everything=True))
    except DirectoryError:
        until(lambda: ready(store))


def spoil(server: RedisProcess, key: bytes, rng: random.Random, keys: list[bytes]) -> None:
    value = server.ask("GET", key) if server.ask("TYPE", key) == "string" else b"x"
    kind = rng.choice(["flip", "cut", "junk", "swap", "type", "empty"])
    if kind == "type":
        server.ask("DEL", key)
        server.ask("HSET", key, "a", "b")
        return
    if kind == "flip" and value:
        at = rng.randrange(len(value))
        value = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
    elif kind == "swap":
        other = rng.choice(keys)
        value = server.ask("GET", other) if server.ask("TYPE", other) == "string" else b""
    else:
        value = {"cut": value[: len(value) // 2], "junk": rng.randbytes(4096)}.get(kind, b"")
    server.ask("SET", key, value or b"")


def test_an_operators_eviction_reaches_redis_and_eviction_for_room_does_not(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file, host_bytes="64KiB") as store:
        share(store, prompt(1, 4))
        for seed in range(2, 9):
            share(store, prompt(seed, 4))
        assert load(store.session(SPEC), prompt(8, 4)) == 4
        assert len(server.pages()) == 64  # 8 prompts of 4 pages, though 3 fit here
        root = store.root(SPEC.namespace)
        dry = store.evict(Selection(prefix=prompt(8, 4)[:PAGE_TOKENS], root=root), dry_run=True)
        assert (dry.pages, dry.redis_pages, len(server.pages())) == (4, 0, 64)
        done = store.evict(Selection(prefix=prompt(8, 4)[: 2 * PAGE_TOKENS], root=root))
        assert (done.pages, done.redis_pages) == (3, 3)
        assert len(server.pages()) == 58
        assert load(store.session(SPEC), prompt(8, 4)) == 1


def test_an_eviction_that_redis_did_not_hear_of_says_so(
    server: RedisProcess, secret_file: Path
) -> None:
    with opened(server, secret_file) as store:
        share(store, prompt(1, PAGES))
        server.pause()
        with pytest.raises(DirectoryError, match=r"not erased from Redis.*86400 s"):
            store.evict(Selection(everything=True))
        assert store.stats().pages == 0
        server.resume()


def test_old_pages_in_redis_are_too_old_here_too(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first:
        share(first, prompt(1, PAGES))
        with opened(server, secret_file, max_age_s=100) as second:
            second.state.wall_clock = lambda: time.time() + 1000
            assert load(second.session(SPEC), prompt(1, PAGES)) == 0
            assert counted(second, "redis_hits") == 0


def test_a_full_redis_is_a_state_and_stops_no_commit(tmp_path: Path, secret_file: Path) -> None:
    limited = RedisProcess(tmp_path / "redis", "--maxmemory", "1mb")
    with limited as server, opened(server, secret_file) as store:
        assert save(store.session(SPEC), prompt(1, PAGES)) == PAGES
        until(lambda: store.stats().tiers[-1].state != "ok")
        assert "maxmemory" in store.stats().tiers[-1].state
        assert counted(store, "redis_errors") > 0
        until(lambda: counted(store, "redis_dropped") == PAGES)
        assert load(store.session(SPEC), prompt(1, PAGES)) == PAGES


def test_a_password_comes_from_a_private_file_and_is_never_shown(
    server: RedisProcess, secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.allow("kvstore", "correct horse", RULES)
    url = server.url.replace("//", "//kvstore@")
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text("correct horse\n")
    with opened(server, secret_file, redis_url=url, redis_password_file=file) as store:
        share(store, prompt(1, 2))
        assert "horse" not in str(store.config) + str(store.stats()) + caplog.text
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        opened(server, secret_file, redis_url=url, redis_password_file=file)
    file.chmod(0o600)
    file.write_text("wrong horse")
    settings = {"host_bytes": "4MiB", "redis_url": url, "redis_password_file": file}
    with Store.open(None, secret_file=secret_file, **settings) as store:
        assert "breaker open" in store.stats().tiers[-1].state
        assert save(store.session(SPEC), prompt(1, 2)) == 2
        assert "horse" not in str(store.stats()) + caplog.text


def test_what_is_unsafe_or_useless_is_said_at_the_start(
    server: RedisProcess, secret_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(server, None):
        assert "secret of its own" in caplog.text
    caplog.clear()
    url = "redis://192.0.2.1"  # nobody is there
    with Store.open(None, host_bytes="4MiB", redis_url=url, secret_file=secret_file) as store:
        assert "asks for no password" in caplog.text
        assert save(store.session(SPEC), prompt(1, 2)) == 2


def test_a_store_that_cannot_open_its_share_leaves_its_directory_free(
    server: RedisProcess, secret_file: Path, tmp_path: Path
) -> None:
    settings = {"host_bytes": "4MiB", "disk_bytes": "64MiB", "secret_file": secret_file}
    with pytest.raises(ConfigError, match="redis_password_file"):
        Store.open(tmp_path / "a", redis_url=server.url, redis_password_file="/none", **settings)
    Store.open(tmp_path / "a", **settings).close()


def test_settings_are_checked_and_have_one_name_everywhere(tmp_path: Path) -> None:
    from kvstore.config import load_config

    config = load_config(
        {"redis_bytes": "1GiB", "dir": tmp_path},
        environ={"KVSTORE_REDIS_URL": "redis://host", "KVSTORE_REDIS_TTL_S": "1h"},
        kind=ServerConfig,
    )
    assert (config.redis_url, config.redis_bytes) == ("redis://host", 1 << 30)
    assert config.store_config().redis_ttl_s == 3600
    for wrong in ({"redis_url": "redis://u:hunter2@host"}, {"redis_lookup_s": 0.2}):
        with pytest.raises(ConfigError, match="redis_") as caught:
            StoreConfig(directory=None, host_bytes="4MiB", **wrong)
        assert "hunter2" not in str(caught.value)


def test_stats_show_redis_beside_the_other_tiers(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        hit = second.session(SPEC).match(prompt(1, PAGES))
        row = second.stats().tiers[-1]
        assert (row.name, row.state, row.pages) == ("redis", "ok", PAGES)
        assert row.used_bytes == 4096 * PAGES
        hit.release()
        assert second.stats().counters["redis_pages_found"] == PAGES


def test_a_pin_holds_what_is_ones_own_and_no_more(server: RedisProcess, secret_file: Path) -> None:
    with opened(server, secret_file) as first, opened(server, secret_file) as second:
        share(first, prompt(1, PAGES))
        session = second.session(SPEC)
        save(session, prompt(1, 2))
        with session.match(prompt(1, PAGES)) as hit:
            assert hit.pages == PAGES
            assert session.pin(prompt(1, PAGES), 100.0) == 2
        assert drop_idle(second, 0.0) == PAGES - 2


def test_durable_still_means_on_the_disk_of_this_store(
    server: RedisProcess, secret_file: Path, tmp_path: Path
) -> None:
    disk = {"directory": tmp_path / "b", "disk_bytes": "64MiB"}
    with opened(server, secret_file) as first, opened(server, secret_file, **disk) as second:
        share(first, prompt(1, PAGES))
        assert found(second, prompt(1, 4)) == 4
        assert save(second.session(SPEC), prompt(1, PAGES), durable=True) == 4
        pages = second.state.index.match(second.root(SPEC.namespace), prompt(1, PAGES))
        assert second.state.in_tier(pages, HOST).all()
        assert all(name == "host" for name in second.session(SPEC).match(prompt(1, PAGES)).tiers)
        assert second.state.resident_pages(1) == PAGES
