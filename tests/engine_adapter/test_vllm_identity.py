"""What names an engine's pages and a request's: settings, extras, weights. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Plain
from typing import Any

import numpy as np
import pytest

from kvstore.engine_adapter.vllm_identity import (
    VllmRequestView,
    _sees_length,
    adapter_digest,
    find_weights,
    why_uncacheable,
    why_unservable,
)
from kvstore.engine_adapter.vllm_settings import read_settings
from kvstore.errors import ConfigError, SpecError


def request(salt: str | None = None, images: list[tuple[str, int, int]] | None = None) -> Any:
    features = [
        Plain(identifier=name, mm_position=Plain(offset=at, length=length))
        for name, at, length in images or []
    ]
    tokens = list(range(40))
    return Plain(
        request_id="r",
        prompt_token_ids=tokens[:30],
        all_token_ids=tokens,
        num_tokens=40,
        cache_salt=salt,
        mm_features=features,
    )


def extras(made: Any, marks: dict[str, str] | None = None) -> dict[int, bytes]:
    return dict(VllmRequestView(made, 8, marks or {}).chain(5).extras)


def test_a_chain_has_prompt_and_output_tokens() -> None:
    chain = VllmRequestView(request(), 8, {}).chain(5)
    assert np.frombuffer(chain.tokens, "<i4").tolist() == list(range(40))
    assert chain.extras == {}


def test_salt_adapter_and_reset_each_change_the_first_page() -> None:
    named = [
        extras(request("a")),
        extras(request("b")),
        extras(request(), {"adapter": "a"}),
        extras(request(), {"since_reset": "a"}),
        extras(request("a"), {"adapter": "a"}),
    ]
    assert all(set(each) == {0} for each in named)
    assert len({each[0] for each in named}) == len(named)


def test_an_image_marks_the_pages_that_it_touches_with_its_place_in_them() -> None:
    one = extras(request(images=[("x", 6, 12)]))
    assert set(one) == {0, 1, 2}
    assert one != extras(request(images=[("y", 6, 12)]))
    assert one[1] != extras(request(images=[("x", 7, 12)]))[1]


def test_two_images_in_a_page_are_both_named() -> None:
    both = extras(request(images=[("x", 0, 2), ("y", 4, 2)]))[0]
    assert both != extras(request(images=[("x", 0, 2)]))[0]
    assert both != extras(request(images=[("y", 0, 2), ("x", 4, 2)]))[0]


def config(**more: Any) -> Any:
    model = Plain(is_encoder_decoder=False, runner_type="generate", model="m", revision=None)
    made = {
        "model_config": model,
        "speculative_config": None,
        "cache_config": Plain(calculate_kv_scales=False),
        "load_config": Plain(load_format="auto"),
    }
    return Plain(**{**made, **more})


def test_a_plain_model_is_served() -> None:
    assert why_unservable(config()) == ""
    assert why_unservable(config(speculative_config=Plain(method="ngram"))) == ""


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"speculative_config": Plain(method="eagle")}, "eagle"),
        ({"cache_config": Plain(calculate_kv_scales=True)}, "scales"),
        ({"load_config": Plain(load_format="dummy")}, "dummies"),
        ({"model_config": Plain(is_encoder_decoder=True)}, "encoder"),
        ({"model_config": Plain(runner_type="pooling")}, "pooling"),
    ],
)
def test_what_has_no_name_is_refused_with_a_line(more: dict[str, Any], word: str) -> None:
    assert word in why_unservable(config(**more))


def test_requests_that_tokens_do_not_name_pass_by() -> None:
    made = request()
    assert why_uncacheable(made) == ""
    made.pooling_params = Plain(task="embed")
    assert why_uncacheable(made) == "a pooling request"
    for tokens in (None, [], [1, 2, 3]):  # with tokens, too: vLLM mixes both in a prompt
        made.prompt_token_ids, made.prompt_embeds = tokens, object()
        assert why_uncacheable(made) == "prompt embeddings"


def test_a_weights_version_answers_alone() -> None:
    one, two = find_weights(config(), "1", None), find_weights(config(), "2", None)
    assert one.startswith("tensors:")
    assert one != two


def test_a_directory_is_named_by_the_content_of_its_weights(tmp_path: Any) -> None:
    made = config()
    made.model_config.model = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    one = find_weights(made, None, None)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert one.startswith("files:")
    assert find_weights(made, None, None) != one


def test_an_adapter_is_its_weights_and_its_settings(tmp_path: Any) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    with pytest.raises(SpecError, match="adapter_config"):
        adapter_digest(str(tmp_path), None)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    one = adapter_digest(str(tmp_path), None)
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    assert adapter_digest(str(tmp_path), None) != one


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stroe"):
        read_settings({"store": "/var/kv", "stroe": "/var/kv"})
    with pytest.raises(ConfigError, match="store"):
        read_settings({})


def test_a_store_on_a_network_is_refused_because_workers_need_its_memory() -> None:
    with pytest.raises(ConfigError, match="memory"):
        read_settings({"store": "kvstore://cache-host:7070"})
    assert read_settings({"store": "kvstore://unix:/run/kv.sock"}).save


@pytest.mark.parametrize(
    ("rope", "sees"),
    [
        (None, False),
        ({}, False),
        ({"rope_type": "default", "rope_theta": 1e5}, False),
        ({"rope_theta": 1e5}, False),
        ({"rope_type": "llama3", "factor": 8.0}, False),
        ({"type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "longrope", "short_factor": [1.0]}, True),
        ({"factor": 2.0}, True),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "yarn"}}, True),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "default"}}, False),
    ],
)
def test_engines_of_other_lengths_share_pages_unless_rope_depends_on_it(
    rope: Any, sees: bool
) -> None:
    assert _sees_length(rope) is sees
