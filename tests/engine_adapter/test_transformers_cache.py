"""The transformers adapter on tiny random models: what is loaded is what was computed, and the
answers with and without the store are the same."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from tensor_bits import as_integers  # noqa: E402 - after the importorskip

from kvstore import Hints, Store  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.transformers_adapter import (  # noqa: E402
    TransformersAdapter,
    takes_prefix,
)
from kvstore.errors import InvalidRequest  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCABULARY = 101
PAGE = 16
PADDING = 0
END = 1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # models this small only lose by more


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.4,
        "eos_token_id": END,
        "pad_token_id": PADDING,
        "bos_token_id": 2,
    }
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**settings | changes)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def gpt2() -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.4,
        eos_token_id=END,
        bos_token_id=2,
        pad_token_id=PADDING,
    )
    return transformers.GPT2LMHeadModel(config).eval()


MODELS = {
    "gqa": llama,
    "mha": lambda: llama(num_key_value_heads=4),
    "mqa": lambda: llama(num_key_value_heads=1),
    "bfloat16": lambda: llama(torch.bfloat16),
    "eager": lambda: llama(attn_implementation="eager"),
    "learned positions": gpt2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes="32MiB") as opened:
        yield opened


@pytest.fixture
def adapter(store: Store, model: Any) -> TransformersAdapter:
    return TransformersAdapter(store, model, page_tokens=PAGE)


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids without the padding and end tokens, [1, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), PADDING)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - row.shape[1] :] = row[0]
        mask[number, width - row.shape[1] :] = 1
    return ids, mask


def plain(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> Any:
    """generate() without a store."""
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False} | more
    return model.generate(ids, **settings)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return as_integers(tensor.detach().contiguous())


def stored_pages(adapter: TransformersAdapter, tokens: torch.Tensor) -> int:
    with adapter.session.match(tokens.flatten().numpy().astype(np.int32)) as hit:
        return int(hit.pages)


@pytest.mark.parametrize("kind", list(MODELS))
def test_loaded_kv_is_bit_for_bit_what_was_computed(store: Store, kind: str) -> None:
    model = MODELS[kind]()
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    ids = prompt(70)
    cold = adapter.cache(ids)
    output = model.generate(ids, **cold.arguments(), max_new_tokens=20, do_sample=False)
    saved = cold.save(output)
    assert cold.reused_tokens == [0]
    assert saved.pages == cold.get_seq_length() // PAGE >= 4
    warm = adapter.cache(ids)
    assert warm.reused_tokens == [64]
    assert warm.tiers == {"host": 4}
    for computed, loaded in zip(cold.layers, warm.layers, strict=True):
        assert (bits(computed.keys[:, :, :64]) == bits(loaded.keys)).all()
        assert (bits(computed.values[:, :, :64]) == bits(loaded.values)).all()


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "bfloat16"])
def test_answers_and_logits_are_those_of_a_model_without_store(store: Store, kind: str) -> None:
    model = MODELS[kind]()
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    ids = prompt(70)
    wanted = plain(model, ids, return_dict_in_generate=True, output_logits=True)
    for reused in (0, 64):
        cache = adapter.cache(ids)
        assert cache.reused_tokens == [reused]
        found = model.generate(
            ids,
            **cache.arguments(),
            max_new_tokens=20,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        cache.save(found.sequences)
        assert torch.equal(found.sequences, wanted.sequences)
        for left, right in zip(found.logits, wanted.logits, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_one_token_is_always_left_to_compute(adapter: TransformersAdapter, model: Any) -> None:
    ids = prompt(64)
    wanted = plain(model, ids)
    adapter.generate(ids, max_new_tokens=20, do_sample=False)
    assert stored_pages(adapter, ids) == 4
    cache = adapter.cache(ids)
    assert cache.reused_tokens == [63]
    found = model.generate(ids, **cache.arguments(), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
def test_prompts_around_one_page_are_answered_the_same(
    adapter: TransformersAdapter, model: Any, tokens: int
) -> None:
    ids = prompt(tokens)
    wanted = plain(model, ids)
    for _ in range(2):
        found = adapter.generate(ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(found, wanted)


def test_generated_tokens_are_reused_by_the_next_turn(
    adapter: TransformersAdapter, model: Any
) -> None:
    first = adapter.generate(prompt(40), max_new_tokens=30, do_sample=False)
    # The last token that was generated has no KV yet.
    known = (first.shape[1] - 1) // PAGE * PAGE
    assert known > 48
    second = torch.cat([first, prompt(10, seed=5)], dim=1)
    cache = adapter.cache(second)
    assert cache.reused_tokens == [known]
    found = model.generate(second, **cache.arguments(), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, plain(model, second))


def test_a_diverging_prompt_reuses_the_common_pages_only(
    adapter: TransformersAdapter, model: Any
) -> None:
    ids = prompt(70)
    adapter.generate(ids, max_new_tokens=5, do_sample=False)
    other = ids.clone()
    other[0, 40] = (other[0, 40] + 1 - 3) % (VOCABULARY - 3) + 3
    cache = adapter.cache(other)
    assert cache.reused_tokens == [32]
    found = model.generate(other, **cache.arguments(), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, plain(model, other))


@pytest.mark.parametrize("kind", ["gqa", "learned positions", "eager"])
def test_a_left_padded_batch_is_answered_as_without_store(store: Store, kind: str) -> None:
    model = MODELS[kind]()
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    ids, mask = padded([prompt(70), prompt(33, seed=1), prompt(5, seed=2), prompt(60, seed=3)])
    wanted = plain(model, ids, mask)
    for _ in range(2):
        found = adapter.generate(ids, mask, max_new_tokens=20, do_sample=False)
        assert torch.equal(found, wanted)
    assert adapter.counters().tokens_reused > 0
    assert adapter.counters().bypassed == 0


def test_rows_saved_from_a_padded_batch_serve_each_prompt_alone(
    adapter: TransformersAdapter, model: Any
) -> None:
    rows = [prompt(70), prompt(49, seed=1), prompt(20, seed=2)]
    ids, mask = padded(rows)
    adapter.generate(ids, mask, max_new_tokens=1, do_sample=False)
    for row in rows:
        cache = adapter.cache(row)
        assert cache.reused_tokens == [row.shape[1] // PAGE * PAGE]
        found = model.generate(row, **cache.arguments(), max_new_tokens=20, do_sample=False)
        assert torch.equal(found, plain(model, row))


def test_padding_is_never_stored(adapter: TransformersAdapter, store: Store) -> None:
    rows = [prompt(70), prompt(20, seed=1)]
    ids, mask = padded(rows)
    adapter.generate(ids, mask, max_new_tokens=1, do_sample=False)
    assert stored_pages(adapter, ids[1]) == 0
    assert store.stats().pages == 70 // PAGE + 20 // PAGE


@pytest.mark.parametrize(
    ("lengths", "stored", "expected"),
    [
        ([70, 70], [0, 1], [64, 64]),
        ([70, 50], [0, 1], [64, 44]),  # row 1 could give 48, row 0 ends at column 64
        ([70, 50], [0], [20, 0]),  # row 1 has nothing: only its padding is skipped
        ([70, 50], [1], [0, 0]),
        ([64, 64], [0, 1], [63, 63]),
        ([70, 3], [0], [64, 0]),  # row 1 begins after all that row 0 has
    ],
)
def test_rows_with_different_hits_share_the_smallest_column(
    adapter: TransformersAdapter,
    model: Any,
    lengths: list[int],
    stored: list[int],
    expected: list[int],
) -> None:
    rows = [prompt(length, seed=number) for number, length in enumerate(lengths)]
    for number in stored:
        adapter.generate(rows[number], max_new_tokens=1, do_sample=False)
    ids, mask = padded(rows)
    cache = adapter.cache(ids, mask)
    assert cache.reused_tokens == expected
    found = model.generate(ids, **cache.arguments(), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, plain(model, ids, mask))


def test_a_missing_mask_is_inferred_as_generate_does(
    adapter: TransformersAdapter, model: Any
) -> None:
    ids, mask = padded([prompt(40), prompt(20, seed=1)])
    cache = adapter.cache(ids)
    assert torch.equal(cache.arguments()["attention_mask"], mask)
    assert torch.equal(
        model.generate(ids, max_new_tokens=9, do_sample=False),
        plain(model, ids, mask, max_new_tokens=9),
    )


def test_rows_that_ended_early_do_not_store_their_filling(
    adapter: TransformersAdapter, model: Any
) -> None:
    ids, mask = padded([prompt(20), prompt(20, seed=1)])
    forced = torch.cat([ids, prompt(40, seed=2).expand(2, 40)], dim=1)
    forced[0, 24] = END
    forced[0, 25:] = PADDING

    def only_forced(row: int, so_far: torch.Tensor) -> list[int]:
        return [int(forced[row, len(so_far)])]

    output = adapter.generate(
        ids, mask, max_new_tokens=40, do_sample=False, prefix_allowed_tokens_fn=only_forced
    )
    assert torch.equal(output, forced)
    assert stored_pages(adapter, forced[0]) == 25 // PAGE
    assert stored_pages(adapter, forced[1]) == 59 // PAGE


@pytest.mark.parametrize(
    "mask",
    [
        [[1] * 30 + [0] * 10],
        [[1] * 10 + [0] * 5 + [1] * 25],
    ],
    ids=["right padding", "a gap"],
)
def test_masks_that_are_not_left_padding_neither_load_nor_save(
    adapter: TransformersAdapter, model: Any, store: Store, mask: list[list[int]]
) -> None:
    ids = prompt(40)
    adapter.generate(ids, max_new_tokens=1, do_sample=False)
    before = store.stats().pages
    odd = torch.tensor(mask)
    cache = adapter.cache(ids, odd)
    assert cache.reused_tokens == []
    assert cache.get_seq_length() == 0
    found = model.generate(ids, **cache.arguments(), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, plain(model, ids, odd))
    assert "mask" in cache.save(found).reason
    assert store.stats().pages == before
    assert adapter.counters().bypassed == 1


def test_an_output_of_another_prompt_is_not_saved(
    adapter: TransformersAdapter, model: Any, store: Store
) -> None:
    ids, other = prompt(40), prompt(40, seed=9)
    cache = adapter.cache(ids)
    output = model.generate(other, **cache.arguments(), max_new_tokens=2, do_sample=False)
    assert "does not begin with the prompt" in cache.save(output).reason
    assert "output ids of shape" in adapter.cache(ids).save(output[:, :10]).reason
    assert store.stats().pages == 0


def test_a_cache_is_saved_once(adapter: TransformersAdapter, model: Any) -> None:
    ids = prompt(40)
    cache = adapter.cache(ids)
    output = model.generate(ids, **cache.arguments(), max_new_tokens=2, do_sample=False)
    assert cache.save(output).pages == 2
    assert cache.save(output).reason == "saved already"


def test_an_unused_cache_saves_nothing(adapter: TransformersAdapter, store: Store) -> None:
    ids = prompt(40)
    assert "no tokens were computed" in adapter.cache(ids).save(ids).reason
    assert store.stats().pages == 0


GENERATIONS = {
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "as many answers as beams": {"num_beams": 3, "num_return_sequences": 3},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "an assistant": {"prompt_lookup_num_tokens": 4},
    "prefill in chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("kind", list(GENERATIONS))
def test_other_ways_to_generate_give_what_they_give_without_store(
    adapter: TransformersAdapter, model: Any, kind: str
) -> None:
    """Whatever a search did to its cache, what it left in the store serves other calls rightly."""
    ids, more = prompt(40), GENERATIONS[kind]
    torch.manual_seed(3)
    wanted = plain(model, ids, **more)
    for _ in range(2):
        torch.manual_seed(3)
        settings = {"max_new_tokens": 20, "do_sample": False} | more
        found = adapter.generate(ids, torch.ones_like(ids), **settings)
        assert torch.equal(found, wanted)
    assert adapter.counters().hits == int(takes_prefix(model, more))
    for row in found:
        check_stored_kv(adapter, model, row[None])


def test_assisted_decoding_over_a_loaded_prefix_is_refused_not_answered_wrongly(
    adapter: TransformersAdapter, model: Any
) -> None:
    """transformers 5 feeds the whole prompt again, behind whatever prefix the cache has."""
    ids = prompt(40)
    adapter.generate(ids, max_new_tokens=2, do_sample=False)
    cache = adapter.cache(ids)
    wanted = plain(model, ids)
    refusal = pytest.raises(InvalidRequest, match="load=False")
    refuses = int(transformers.__version__.split(".")[0]) >= 5
    with refusal if refuses else contextlib.nullcontext():
        found = plain(model, ids, prompt_lookup_num_tokens=4, **cache.arguments())
        assert torch.equal(found, wanted)


def test_beams_of_a_padded_batch_give_what_they_give_without_store(
    adapter: TransformersAdapter, model: Any
) -> None:
    ids, mask = padded([prompt(50), prompt(35, seed=1)])
    wanted = plain(model, ids, mask, num_beams=3)
    for _ in range(2):
        found = adapter.generate(ids, mask, max_new_tokens=20, do_sample=False, num_beams=3)
        assert torch.equal(found, wanted)
    assert adapter.counters().hits == 2
    for row, valid in zip(ids, mask.sum(dim=1).tolist(), strict=True):
        check_stored_kv(adapter, model, row[None, -valid:])


def check_stored_kv(adapter: TransformersAdapter, model: Any, tokens: torch.Tensor) -> None:
    """What is stored of this chain is close to what the model computes for it alone."""
    longer = torch.cat([tokens, prompt(PAGE, seed=77)], dim=1)
    cache = adapter.cache(longer, torch.ones_like(longer))
    columns = cache.get_seq_length()
    assert columns >= 32
    with torch.inference_mode():
        fresh = transformers.DynamicCache(config=model.config)
        name = next(iter(cache.arguments()))
        model(longer[:, :columns], **{name: fresh})
    for loaded, computed in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(loaded.keys, computed.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(loaded.values, computed.values, rtol=1e-3, atol=1e-3)


def test_a_second_turn_on_one_cache_saves_the_first_turn_only(
    adapter: TransformersAdapter, model: Any
) -> None:
    """The mask of a later turn is not the cache's own, so its columns are not vouched for."""
    ids = prompt(40)
    cache = adapter.cache(ids)
    first = model.generate(ids, **cache.arguments(), max_new_tokens=10, do_sample=False)
    second = torch.cat([first, prompt(40, seed=4)], dim=1)
    arguments = cache.arguments() | {"attention_mask": torch.ones_like(second)}
    output = model.generate(second, **arguments, max_new_tokens=10, do_sample=False)
    cache.save(output)
    assert stored_pages(adapter, output) == (first.shape[1] - 1) // PAGE


