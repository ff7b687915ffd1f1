"""The store without a disk: look-up is lease, reservations, eviction, pins, bad input."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, content, load, prompt, save

from kvstore import CacheSpec, Store
from kvstore.errors import ClosedError, InvalidRequest
from kvstore.removal import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes=1 << 20) as opened:
        yield opened
        opened.check()


def test_what_was_stored_is_a_hit_byte_for_byte(store: Store) -> None:
    session = store.session(SPEC)
    tokens = prompt(0, 5)
    assert load(session, tokens) == 0
    assert save(session, tokens) == 5
    assert load(session, tokens) == 5
    longer = np.concatenate([tokens, prompt(9, 2)])
    assert load(session, longer) == 5
    assert save(session, longer) == 2
    assert load(session, longer) == 7


def test_a_prompt_shorter_than_a_page_is_a_miss_and_stores_nothing(store: Store) -> None:
    session = store.session(SPEC)
    for tokens in ([], [1, 2, 3]):
        with session.match(tokens) as hit:
            assert (hit.pages, hit.tokens, hit.tiers) == (0, 0, [])
        with session.reserve(tokens) as run:
            assert (run.count, run.reason) == (0, "present")


@pytest.mark.parametrize(
    "tokens",
    [[-1, 2, 3, 4], [2**31], b"123", np.zeros((2, 2), np.int32), np.zeros(4, np.float32), ["a"]],
)
def test_malformed_tokens_are_refused(store: Store, tokens: object) -> None:
    session = store.session(SPEC)
    with pytest.raises(InvalidRequest, match="tokens"):
        session.match(tokens)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tokens"):
        session.reserve(tokens)  # type: ignore[arg-type]


def test_page_bytes_of_another_length_do_not_fit_a_view(store: Store) -> None:
    session = store.session(SPEC)
    with (
        session.reserve(prompt(0, 1)) as run,
        pytest.raises(ValueError, match="memoryview"),
    ):
        run.views()[0][:] = b"short"


def test_leaving_a_reservation_without_commit_shows_nothing(store: Store) -> None:
    session = store.session(SPEC)
    tokens = prompt(0, 3)
    with session.reserve(tokens) as run:
        assert run.count == 3
        with store.session(SPEC).reserve(tokens) as other:
            assert (other.count, other.reason) == (0, "in progress")
    assert load(session, tokens) == 0
    assert save(session, tokens) == 3
    with session.reserve(tokens) as run:
        assert (run.start, run.count, run.reason) == (3, 0, "present")


def test_commit_twice_is_refused(store: Store) -> None:
    run = store.session(SPEC).reserve(prompt(0, 1))
    run.commit()
    with pytest.raises(InvalidRequest, match="committed"):
        run.commit()


def test_tenants_and_salts_and_specs_do_not_see_each_other(store: Store) -> None:
    tokens = prompt(0, 3)
    save(store.session(SPEC), tokens)
    for other in (
        store.session(SPEC, tenant="someone"),
        store.session(SPEC, salt=b"s"),
        store.session(CacheSpec.opaque("other", PAGE_TOKENS, PAGE_BYTES)),
    ):
        assert load(other, tokens) == 0
        assert save(other, tokens) == 3


def test_extras_decide_identity(store: Store) -> None:
    session = store.session(SPEC)
    tokens = prompt(0, 3)
    for value in (b"image one", b"image two"):
        with session.reserve(tokens, {1: value}) as run:
            for view in run.views():
                view[:] = value.ljust(PAGE_BYTES, b"\0")
            run.commit()
    with session.match(tokens, {1: b"image two"}) as hit:
        assert hit.pages == 3
        assert bytes(hit.views()[2]).startswith(b"image two")
    with session.match(tokens, {1: b"image three"}) as hit:
        assert hit.pages == 1
    with session.match(tokens) as hit:
        assert hit.pages == 1


def test_a_full_arena_evicts_the_least_recently_used_tail_first(store: Store) -> None:
    session = store.session(SPEC)
    first = prompt(0, 20)
    save(session, first)
    head = first[: 2 * PAGE_TOKENS]
    for seed in range(1, 30):
        assert load(session, head) == 2
        assert save(session, prompt(seed, 20)) == 20
        assert load(session, prompt(seed, 20)) == 20
    # Touching only the head keeps the head; the tail went first.
    assert load(session, first) == 2
    assert store.stats().tiers[0].allocated_bytes <= 1 << 20


def test_a_leased_chain_is_not_evicted_and_its_bytes_stay(store: Store) -> None:
    session = store.session(SPEC)
    kept = prompt(0, 10)
    save(session, kept)
    with session.match(kept) as hit:
        views = hit.views()
        for seed in range(1, 60):
            save(session, prompt(seed, 10))
        for page, view in enumerate(views):
            assert bytes(view) == content(kept, page)
    assert store.stats().leases == 0


def test_when_all_is_leased_a_reservation_is_refused_not_hung(store: Store) -> None:
    assert store.state.host is not None
    assert store.state.host.wait_populated(10.0), 'else "full" would pass by itself'
    session = store.session(SPEC)
    held = []
    for seed in range(100):
        save(session, prompt(seed, 10), wait_s=0.0)
        hit = session.match(prompt(seed, 10))
        held.append(hit)
        if hit.pages < 10:
            break
    with session.reserve(prompt(999, 10), deadline_s=0.0) as run:
        assert run.count == 0
        assert run.reason == "full"
    for hit in held:
        hit.release()
    assert save(session, prompt(999, 10)) == 10


def test_a_pin_keeps_a_chain_until_it_is_taken_back(store: Store) -> None:
    session = store.session(SPEC)
    kept = prompt(0, 5)
    save(session, kept)
    assert session.pin(kept, ttl_s=3600) == 5
    for seed in range(1, 100):
        save(session, prompt(seed, 10))
    assert load(session, kept) == 5
    assert store.evict(Selection(tenant="default"), dry_run=True).kept_pinned == 5
    assert session.unpin(kept) == 5
    for seed in range(100, 200):
        save(session, prompt(seed, 10))
    assert load(session, kept) == 0


def test_sixty_four_threads_write_a_missing_prompt_once(store: Store) -> None:
    tokens = prompt(0, 8)
    barrier = threading.Barrier(64)
    saved = []

    def work() -> None:
        session = store.session(SPEC)
        barrier.wait()
        with session.reserve(tokens) as run:
            for offset, view in enumerate(run.views()):
                view[:] = content(tokens, run.start + offset)
            if run.count:
                saved.append(run.commit().pages)

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert saved == [8]
    assert store.stats().counters["pages_committed"] == 8


def test_evict_by_prefix_tenant_writer_and_age(store: Store) -> None:
    session = store.session(SPEC, writer="good")
    shared = prompt(0, 2)
    left, right = np.concatenate([shared, prompt(1, 2)]), np.concatenate([shared, prompt(2, 2)])
    save(session, left)
    save(store.session(SPEC, writer="bad"), right)
    root = store.root(SPEC.namespace)
    dry = store.evict(Selection(prefix=left[:12].tolist(), root=root), dry_run=True)
    assert (dry.pages, dry.chains, dry.dry_run) == (2, 1, True)
    assert load(session, left) == 4
    assert store.evict(Selection(writer="bad")).pages == 2
    assert load(session, right) == 2
    assert load(session, left) == 4
    assert store.evict(Selection(prefix=left[:9].tolist(), root=root)).pages == 2
    assert load(session, left) == 2
    save(store.session(SPEC, tenant="b"), left)
    assert store.evict(Selection(tenant="b")).pages == 4
    assert store.evict(Selection(older_than_s=3600.0)).pages == 0
    assert store.evict(Selection(namespace=SPEC.namespace)).pages == 2
    assert store.stats().pages == 0
    for nothing in ({}, {"namespace": b""}, {"tenant": ""}, {"older_than_s": -1.0}):
        with pytest.raises(InvalidRequest, match="evict:"):
            Selection(**nothing)


def test_evict_leaves_what_is_being_read(store: Store) -> None:
    session = store.session(SPEC)
    tokens = prompt(0, 4)
    save(session, tokens)
    with session.match(tokens[:8]) as hit:
        done = store.evict(Selection(tenant="default"))
        assert (done.pages, done.kept_leased) == (2, 2)
        assert bytes(hit.views()[1]) == content(tokens, 1)
    assert store.evict(Selection(tenant="default")).pages == 2


def test_a_released_match_gives_no_views(store: Store) -> None:
    session = store.session(SPEC)
    save(session, prompt(0, 2))
    hit = session.match(prompt(0, 2))
    hit.release()
    hit.release()
    assert hit.pages == 0
    with pytest.raises(InvalidRequest, match="views"):
        hit.views(0, 1)


def test_misses_leave_nothing_behind(store: Store) -> None:
    """A session kept every match that had found nothing: half a kilobyte a miss, for ever."""
    session = store.session(SPEC)
    for number in range(100):
        with session.match(prompt(number, 2)) as hit:
            assert hit.pages == 0
        kept = weakref.ref(session.match(prompt(number, 2)))  # and not even released
        assert kept() is None
    save(session, prompt(1, 2))
    with session.match(prompt(1, 2)) as hit:
        kept = weakref.ref(hit)
    del hit
    assert kept() is None


def test_a_closed_store_says_so() -> None:
    store = Store.open(None, host_bytes=1 << 20)
    session = store.session(SPEC)
    store.close()
    with pytest.raises(ClosedError, match="open it again"):
        session.match([1, 2, 3, 4])


def test_explain_names_the_first_differing_token(store: Store) -> None:
    session = store.session(SPEC)
    tokens = prompt(0, 3)
    save(session, tokens)
    other = tokens.copy()
    other[6] = 77
    found = store.explain(other, namespace=SPEC.namespace)
    assert (found.matched_pages, found.differs_at) == (1, 6)
    assert (found.prompt_token, found.stored_token) == (77, int(tokens[6]))
    assert store.explain(tokens, namespace=SPEC.namespace).verdict.startswith("hit: all 3")
    assert "shorter than a page" in store.explain(tokens[:2], namespace=SPEC.namespace).verdict


def test_views_for_writing_end_with_the_commit(store: Store) -> None:
    session = store.session(SPEC)
    with session.reserve(prompt(0, 1)) as run:
        (view,) = run.views()
        view[:] = content(prompt(0, 1), 0)
        run.commit()
    with pytest.raises(ValueError, match="released"):
        view[:1] = b"x"
    assert load(session, prompt(0, 1)) == 1


def test_a_closed_session_says_so(store: Store) -> None:
    session = store.session(SPEC)
    session.close()
    for call in (session.match, session.reserve, session.unpin):
        with pytest.raises(ClosedError, match="session is closed"):
            call(prompt(0, 1))


@pytest.mark.parametrize(
    "arguments",
    [{"salt": "x"}, {"writer": None}, {"writer": "\ud800"}, {"tenant": "../x"}, {"tenant": ""}],
)
def test_malformed_sessions_are_refused(store: Store, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        store.session(SPEC, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("deadline_s", [None, "5", -1, float("nan"), float("inf"), True])
def test_malformed_waits_are_refused(store: Store, deadline_s: object) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        store.flush(deadline_s)  # type: ignore[arg-type]


def test_a_run_waits_for_memory_that_is_still_being_populated() -> None:
    with Store.open(None, host_bytes="512MiB") as large:
        spec = CacheSpec.opaque("large", PAGE_TOKENS, 16 << 20)
        with large.session(spec).reserve(prompt(0, 20), deadline_s=30.0) as run:
            assert run.count == 20
