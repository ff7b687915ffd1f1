"""What the dashboard remembers, how often it looks, and whom it answers: without HTTP."""

from __future__ import annotations

from http import HTTPStatus
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from known_pages import PAGE_TOKENS, SPEC, load, prompt, save

from kvstore import Store
from kvstore.dashboard_access import OPERATOR, Access, Refusal, check_origin
from kvstore.dashboard_data import TENANTS_SHOWN, WALK_SHARE, DashboardData, Kept
from kvstore.dashboard_history import COARSE_MAX, COARSE_OF, COLUMNS, FINE_MAX, History, Reading
from kvstore.dashboard_listen import check_dashboard_listen
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Identity, LocalAuthorizer, Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def reading(time_s: float) -> Reading:
    return Reading(time_s, *[0] * (len(COLUMNS) - 1))


def test_a_history_keeps_an_hour_finely_a_day_coarsely_and_no_more() -> None:
    history = History()
    for number in range(2 * COARSE_OF * COARSE_MAX):
        history.add(reading(5.0 * (number + 1)))
    times = [row[0] for row in history.rows()]
    assert times == sorted(times)
    assert len(times) == FINE_MAX + COARSE_MAX - FINE_MAX // COARSE_OF
    steps = {later - earlier for earlier, later in pairwise(times)}
    assert steps == {5.0, 60.0}
    assert times[-1] - times[-FINE_MAX] == 5.0 * (FINE_MAX - 1)
    assert history.rows(times[-3]) == history.rows()[-2:]


def test_a_document_is_made_once_for_all_who_ask_in_a_while() -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"number": len(made)}

    now = [100.0]
    kept = Kept(make, 60.0, lambda: now[0])
    assert [kept.now()["number"] for _ in range(5)] == [1] * 5
    now[0] += 61.0
    assert kept.now()["number"] == 2


def test_a_document_that_takes_long_is_made_less_often() -> None:
    now, made = [100.0], []

    def make() -> dict[str, Any]:
        now[0] += 10.0
        made.append(now[0])
        return {}

    kept = Kept(make, 1.0, lambda: now[0])
    for _ in range(2000):
        kept.now()
        now[0] += 1.0
    assert len(made) == pytest.approx(2000 / (10.0 / WALK_SHARE), abs=1)


def test_a_document_that_failed_is_made_again_when_asked_for() -> None:
    fails = [True, False]

    def make() -> dict[str, Any]:
        if fails.pop(0):
            raise InvalidRequest("not yet")
        return {"is": "there"}

    kept = Kept(make, 60.0)
    with pytest.raises(InvalidRequest):
        kept.now()
    assert kept.now() == {"is": "there"}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes="16MiB") as made:
        yield made


def data_of(store: Store) -> DashboardData:
    return DashboardData(store, lambda: {"sessions": 0})


def test_an_admin_sees_all_tenants_and_others_their_own_only(store: Store) -> None:
    for number, tenant in enumerate(("acme", "globex")):
        session = store.session(SPEC, tenant=tenant)
        save(session, prompt(number, 2))
        assert load(session, prompt(number, 2)) == 2
    data = data_of(store)
    whole = data.state(OPERATOR)
    assert {each["tenant"] for each in whole["tenants"]} == {"acme", "globex"}
    mine = data.state(Identity("acme", Role.METRICS))
    assert [each["tenant"] for each in mine["tenants"]] == ["acme"]
    assert not {"tiers", "reasons", "there", "service", "breakers", "troubles"} & set(mine)
    assert "globex" not in str(mine)
    now = dict(zip(COLUMNS, mine["reading"], strict=True))
    assert (now["requests"], now["host_hit_tokens"]) == (1, 2 * PAGE_TOKENS)
    assert (now["pages"], now["host_bytes"], now["left_pages"]) == (0, 0, 0)
    both = dict(zip(COLUMNS, whole["reading"], strict=True))
    assert (both["requests"], both["pages"]) == (2, 4)


def test_of_many_tenants_the_largest_are_shown_and_the_rest_counted(store: Store) -> None:
    for number in range(TENANTS_SHOWN + 5):
        store.session(SPEC, tenant=f"t{number}")
    save(store.session(SPEC, tenant="zz-large"), prompt(0, 2))
    state = data_of(store).state(OPERATOR)
    assert state["tenants_in_all"] == TENANTS_SHOWN + 6
    assert len(state["tenants"]) == TENANTS_SHOWN
    assert state["tenants"][0]["tenant"] == "zz-large"