def test_forgotten_columns_are_not_saved(adapter: TransformersAdapter, model: Any) -> None:
    ids = prompt(64)
    cache = adapter.cache(ids)
    with torch.inference_mode():
        model(ids, **cache.arguments())
        cache.crop(-30)
        name = next(iter(cache.arguments()))
        model(prompt(30, seed=8), **{name: cache})
    cache.save(ids)
    assert stored_pages(adapter, ids) == 34 // PAGE


@pytest.mark.parametrize("action", ["reset", "select"])
def test_a_cache_that_was_emptied_or_picked_from_saves_nothing(
    adapter: TransformersAdapter, model: Any, store: Store, action: str
) -> None:
    ids = prompt(40)
    cache = adapter.cache(ids)
    output = model.generate(ids, **cache.arguments(), max_new_tokens=2, do_sample=False)
    if action == "reset":
        cache.reset()
        with torch.inference_mode():
            model(prompt(41, seed=8), **{next(iter(cache.arguments())): cache})
    else:
        cache.batch_select_indices(torch.tensor([0]))
    cache.save(output)
    assert store.stats().pages == 0


def test_kv_of_another_dtype_is_not_saved(store: Store) -> None:
    model = llama()
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    model.to(torch.bfloat16)
    ids = prompt(40)
    cache = adapter.cache(ids)
    output = model.generate(ids, **cache.arguments(), max_new_tokens=2, do_sample=False)
    assert "not as in the spec" in cache.save(output).reason
    assert store.stats().pages == 0


