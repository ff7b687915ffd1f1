"""Where a layer's bytes come from when the model asks for it: the device, the host, or nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from kvstore import Store  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.errors import InvalidRequest  # noqa: E402
from kvstore.removal import Selection  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 101
PAGE = 16
POOL = 1 << 20


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.4,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes="32MiB") as opened:
        yield opened


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


def plain(model: Any, ids: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    return answer


def ask(adapter: TransformersAdapter, ids: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = adapter.generate(
        ids, torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    return answer


def sources(adapter: TransformersAdapter) -> tuple[int, int]:
    """Pages taken from the host and from the device until now."""
    counted = adapter.counters()
    return counted.pages_from_host, counted.pages_from_device


class WatchedMatch:
    """A real match that counts the pages whose bytes somebody asked for, and may say they moved."""

    def __init__(self, session: WatchedSession, match: Any) -> None:
        self.session = session
        self.match = match

    def views(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        views: list[memoryview] = self.match.views(start, stop)
        self.session.viewed += len(views)
        return views

    def valid(self) -> bool:
        self.session.asked += 1
        return self.session.asked != self.session.moved_at and bool(self.match.valid())

    def release(self) -> None:
        self.session.released += 1
        self.match.release()

    def __enter__(self) -> WatchedMatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.match, name)


class WatchedSession:
    """A real session whose matches are watched. `moved_at`: which valid() says no, from 1."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.viewed = self.asked = self.released = self.moved_at = 0

    def match(self, tokens: Any) -> WatchedMatch:
        return WatchedMatch(self, self.session.match(tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


class WatchedStore:
    """Hands out watched sessions."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def session(self, *args: Any, **kwargs: Any) -> WatchedSession:
        return WatchedSession(self.store.session(*args, **kwargs))


def test_the_third_hit_is_served_without_a_byte_from_the_host(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(
        WatchedStore(store), model, page_tokens=PAGE, device_bytes=POOL, weights="files:" + "1" * 64
    )
    session: Any = adapter.session
    ids = prompt(70)
    wanted = plain(model, ids)
    assert torch.equal(ask(adapter, ids), wanted)  # a miss, saved
    for host, device, viewed in ((4, 0, 4), (8, 0, 8), (8, 4, 8), (8, 8, 8)):
        assert torch.equal(ask(adapter, ids), wanted)
        assert sources(adapter) == (host, device)
        assert session.viewed == viewed
    assert adapter.device_pages is not None
    stats = adapter.device_pages.stats()
    assert (stats.pages, stats.fills, stats.hits) == (4, 4, 8)
    assert adapter.cache(ids).tiers == {"device": 4}


def test_without_device_bytes_every_hit_comes_from_the_host(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    for _ in range(4):
        ask(adapter, prompt(70))
    assert sources(adapter) == (12, 0)
    assert adapter.device_pages is None


def test_a_chain_of_which_only_the_beginning_is_on_the_device_is_put_together(
    store: Store, model: Any
) -> None:
    adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=POOL)
    short = prompt(36)
    for _ in range(3):
        ask(adapter, short)
    longer = torch.cat([short, prompt(40, seed=3)], dim=1)
    ask(adapter, longer)
    before = sources(adapter)
    assert torch.equal(ask(adapter, longer), plain(model, longer))
    assert [now - then for now, then in zip(sources(adapter), before, strict=True)] == [2, 2]


def test_a_small_pool_evicts_and_the_answers_stay_right(store: Store, model: Any) -> None:
    page_bytes = 3 * 2 * 2 * PAGE * 16 * 4
    adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=5 * page_bytes)
    prompts = [prompt(70, seed=seed) for seed in range(3)]
    wanted = [plain(model, ids) for ids in prompts]
    for _ in range(4):
        for ids, answer in zip(prompts, wanted, strict=True):
            assert torch.equal(ask(adapter, ids), answer)
            assert adapter.device_pages is not None
            adapter.device_pages.check()
    stats = adapter.device_pages.stats()
    assert stats.evictions > 0
    assert stats.pages <= 5


def test_a_batch_whose_rows_share_pages_uses_them_together(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=POOL)
    ids = prompt(70).repeat(2, 1)
    ids[1, 40] = ids[1, 40] % (VOCABULARY - 4) + 3
    wanted = plain(model, ids)
    for _ in range(4):
        assert torch.equal(ask(adapter, ids), wanted)
    assert adapter.cache(ids).tiers == {"device": 8}


def test_an_evicted_page_is_not_served_from_the_device(store: Store, model: Any) -> None:
    """An operator who removed pages must not meet them again, whatever the device still holds."""
    adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=POOL)
    ids = prompt(70)
    for _ in range(3):
        ask(adapter, ids)
    assert adapter.cache(ids).reused_tokens == [64]
    adapter.cache(prompt(3))  # lets go of what the cache above held
    store.evict(Selection(tenant="default"))
    assert adapter.cache(ids).reused_tokens == [0]
    # Stored anew they are other pages, even if their tokens are the same.
    ask(adapter, ids)
    cache = adapter.cache(ids)
    assert cache.tiers == {"host": 4}


def test_weights_that_changed_have_a_pool_of_their_own(store: Store) -> None:
    ids = prompt(70)
    for seed in (0, 1):
        model = llama(seed)
        adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=POOL)
        for _ in range(4):
            assert torch.equal(ask(adapter, ids), plain(model, ids))
        assert sources(adapter) == (8, 4)


def test_a_pool_without_room_for_one_page_is_refused(store: Store, model: Any) -> None:
    with pytest.raises(InvalidRequest, match="device_bytes: 100 given, one page has"):
        TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=100)


def test_layers_are_fetched_when_the_model_comes_to_them(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(WatchedStore(store), model, page_tokens=PAGE)
    session: Any = adapter.session
    ids = prompt(70)
    ask(adapter, ids)
    session.released = 0
    cache = adapter.cache(ids)
    assert cache.get_seq_length() == 64
    assert [layer.is_pending for layer in cache.layers] == [True] * 3
    assert session.released == 0
    cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    assert [layer.is_pending for layer in cache.layers] == [False, True, True]
    assert cache.layers[1].keys.shape == (1, 2, 64, 16)
    assert session.released == 0
    assert cache.layers[2].values.shape == (1, 2, 64, 16)
    assert session.released == 1  # with the last layer the lease ends


def test_layers_may_be_asked_for_in_any_order(
    store: Store, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.engine_adapter.page_copier.RUN_BYTES", 1)  # a layer at a time
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    ids = prompt(70)
    ask(adapter, ids)
    one, two = adapter.cache(ids), adapter.cache(ids)
    for number in (2, 0, 1):
        assert one.layers[number].keys.any()
    for number in range(3):
        assert torch.equal(one.layers[number].keys, two.layers[number].keys)
        assert torch.equal(one.layers[number].values, two.layers[number].values)


@pytest.mark.parametrize("moved_at", [1, 2, 3])
def test_pages_that_move_while_the_model_computes_are_computed_again(
    store: Store, model: Any, monkeypatch: pytest.MonkeyPatch, moved_at: int
) -> None:
    """The server dies, or ends our lease, between two layers of one forward pass."""
    monkeypatch.setattr("kvstore.engine_adapter.page_copier.RUN_BYTES", 1)  # a layer at a time
    adapter = TransformersAdapter(WatchedStore(store), model, page_tokens=PAGE)
    session: Any = adapter.session
    ids = prompt(70)
    wanted = plain(model, ids)
    ask(adapter, ids)
    session.moved_at = session.asked + moved_at
    assert torch.equal(ask(adapter, ids), wanted)
    assert adapter.counters().loads_failed == 1
    assert session.asked == session.moved_at
    assert torch.equal(ask(adapter, ids), wanted)
    assert adapter.counters().loads_failed == 1


def test_a_padded_batch_whose_pages_move_is_computed_again(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(WatchedStore(store), model, page_tokens=PAGE)
    session: Any = adapter.session
    ids, mask = torch.zeros((2, 70), dtype=torch.long), torch.zeros((2, 70), dtype=torch.long)
    ids[0], mask[0] = prompt(70)[0], 1
    ids[1, 40:], mask[1, 40:] = prompt(30, seed=1)[0], 1
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(ids, **arguments)
    adapter.generate(ids, **arguments)
    session.moved_at = session.asked + 1
    assert torch.equal(adapter.generate(ids, **arguments), wanted)
    assert adapter.counters().loads_failed == 1


def test_a_cache_outlives_its_adapter_and_its_store(model: Any) -> None:
    ids = prompt(70)
    wanted = plain(model, ids)
    caches = []
    for close_adapter in (True, False):
        with Store.open(None, host_bytes="32MiB") as store:
            adapter = TransformersAdapter(store, model, page_tokens=PAGE)
            ask(adapter, ids)
            caches.append(adapter.cache(ids))
            if close_adapter:
                adapter.close()
        assert caches[-1].reused_tokens == [64]
    for cache in caches:
        found = model.generate(ids, **cache.arguments(), max_new_tokens=12, do_sample=False)
        assert torch.equal(found, wanted)


def test_a_cache_that_was_dropped_gives_its_lease_back_with_the_next_call(
    store: Store, model: Any
) -> None:
    adapter = TransformersAdapter(WatchedStore(store), model, page_tokens=PAGE)
    session: Any = adapter.session
    ids = prompt(70)
    ask(adapter, ids)
    session.released = 0
    cache = adapter.cache(ids)
    del cache
    assert session.released == 0
    adapter.cache(prompt(5))
    assert session.released == 2  # the one above, and the miss


def test_a_repeated_batch_still_gets_its_prefix(store: Store, model: Any) -> None:
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    ids = prompt(70)
    ask(adapter, ids)
    cache = adapter.cache(ids)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    found = model.generate(ids, **cache.arguments(), **settings)
    assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **settings))
