"""Why a prompt hits or misses, to the one field, token or eviction that decides it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, prompt
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.explanation import Explanation, differences
from kvstore.removal import Selection
from kvstore.spec import CacheSpec, KvQuantization, LayerGroup, PageLayout, ShardGeometry

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

PLAIN = CacheSpec(
    model="org/model",
    weights="hub:" + "0123456789" * 4,
    config_digest="ab" * 16,
    backend="transformers",
    page_format="plain",
    kv_dtype="bfloat16",
    groups=(LayerGroup.uniform(2, 1, 64),),
    rope='{"rope_theta":100000.0}',
    page_tokens=PAGE_TOKENS,
    layout=PageLayout.LAYER_KV_HEAD_TOKEN_DIM,
    quantization=KvQuantization.none(),
    adapter="none",
    geometry=ShardGeometry.single(),
)
TOKENS = prompt(0, 4)
OTHERS = {
    "adapter": replace(PLAIN, adapter="cd" * 16),
    "kv_dtype": replace(PLAIN, kv_dtype="float32"),
    "weights": replace(PLAIN, weights="hub:" + "9876543210" * 4),
    "groups[0].kv_heads": replace(PLAIN, groups=(LayerGroup.uniform(2, 2, 64),)),
    "rope": replace(PLAIN, rope='{"rope_theta":500000.0}'),
}


def put(
    store: Store, spec: CacheSpec, tokens: np.ndarray = TOKENS, tenant: str = "default"
) -> None:
    with store.session(spec, tenant=tenant).reserve(tokens, deadline_s=10.0) as run:
        assert run.commit(durable=store.config.directory is not None).pages


@pytest.mark.parametrize("field", OTHERS)
def test_the_one_field_that_differs_is_named_with_both_values(field: str) -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, PLAIN)
        store.session(OTHERS[field])
        found = store.explain(TOKENS, namespace=OTHERS[field].namespace)
    (other,) = found.elsewhere
    (only,) = other.differs
    assert only.field == field
    assert only.here != only.there
    assert (other.matched_tokens, found.matched_tokens) == (16, 0)
    assert found.verdict == f"miss: 16 tokens are stored where this differs: {field}"
    assert found.other_namespaces == (PLAIN.namespace.hex(),)


def test_a_spec_that_the_store_never_met_can_be_asked_about() -> None:
    asked = OTHERS["adapter"]
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, PLAIN)
        with pytest.raises(InvalidRequest, match="no pages of that namespace"):
            store.explain(TOKENS, namespace=asked.namespace)
        found = store.explain(TOKENS, namespace=asked.namespace, spec_json=asked.to_json())
        assert [each.field for each in found.elsewhere[0].differs] == ["adapter"]
        with pytest.raises(InvalidRequest, match="not " + SPEC.namespace.hex()):
            store.explain(TOKENS, namespace=SPEC.namespace, spec_json=asked.to_json())


def test_another_tenant_is_named_only_to_who_may_know() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, PLAIN, tenant="acme")
        put(store, PLAIN, TOKENS[:PAGE_TOKENS])
        found = store.explain(TOKENS, namespace=PLAIN.namespace)
        (other,) = found.elsewhere
        assert [asdict(each) for each in other.differs] == [
            {"field": "tenant", "here": "default", "there": "acme"}
        ]
        own = store.explain(TOKENS, namespace=PLAIN.namespace, all_tenants=False)
        assert own.elsewhere == ()
        assert "acme" not in json.dumps(own.to_dict())


def test_a_salt_is_a_difference_too() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        with store.session(PLAIN, salt=b"user-7").reserve(TOKENS) as run:
            run.commit()
        store.session(PLAIN)
        (other,) = store.explain(TOKENS, namespace=PLAIN.namespace).elsewhere
        assert [each.field for each in other.differs] == ["salt"]


def test_equal_tokens_with_other_extras_are_said_to_be_that() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        with store.session(SPEC).reserve(TOKENS, {1: b"cat"}) as run:
            run.commit()
        found = store.explain(TOKENS, namespace=SPEC.namespace, extras={1: b"dog"})
        assert (found.extras_differ_at, found.differs_at) == (1, None)
        assert found.verdict == "hit on 1 of 4 pages: page 1 is stored with other extras"


def test_what_was_evicted_is_named_with_reason_and_time() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, SPEC)
        root = store.root(SPEC.namespace)
        tail = Selection(root=root, prefix=TOKENS[: 2 * PAGE_TOKENS])
        assert store.evict(tail).pages == 3
        now = store.state.wall_clock()
        store.state.wall_clock = lambda: now + 180.0
        found = store.explain(TOKENS, namespace=SPEC.namespace)
        (gone,) = found.departed
        assert (gone.first_page, gone.pages, gone.why, gone.tiers) == (1, 3, "operator", ("host",))
        assert 180 <= gone.ago_s < 190
        assert found.verdict == (
            "hit on 1 of 4 pages: 3 more pages would have hit until 3m ago, when they were "
            "evicted by an operator"
        )
        put(store, SPEC)
        again = store.explain(TOKENS, namespace=SPEC.namespace)
        assert (again.departed, again.verdict) == ((), "hit: all 4 whole pages are stored")


def test_other_text_is_named_by_position_and_both_tokens() -> None:
    other = TOKENS.copy()
    other[9] = 42
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, SPEC)
        found = store.explain(other, namespace=SPEC.namespace)
    assert (found.differs_at, found.prompt_token, found.stored_token) == (9, 42, int(TOKENS[9]))


def test_an_explanation_travels_as_json() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        put(store, PLAIN, tenant="acme")
        put(store, SPEC)
        store.session(OTHERS["weights"])
        store.evict(Selection(namespace=SPEC.namespace))
        for space in (OTHERS["weights"].namespace, SPEC.namespace):
            if space == SPEC.namespace:
                put(store, SPEC, TOKENS[:PAGE_TOKENS])
            found = store.explain(TOKENS, namespace=space)
            assert found.elsewhere
            assert Explanation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_differences_are_the_innermost_ones() -> None:
    here = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "e": [1]}
    there = {"a": 1, "b": {"c": [1, 3], "d": "y"}, "e": [1, 2], "f": None}
    found = {each.field: (each.here, each.there) for each in differences(here, there)}
    assert found == {"b.c[1]": ("2", "3"), "b.d": ("x", "y"), "e": ("[1]", "[1, 2]")}


def cli(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CASES = {
    "the LoRA": ("adapter", OTHERS["adapter"], f"adapter: {'cd' * 16} here, none there"),
    "the dtype": ("kv_dtype", OTHERS["kv_dtype"], "kv_dtype: float32 here, bfloat16 there"),
    "the weights": (
        "weights",
        OTHERS["weights"],
        f"weights: {OTHERS['weights'].weights[:37]}... here, {PLAIN.weights[:37]}... there",
    ),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain") / "store"
    with Store.open(folder, host_bytes="4MiB", disk_bytes="64MiB") as store:
        put(store, PLAIN)
        with store.session(PLAIN, salt=b"user-7").reserve(TOKENS[: 3 * PAGE_TOKENS]) as run:
            run.commit(durable=True)
    return folder


def ids(tokens: np.ndarray) -> str:
    return ",".join(map(str, tokens.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_command_names_the_one_field_that_differs(
    stored: Path, tmp_path: Path, case: str
) -> None:
    field, asked, line = CASES[case]
    (tmp_path / "spec.json").write_text(asked.to_json())
    said = cli("explain", str(stored), "--tokens", ids(TOKENS), "--spec", f"{tmp_path}/spec.json")
    assert f"miss: 16 tokens are stored where this differs: {field}" in said.splitlines()
    assert line in said


@pytest.mark.slow
def test_the_command_names_the_tenant_that_differs(stored: Path) -> None:
    given = ["--namespace", PLAIN.namespace.hex(), "--tenant", "zeta"]
    said = cli("explain", str(stored), "--tokens", ids(TOKENS), *given)
    assert "miss: 16 tokens are stored where this differs: tenant" in said
    assert "tenant: zeta here, default there" in said
    own = cli("explain", str(stored), "--tokens", ids(TOKENS), *given, "--no-all-tenants")
    assert "default" not in own


@pytest.mark.slow
def test_the_command_names_position_and_token_where_the_text_differs(stored: Path) -> None:
    other = TOKENS.copy()
    other[9] = 42
    said = cli("explain", str(stored), "--tokens", ids(other))
    assert "hit on 2 of 4 pages: the closest stored chain differs at token 9" in said
    assert f"token 9: the prompt has 42, the store has {TOKENS[9]}" in said


@pytest.mark.slow
def test_the_command_takes_a_salt(stored: Path) -> None:
    given = ["explain", str(stored), "--tokens", ids(TOKENS)]
    salted = cli(*given, "--salt", "user-7")
    assert "hit on 3 of 4 pages: 16 tokens are stored where this differs: salt" in salted
    assert "salt: the one given here, none there" in salted
    assert cli(*given, "--salt", f"hex:{b'user-7'.hex()}") == salted
    assert "hit: all 4 whole pages are stored" in cli(*given)
    other = cli(*given, "--salt", "nobody")
    assert "miss: 16 tokens are stored where this differs: salt" in other
    assert "salt: the one given here, another there" in other
    with ServerProcess(stored) as server:
        server.start()
        assert cli(*given, "--salt", "user-7") == salted


@pytest.mark.slow
def test_the_command_names_an_eviction_with_its_reason(tmp_path: Path) -> None:
    """In the one server that evicted: what left is remembered as long as it runs."""
    with Store.open(tmp_path / "store", host_bytes="4MiB", disk_bytes="64MiB") as store:
        put(store, PLAIN)
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        cli("evict", str(tmp_path / "store"), "--tokens", ids(TOKENS[: 2 * PAGE_TOKENS]), "--yes")
        said = cli("explain", str(tmp_path / "store"), "--tokens", ids(TOKENS))
    assert "hit on 1 of 4 pages: 3 more pages would have hit until " in said
    assert "ago, when they were evicted by an operator" in said
    assert "pages 1 to 3: here until " in said
    assert "ago, in disk; evicted by an operator" in said


@pytest.mark.slow
def test_the_command_says_it_in_a_directory_and_through_its_server(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    asked = OTHERS["adapter"]
    (tmp_path / "spec.json").write_text(asked.to_json())
    with Store.open(folder, host_bytes="4MiB", disk_bytes="64MiB") as store:
        put(store, PLAIN)
    tokens = ",".join(map(str, TOKENS.tolist()))
    question = ["explain", str(folder), "--tokens", tokens, "--spec", str(tmp_path / "spec.json")]
    said = cli(*question)
    assert "miss: 16 tokens are stored where this differs: adapter" in said
    assert f"adapter: {'cd' * 16} here, none there" in said
    with ServerProcess(folder) as server:
        server.start()
        assert cli(*question) == said
        with connect(server.address, lookup_deadline_s=5.0) as remote:
            remote.evict(Selection(everything=True))  # type: ignore[attr-defined]
        named = ["--namespace", PLAIN.namespace.hex(), "--json"]
        found: dict[str, Any] = json.loads(cli("explain", str(folder), "--tokens", tokens, *named))
    (gone,) = found["departed"]
    assert (gone["pages"], gone["why"], gone["tiers"]) == (4, "operator", ["disk"])