def test_a_model_in_training_neither_loads_nor_saves(store: Store) -> None:
    model = llama(attention_dropout=0.5)
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    adapter.generate(prompt(40), max_new_tokens=2, do_sample=False)
    model.train()
    assert "training" in adapter.cache(prompt(40)).bypass_reason


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_implementation"])
def test_a_cache_of_the_caller_is_refused(adapter: TransformersAdapter, name: str) -> None:
    with pytest.raises(InvalidRequest, match="the adapter makes the cache"):
        adapter.generate(prompt(20), **{name: "quantized"})


def test_arguments_that_may_change_kv_make_a_plain_call(
    adapter: TransformersAdapter, model: Any, store: Store
) -> None:
    ids = prompt(40)
    positions = torch.arange(5, 45)[None]
    found = adapter.generate(ids, position_ids=positions, max_new_tokens=2, do_sample=False)
    assert torch.equal(found, plain(model, ids, position_ids=positions, max_new_tokens=2))
    uncached = adapter.generate(ids, use_cache=False, max_new_tokens=2, do_sample=False)
    assert torch.equal(uncached, plain(model, ids, max_new_tokens=2))
    assert store.stats().pages == 0
    assert adapter.counters().bypassed == 2


@pytest.mark.parametrize("shape", [(40,), (1, 0), (1, 2, 3)])
def test_inputs_that_are_no_batch_of_prompts_are_refused(
    adapter: TransformersAdapter, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest, match="input_ids: shape"):
        adapter.cache(torch.ones(shape, dtype=torch.long))


