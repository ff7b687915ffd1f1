"""The tenant file: tokens, rotation, strict parsing, edits at the same time."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Role
from kvstore.tenant_watch import LOOK_EVERY_S, TenantWatch
from kvstore.tenants import (
    TENANTS_MAX,
    TOKENS_MAX,
    Quota,
    TenantBook,
    edit_tenants,
    load_tenants,
    load_token,
)

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_000_000.0


def book_with_token(role: Role = Role.WRITER, ttl_s: float | None = None) -> tuple[TenantBook, str]:
    return TenantBook().with_tenant("acme", Quota()).with_token("acme", role, NOW, ttl_s)


def test_a_token_is_found_and_any_other_text_is_not() -> None:
    book, token = book_with_token(Role.READER)
    found = book.find_token(token)
    assert found is not None
    assert (found[0].name, found[1].role) == ("acme", Role.READER)
    _, other = book_with_token()
    head, _, secret = token.rpartition(".")
    for wrong in ("", " ", "x", other, token + "A", token[:-1], f"{head}.{'A' * 43}", secret):
        assert book.find_token(wrong) is None, wrong
    assert book.find_token(f"kvs1.000000000000.{secret}") is None


def test_the_file_holds_no_token() -> None:
    book, token = book_with_token()
    assert token.rpartition(".")[2] not in book.to_json()


def test_a_token_ends_when_it_says() -> None:
    book, token = book_with_token(ttl_s=60)
    found = book.find_token(token)
    assert found is not None
    assert not found[1].is_expired(NOW + 59)
    assert found[1].is_expired(NOW + 60)


def test_rotation_ends_tokens_of_the_same_role_only_and_never_later_than_before() -> None:
    book, writer = book_with_token(ttl_s=30)
    book, reader = book.with_token("acme", Role.READER, NOW, None)
    book, newest = book.with_rotated("acme", Role.WRITER, NOW, None, 60)
    ends = {}
    for name, token in {"writer": writer, "reader": reader, "newest": newest}.items():
        found = book.find_token(token)
        assert found is not None
        ends[name] = found[1].expires
    assert ends == {"writer": NOW + 30, "reader": None, "newest": None}
    book, _ = book.with_rotated("acme", Role.WRITER, NOW, None, 0)
    ended = book.find_token(newest)
    assert ended is None or ended[1].is_expired(NOW)


def test_expired_tokens_make_room_and_valid_ones_have_a_bound() -> None:
    book = TenantBook().with_tenant("acme", Quota())
    for _ in range(3 * TOKENS_MAX):
        book, _ = book.with_rotated("acme", Role.WRITER, NOW, None, 0)
    assert len(book.tenants["acme"].tokens) <= 2
    while len(book.tenants["acme"].tokens) < TOKENS_MAX:
        book, _ = book.with_token("acme", Role.READER, NOW - 1, None)
    with pytest.raises(InvalidRequest, match="the most there can be"):
        book.with_rotated("acme", Role.READER, NOW, None, 60)


def test_a_tenant_or_a_token_can_be_taken_out() -> None:
    book, token = book_with_token()
    found = book.find_token(token)
    assert found is not None
    assert book.without_token("acme", found[1].id).find_token(token) is None
    assert book.without_tenant("acme").find_token(token) is None
    for refused in (
        lambda: book.without_token("acme", "0" * 12),
        lambda: book.without_tenant("other"),
        lambda: book.with_token("other", Role.READER, NOW, None),
    ):
        with pytest.raises(InvalidRequest):
            refused()


@pytest.mark.parametrize("name", ["", "_x", "a/b", "../a", "a\0", "a" * 65, ".", "a b", "\u00e9"])
def test_bad_names_are_refused_in_edits_and_in_files(name: str) -> None:
    with pytest.raises(InvalidRequest):
        TenantBook().with_tenant(name, Quota())
    with pytest.raises(ConfigError):
        TenantBook.from_json(json.dumps({"format": 1, "tenants": {name: {}}}).encode())


counts = st.none() | st.integers(0, 2**63 - 1)


@given(st.fixed_dictionaries({each.name: counts for each in fields(Quota)}))
def test_a_book_survives_its_file(limits: dict[str, int | None]) -> None:
    for tier in ("host", "disk"):
        limits[f"{tier}_bytes_max"] = None
    book = TenantBook().with_tenant("acme", Quota(**limits))
    book, token = book.with_token("acme", Role.METRICS, NOW, 5)
    again = TenantBook.from_json(book.to_json().encode())
    assert again.tenants == book.tenants
    assert again.find_token(token) == book.find_token(token)


GOOD_TOKEN = {"id": "0" * 12, "role": "writer", "digest": "0" * 64, "created": 1, "expires": None}


def file_with(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "tenants": {"acme": {"quota": {}, "tokens": [GOOD_TOKEN | changes]}}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "must be an object"),
        ({}, "format"),
        ({"format": 2, "tenants": {}}, "reads format 1"),
        ({"format": 1, "tenant": {}}, "unknown key 'tenant'"),
        ({"format": 1, "tenants": []}, "must be an object"),
        ({"format": 1, "tenants": {"acme": {"tokens": {}}}}, "tokens: must be a list"),
        ({"format": 1, "tenants": {"acme": {"quota": {"host_bytes": 1}}}}, "unknown key"),
        ({"format": 1, "tenants": {"acme": {"quota": {"sessions_max": -1}}}}, "sessions_max"),
        ({"format": 1, "tenants": {"acme": {"quota": {"sessions_max": True}}}}, "sessions_max"),
        ({"format": 1, "tenants": {"acme": {"quota": {"sessions_max": 1.5}}}}, "sessions_max"),
        (
            {
                "format": 1,
                "tenants": {"acme": {"quota": {"host_bytes_share": 2, "host_bytes_max": 1}}},
            },
            "is more than host_bytes_max",
        ),
        (file_with(role="root"), "one of reader, writer, admin, metrics"),
        (file_with(id="zz"), "12 hex digits"),
        (file_with(digest=""), "64 hex digits"),
        (file_with(expires="never"), "seconds since 1970"),
        (file_with(note="x"), "unknown key"),
        ({"format": 1, "tenants": {f"t{n}": {} for n in range(TENANTS_MAX + 1)}}, "at most"),
        (
            {
                "format": 1,
                "tenants": {"a": {"tokens": [GOOD_TOKEN]}, "b": {"tokens": [GOOD_TOKEN]}},
            },
            "is there twice",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(document: object, message: str) -> None:
    assert TenantBook.from_json(json.dumps(file_with()).encode()).tenants
    with pytest.raises(ConfigError, match=message):
        TenantBook.from_json(json.dumps(document).encode())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "format": 1}', b'{"format": NaN}'],
)
def test_what_is_not_clean_json_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError):
        TenantBook.from_json(content)


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_config_error(content: bytes) -> None:
    try:
        TenantBook.from_json(content)
    except ConfigError:
        return


def add(path: Path, name: str = "acme") -> str:
    given_out: list[str] = []

    def edit(book: TenantBook) -> TenantBook:
        changed, token = book.with_tenant(name, Quota()).with_token(name, Role.WRITER, NOW, None)
        given_out.append(token)
        return changed

    edit_tenants(path, edit, create=True)
    return given_out[0]


def test_edits_make_a_private_file_and_leave_nothing_else(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        add(tmp_path / "tenants.json")
    finally:
        os.umask(previous)
    assert [each.name for each in tmp_path.iterdir()] == ["tenants.json"]
    assert (tmp_path / "tenants.json").stat().st_mode & 0o777 == 0o600


def test_a_refused_edit_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    add(path)
    before = path.read_bytes()
    with pytest.raises(InvalidRequest):
        edit_tenants(path, lambda book: book.without_tenant("other"), create=False)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be opened"):
        edit_tenants(tmp_path / "none.json", lambda book: book, create=False)
    with pytest.raises(ConfigError, match="cannot be opened"):
        edit_tenants(tmp_path / "nowhere" / "t.json", lambda book: book, create=True)


def test_editors_at_the_same_time_lose_no_edit(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    names = [f"tenant-{number}" for number in range(12)]
    threads = [threading.Thread(target=add, args=(path, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(load_tenants(path).tenants) == sorted(names)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_tenant_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tenants.json"
    add(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_tenants(path)


def test_a_fifo_or_a_directory_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(ConfigError, match="not a regular file"):
            load_tenants(path)


@pytest.mark.parametrize(
    "content", ["", "\n", "   ", "12345678", "two words that are long", "x" * 300]
)
def test_an_empty_short_or_odd_token_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="token file"):
        load_token(path)


def test_a_token_file_gives_the_token(tmp_path: Path) -> None:
    _, token = book_with_token()
    path = tmp_path / "token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    assert load_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(path)


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_sees_a_change_within_a_second_and_keeps_the_last_good_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.json"
    add(path)
    clock = Clock()
    watch = TenantWatch(path, clock)
    add(path, "other")
    assert "other" not in watch.book().tenants
    clock.now += LOOK_EVERY_S
    assert "other" in watch.book().tenants
    for damage in (lambda: path.write_text("{"), lambda: path.chmod(0o644), path.unlink):
        damage()
        clock.now += LOOK_EVERY_S
        assert "other" in watch.book().tenants
        said = len(caplog.records)
        clock.now += LOOK_EVERY_S
        watch.book()
        assert len(caplog.records) == said, "one line a change, not one a look"
    assert "the last good one stays in force" in caplog.text
    add(path, "third")
    assert list(watch.fresh_book().tenants) == ["third"]


def test_a_watch_refuses_to_start_on_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        TenantWatch(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("tenant", "role", "said"),
    [
        ("public", Role.WRITER, "written by the role publisher"),
        ("public", Role.READER, "written by the role publisher"),
        ("acme", Role.PUBLISHER, "for the tenant public only"),
    ],
)
def test_public_has_publishers_and_nobody_else_has(
    tmp_path: Path, tenant: str, role: Role, said: str
) -> None:
    book = TenantBook().with_tenant(tenant, Quota())
    with pytest.raises(InvalidRequest, match=said):
        book.with_token(tenant, role, NOW, None)
    path = tmp_path / "tenants.json"
    other = Role.PUBLISHER if tenant == "public" else Role.WRITER
    edit_tenants(path, lambda _: book.with_token(tenant, other, NOW, None)[0], create=True)
    path.write_text(path.read_text().replace(f'"{other}"', f'"{role}"'))
    with pytest.raises(ConfigError, match=said):
        load_tenants(path)


def test_a_book_that_can_not_be_used_here_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    edit_tenants(path, lambda book: book.with_tenant("acme", Quota()), create=True)

    def at_most_one(book: TenantBook) -> None:
        if len(book.tenants) > 1:
            raise ConfigError("too many")

    watch = TenantWatch(path, check=at_most_one)
    edit_tenants(path, lambda book: book.with_tenant("other", Quota()), create=False)
    assert set(watch.fresh_book().tenants) == {"acme"}
    with pytest.raises(ConfigError, match=r"tenants\.json: too many"):
        TenantWatch(path, check=at_most_one)