def test_explain_takes_ids_in_either_form_and_refuses_the_rest(store: Store) -> None:
    session = store.session(SPEC, tenant="acme")
    save(session, prompt(0, 3))
    data, where = data_of(store), {"tenant": "acme", "namespace": SPEC.namespace.hex()}
    ids = prompt(0, 3).tolist()
    for tokens in (str(ids), " ".join(map(str, ids)), ",\n".join(map(str, ids))):
        found = data.explain({"tokens": tokens, **where}, OPERATOR)
        assert (found["matched_pages"], found["tenant"]) == (3, "acme")
    for asked in (
        {},
        {"tokens": "x"},
        {"tokens": [1]},
        {"tokens": "1", "text": "a"},
        {"text": "a"},
    ):
        with pytest.raises(InvalidRequest):
            data.explain({**asked, **where}, OPERATOR)


def test_a_text_is_made_tokens_and_explained_with_words(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="texts are made tokens by it")
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    common, ids = "A bicycle shop: ", tokenizer.encode("A bicycle shop: tyres!!!").ids
    save(store.session(SPEC, tenant="acme"), np.array(ids, np.int32))
    data = DashboardData(store, dict, tmp_path / "tokenizer.json")
    where = {"tenant": "acme", "namespace": SPEC.namespace.hex()}
    assert data.state(OPERATOR)["has_tokenizer"]
    whole = data.explain({"text": "A bicycle shop: tyres!!!", **where}, OPERATOR)
    assert (whole["prompt_tokens"], whole["matched_pages"]) == (24, 6)
    other = data.explain({"text": common + "chains!!", **where}, OPERATOR)
    assert other["matched_tokens"] == other["differs_at"] == len(common)
    assert other["words"] == ["c", "t"]
    assert (other["prompt_token"], other["stored_token"]) == tuple(tokenizer.encode("ct").ids)
    umlaut = data.explain({"text": "\u00fc", **where}, OPERATOR)
    assert umlaut["prompt_tokens"] == 2, "bytes, not letters"


def test_without_a_tokenizer_a_text_gets_a_sentence_with_a_way_out(store: Store) -> None:
    save(store.session(SPEC), prompt(0, 1))
    data = data_of(store)
    assert not data.state(OPERATOR)["has_tokenizer"]
    for asked in ({"text": "A bicycle shop"}, {"tokens": "A bicycle shop"}):
        with pytest.raises(InvalidRequest, match="needs a server with --dashboard-tokenizer"):
            data.explain(asked, OPERATOR)


def test_only_this_host_can_be_listened_at_and_the_refusal_says_how_from_elsewhere() -> None:
    for good in ("", "unix:/run/d.sock", "127.0.0.1:9465", "[::1]:0", "localhost:9465"):
        assert check_dashboard_listen(good) == good
    for bad in ("0.0.0.0:9465", "10.0.0.1:1", "9465", "[::]:9465", "unix:relative", "host:1"):
        with pytest.raises(ConfigError, match=r"dashboard_listen.*ssh -L"):
            check_dashboard_listen(bad)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9465", "localhost:8080", "LOCALHOST", "[::1]:1", "[::1]"]
)
def test_this_host_may_be_called_by_its_own_names(host: str) -> None:
    for site in ("", "same-origin", "none"):
        check_origin([host], site)
    for site in ("cross-site", "same-site", "same-origin, cross-site"):
        with pytest.raises(Refusal) as refused:
            check_origin([host], site)
        assert refused.value.status == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize(
    "hosts",
    [
        *([], [""], ["evil.example"], ["evil.example:9465"], ["127.0.0.1.evil.example"]),
        *(["localhost.evil.example"], ["10.0.0.1"], ["127.0.0.1", "evil.example"]),
        *(["localhost:9465@evil.example"], ["127.0.0.1:x"], ["127.0.0.1:\u0663"], ["[::]"]),
    ],
)
def test_a_name_that_only_leads_here_is_refused(hosts: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        check_origin(hosts, "")
    assert refused.value.status == HTTPStatus.MISDIRECTED_REQUEST


def test_a_port_without_credentials_wants_a_key_and_a_private_socket_none() -> None:
    port = Access.of(LocalAuthorizer(), "127.0.0.1:0")
    assert len(port.key) > 40
    assert port.identify("tree", [f"Bearer {port.key}"]) == OPERATOR
    for given in (
        [],
        [""],
        ["Bearer "],
        [f"Bearer {port.key}x"],
        [port.key],
        [f"Bearer {port.key}"] * 2,
    ):
        with pytest.raises(Refusal) as refused:
            port.identify("tree", given)
        assert refused.value.status == HTTPStatus.UNAUTHORIZED
    assert Access.of(LocalAuthorizer(), "unix:/run/d.sock").identify("tree", []) == OPERATOR
    assert Access.of(LocalAuthorizer(), "127.0.0.1:0").key != port.key