class BrokenSession:
    """A session whose calls fail from the moment they are told to."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.spec = session.spec
        self.broken: set[str] = set()

    def match(self, tokens: Any) -> Any:
        self.fail("match")
        return BrokenMatch(self, self.session.match(tokens))

    def reserve(self, tokens: Any) -> Any:
        self.fail("reserve")
        return self.session.reserve(tokens)

    def fail(self, call: str) -> None:
        if call in self.broken:
            raise OSError(f"{call} does not work")


class BrokenMatch:
    """A match whose calls fail with its session."""

    def __init__(self, session: BrokenSession, match: Any) -> None:
        self.session = session
        self.match = match

    def __enter__(self) -> BrokenMatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.match.release()

    def __getattr__(self, name: str) -> Any:
        self.session.fail(name)
        return getattr(self.match, name)


class BrokenStore:
    """A store that hands out broken sessions."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def session(self, *args: Any, **kwargs: Any) -> BrokenSession:
        return BrokenSession(self.store.session(*args, **kwargs))


@pytest.mark.parametrize("call", ["match", "tokens", "tiers", "stage", "views", "reserve"])
def test_a_failing_store_is_a_miss_and_never_an_exception(
    store: Store, model: Any, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = TransformersAdapter(BrokenStore(store), model, page_tokens=PAGE)
    session: Any = adapter.session
    ids, other = prompt(70), prompt(70, seed=1)
    adapter.generate(ids, max_new_tokens=20, do_sample=False)
    session.broken.add(call)
    with caplog.at_level(logging.INFO, logger="kvstore.engine_adapter"):
        for each in (ids, ids, other):
            found = adapter.generate(each, max_new_tokens=20, do_sample=False)
            assert torch.equal(found, plain(model, each))
    counted = adapter.counters()
    assert counted.loads_failed + counted.saves_failed >= 2
    lines = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert f"{call} does not work" in lines[0]
    assert len(lines) == len(set(lines)) <= 2
    session.broken.clear()
    cache = adapter.cache(ids)
    assert cache.reused_tokens == [64]


def test_a_closed_store_is_a_miss(model: Any) -> None:
    with Store.open(None, host_bytes="32MiB") as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        adapter.generate(prompt(40), max_new_tokens=2, do_sample=False)
    found = adapter.generate(prompt(40), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, plain(model, prompt(40)))
    assert adapter.counters().loads_failed == 1
    assert adapter.counters().saves_failed == 1


@pytest.mark.slow
def test_a_full_store_saves_what_fits_and_says_so(model: Any) -> None:
    page_bytes = 3 * 2 * 2 * PAGE * 16 * 4
    with Store.open(None, host_bytes=24 * page_bytes) as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        for seed in range(6):
            ids = prompt(200, seed=seed)
            found = adapter.generate(ids, max_new_tokens=20, do_sample=False)
            assert torch.equal(found, plain(model, ids))
        store.check()
        assert adapter.counters().saves_failed == 0


def test_models_that_differ_in_one_weight_share_nothing(store: Store) -> None:
    model, other = llama(), llama()
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    ids = prompt(70)
    adapter = TransformersAdapter(store, model, page_tokens=PAGE)
    adapter.generate(ids, max_new_tokens=2, do_sample=False)
    assert TransformersAdapter(store, llama(), page_tokens=PAGE).cache(ids).reused_tokens == [64]
    assert TransformersAdapter(store, other, page_tokens=PAGE).cache(ids).reused_tokens == [0]


def test_tenants_and_salts_share_nothing(store: Store, model: Any) -> None:
    ids = prompt(70)
    TransformersAdapter(store, model, page_tokens=PAGE).generate(ids, max_new_tokens=2)
    for other in ({"tenant": "other"}, {"salt": b"x"}, {"page_tokens": 32}):
        adapter = TransformersAdapter(store, model, **{"page_tokens": PAGE} | other)
        assert adapter.cache(ids).reused_tokens == [0]


@pytest.mark.slow
def test_pages_come_back_from_disk_after_a_restart(tmp_path: Path, model: Any) -> None:
    ids = prompt(70)
    with Store.open(tmp_path, host_bytes="32MiB", disk_bytes="256MiB") as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        wanted = adapter.generate(ids, durable=True, max_new_tokens=20, do_sample=False)
    with Store.open(tmp_path, host_bytes="32MiB", disk_bytes="256MiB") as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        cache = adapter.cache(ids)
        assert cache.tiers == {"disk": 4}
        found = model.generate(ids, **cache.arguments(), max_new_tokens=20, do_sample=False)
        assert torch.equal(found, wanted)


def test_hints_go_with_generate_and_reach_the_policy(model: Any) -> None:
    with Store.open(None, host_bytes="256KiB") as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        kept, other = prompt(3 * PAGE, 1), prompt(3 * PAGE, 2)
        adapter.generate(kept, max_new_tokens=2, hints=Hints(priority=1, conversation="chat"))
        adapter.generate(other, max_new_tokens=2)
        assert adapter.hint(other, hints=Hints(priority=-1)) == 3
        for seed in range(10, 40):
            adapter.generate(prompt(3 * PAGE, seed), max_new_tokens=1)
        assert stored_pages(adapter, kept) == 3
        assert stored_pages(adapter, other) == 0
        assert adapter.end_conversation("chat") == 3
        for seed in range(50, 55):
            adapter.generate(prompt(3 * PAGE, seed), max_new_tokens=1)
        assert stored_pages(adapter, kept) < 3
        store.close()
        assert adapter.hint(kept, hints=Hints(done=True)) == 0
