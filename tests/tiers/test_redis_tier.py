"""The Redis tier against a real server: rules, junk in every key, full, silent, gone, back."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from disk_pages import Chains, Stored
from redis_server import RULES, RedisProcess

from kvstore.tiers import redis_record
from kvstore.tiers.checksum import checksum
from kvstore.tiers.redis_address import RedisAddress
from kvstore.tiers.redis_link import FAILURES_MAX, TIMEOUT_S
from kvstore.tiers.redis_record import PIECE_BYTES, Sealed
from kvstore.tiers.redis_tier import RedisTier
from kvstore.tiers.tier import ReadStatus, TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 10.0


def key_of(tenant: str) -> bytes:
    """A secret that two stores have in common."""
    return tenant.encode().ljust(32, b"-")


def opened(
    server: RedisProcess, *, user: str = "", wait: bool = True, **settings: Any
) -> RedisTier:
    url = server.url.replace("//", f"//{user}@") if user else server.url
    settings = {"key_of": key_of} | settings
    tier = RedisTier(RedisAddress.parse(url), 256 << 20, **settings)
    if wait:
        assert tier.link.wait_first(WAIT_S), tier.state
    return tier


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def tier(server: RedisProcess) -> Iterator[RedisTier]:
    tier = opened(server)
    yield tier
    tier.check()
    tier.close()


def store(tier: RedisTier, items: list[Stored]) -> list[bool]:
    slots = [tier.reserve("t", len(item.payload), 1)[0] for item in items]
    payloads = [memoryview(item.payload) for item in items]
    kept = tier.write_many(slots, [item.page for item in items], payloads)
    tier.forget(slots)
    return kept


def store_all(tier: RedisTier, items: list[Stored]) -> None:
    """Store pages, again if need be: a busy machine takes longer than Redis is given."""
    until(lambda: tier.link.ready and all(store(tier, items)), tier)


def fetch(tier: RedisTier, item: Stored) -> bytes | ReadStatus | None:
    """What another store gets for a page: its bytes, why not, or None where it finds nothing."""
    while True:
        until(lambda: tier.link.ready, tier)
        with contextlib.suppress(TierError):
            found = fetch_once(tier, item)
            if found is not ReadStatus.ERROR:
                return found


def fetch_once(tier: RedisTier, item: Stored) -> bytes | ReadStatus | None:
    """The same, whatever state Redis is in."""
    [found] = tier.find_many(item.page.tenant, item.page.root, [item.page.key])
    if found is None:
        return None
    assert found.record == item.page
    [slot] = tier.adopt([(found, item.page)])
    buffer = bytearray(item.page.payload_bytes)
    [status] = tier.read_many([slot], [item.page], [memoryview(buffer)])
    tier.forget([slot])
    return bytes(buffer) if status is ReadStatus.OK else status


def until(what: Callable[[], bool], tier: RedisTier) -> None:
    """Wait for the watch of a tier, which probes all the time, to see something."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, tier.state
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 4096, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
def test_another_store_finds_and_reads_what_one_wrote(
    server: RedisProcess, tier: RedisTier, size: int
) -> None:
    item = Chains().page(size, extras=b"image 7")
    store_all(tier, [item])
    other = opened(server)
    assert fetch(other, item) == item.payload
    other.close()
    assert max(len(server.ask("GET", key)) for key in server.pages()) <= max(PIECE_BYTES, 1024)
    assert len(server.pages()) == 1 + -(-size // PIECE_BYTES)


def test_every_key_has_a_ttl_and_pieces_outlive_their_header(
    server: RedisProcess, tier: RedisTier
) -> None:
    store_all(tier, [Chains().page(3 * PIECE_BYTES)])
    ttl = {key: server.ask("TTL", key) for key in server.pages()}
    header = min(ttl, key=len)
    assert 86_000 < ttl.pop(header) <= 86_400
    assert len(ttl) == 3
    assert all(86_400 < each <= 86_460 for each in ttl.values())


def test_without_the_secret_nothing_is_found(server: RedisProcess, tier: RedisTier) -> None:
    item = Chains().page()
    store_all(tier, [item])
    stranger = opened(server, key_of=lambda tenant: b"another secret of 32 bytes......")
    assert fetch(stranger, item) is None
    stranger.close()


def test_nothing_in_a_key_or_a_header_gives_the_root_away(
    server: RedisProcess, tier: RedisTier
) -> None:
    item = Chains().page(root=3)
    store_all(tier, [item])
    seen = b"".join([*server.pages(), *(server.ask("GET", key) for key in server.pages())])
    assert item.page.key in seen
    assert item.page.root not in seen
    assert item.page.root.hex().encode() not in seen


def test_exactly_the_documented_rules_are_enough(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        server.allow("kvstore", "pass", RULES)
        tier = opened(server, user="kvstore", password="pass")
        items = Chains().chain(3, 2 * PIECE_BYTES)
        store_all(tier, items)
        assert tier.renew([item.page for item in items]) == [True] * 3
        assert [fetch(tier, item) for item in items] == [item.payload for item in items]
        assert tier.erase([(i.page.tenant, i.page.root, i.page.key) for i in items]) == 3
        assert server.pages() == []
        assert server.ask("ACL", "LOG") == []  # nothing was tried beyond them
        tier.close()


@pytest.mark.parametrize(
    "rules", ["~kv:* +set +del +expire", "~other:* +get +set", "~kv:* +@all -get"]
)
def test_too_narrow_rules_are_a_problem_with_a_reason(tmp_path: Path, rules: str) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        server.allow("kvstore", "pass", rules)
        tier = opened(server, user="kvstore", password="pass", wait=False)
        assert not tier.link.wait_first(WAIT_S)
        assert "permission" in tier.state.lower()
        tier.close()


def test_a_wrong_password_is_said_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisProcess(tmp_path / "redis", "--requirepass", "right") as server:
        tier = opened(server, password="hunter2", wait=False)
        assert not tier.link.wait_first(WAIT_S)
        assert "password" in tier.state
        assert "hunter2" not in caplog.text + tier.state
        with pytest.raises(TierError, match="breaker open"):
            tier.find_many("t", bytes(32), [bytes(16)])
        tier.close()


def headers_and_pieces(server: RedisProcess) -> tuple[list[bytes], list[bytes]]:
    keys = sorted(server.pages(), key=len)
    return [key for key in keys if key.endswith(b"}")], [key for key in keys if key[-1:] != b"}"]


def damage(
    server: RedisProcess, key: bytes, kind: str, rng: random.Random, others: list[bytes]
) -> None:
    """Do one bad thing to a key."""
    value = server.ask("GET", key)
    if kind == "flip":
        at = rng.randrange(len(value))
        value = value[:at] + bytes([value[at] ^ (1 << rng.randrange(8))]) + value[at + 1 :]
    elif kind == "cut":
        value = value[: rng.randrange(len(value))]
    elif kind == "longer":
        value += rng.randbytes(rng.randrange(1, 50))
    elif kind == "junk":
        value = rng.randbytes(rng.choice([0, 1, len(value), 5_000_000]))
    elif kind == "swap":
        value = server.ask("GET", rng.choice([other for other in others if other != key]))
    server.ask("DEL", key)
    if kind == "type":
        server.ask("HSET", key, "field", "value")
    elif kind != "gone":
        server.ask("SET", key, value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "cut", "longer", "junk", "swap", "type", "gone"])
@pytest.mark.parametrize("where", ["header", "piece"])
def test_whatever_is_done_to_any_key_is_a_miss_and_never_other_bytes(
    server: RedisProcess, tier: RedisTier, kind: str, where: str
) -> None:
    rng = random.Random(f"{kind} {where}")
    items = Chains().chain(4, PIECE_BYTES + 1000)
    for item in items * 3:
        server.ask("FLUSHALL")
        store_all(tier, items)
        header = redis_record.header_key(key_of(item.page.tenant), item.page.root, item.page.key)
        headers, pieces = headers_and_pieces(server)
        mine = [header] if where == "header" else [p for p in pieces if p.startswith(header)]
        others = headers if where == "header" else [p for p in pieces if not p.startswith(header)]
        damage(server, rng.choice(mine), kind, rng, others)
        assert fetch(tier, item) in (None, ReadStatus.CORRUPT, ReadStatus.STALE)
        rest = [other for other in items if other is not item]
        assert [fetch(tier, other) for other in rest] == [other.payload for other in rest]
    counted = tier.counters
    assert counted.bad_headers + counted.bad_payloads + counted.missing_pieces > 0 or kind == "gone"


def test_a_sound_header_under_another_pages_name_is_refused(
    server: RedisProcess, tier: RedisTier
) -> None:
    """Both pages of one tree, so that the seal is right and only the name is not."""
    first, second = Chains().chain(2)
    store_all(tier, [first, second])
    names = [
        redis_record.header_key(key_of(i.page.tenant), i.page.root, i.page.key)
        for i in (first, second)
    ]
    server.ask("SET", names[0], server.ask("GET", names[1]))
    assert fetch(tier, first) is None
    assert tier.counters.bad_headers == 1


def test_a_header_of_a_later_version_is_no_page(server: RedisProcess, tier: RedisTier) -> None:
    item = Chains().page()
    store_all(tier, [item])
    secret = key_of(item.page.tenant)
    [found] = tier.find_many(item.page.tenant, item.page.root, [item.page.key])
    assert found is not None
    content = bytearray(redis_record.encode(secret, found)[: -redis_record.SEAL_BYTES])
    content[4] += 1
    seal = redis_record._header_seal(secret, item.page.root, bytes(content))
    name = redis_record.header_key(secret, item.page.root, item.page.key)
    server.ask("SET", name, bytes(content) + seal)
    assert fetch(tier, item) is None


def test_two_writers_of_one_page_never_mix_their_bytes(
    server: RedisProcess, tier: RedisTier
) -> None:
    item = Chains().page(2 * PIECE_BYTES)
    store_all(tier, [item])
    [old] = tier.find_many(item.page.tenant, item.page.root, [item.page.key])
    assert old is not None
    [slot] = tier.adopt([(old, item.page)])
    other = Chains().page(2 * PIECE_BYTES)  # the same page, of another store with other bytes
    payload = random.Random(5).randbytes(2 * PIECE_BYTES)
    record = replace(other.page, checksum=checksum(payload))
    store_all(tier, [Stored(record, payload)])
    buffer = bytearray(2 * PIECE_BYTES)
    assert tier.read_many([slot], [item.page], [memoryview(buffer)]) == [ReadStatus.OK]
    assert buffer == item.payload
    assert fetch(tier, Stored(record, payload)) == payload


def test_renewing_tells_which_pages_are_there_whole(server: RedisProcess, tier: RedisTier) -> None:
    items = Chains().chain(4, PIECE_BYTES + 1)
    store_all(tier, items[:3])
    _, pieces = headers_and_pieces(server)
    header = redis_record.header_key(
        key_of(items[1].page.tenant), items[1].page.root, items[1].page.key
    )
    server.ask("DEL", next(piece for piece in pieces if piece.startswith(header)))
    assert tier.renew([item.page for item in items]) == [True, False, True, False]
    store_all(tier, [items[1]])
    assert fetch(tier, items[1]) == items[1].payload


def test_a_redis_that_is_full_refuses_and_is_left_alone_for_a_while(tmp_path: Path) -> None:
    now = [0.0]
    limits = ("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    with RedisProcess(tmp_path / "redis", *limits) as server:
        server.ask("SET", "somebody's", "precious")
        tier = opened(server, clock=lambda: now[0])
        items = [Chains(counter=100 * n).page(2 * PIECE_BYTES) for n in range(12)]
        kept = [store(tier, [item])[0] for item in items]
        assert kept[0]
        assert not kept[-1]
        assert "full" in tier.state
        refused = tier.counters.refused_writes
        assert refused > 0
        assert not store(tier, [items[-1]])[0]
        assert tier.counters.refused_writes == refused  # it was not even asked
        assert [fetch(tier, i) for i, ok in zip(items, kept, strict=True) if ok] == [
            i.payload for i, ok in zip(items, kept, strict=True) if ok
        ]
        server.ask("CONFIG", "SET", "maxmemory", "100mb")
        now[0] += 60
        assert "full" in tier.state, "nobody has asked again"
        assert store(tier, [items[-1]]) == [True]
        assert tier.state == "ok"
        assert server.ask("GET", "somebody's") == b"precious"
        tier.close()


def test_silence_opens_the_breaker_within_three_timeouts_and_costs_no_caller(
    server: RedisProcess, tier: RedisTier, caplog: pytest.LogCaptureFixture
) -> None:
    item = Chains().page()
    store_all(tier, [item])
    caplog.set_level(logging.INFO, "kvstore.redis")
    server.pause()
    with pytest.raises(TierError, match="redis"):
        tier.find_many(item.page.tenant, item.page.root, [item.page.key])
    assert not tier.link.ready  # after the first: the watch asks on
    until(lambda: "breaker open" in tier.state, tier)
    assert tier.link.errors >= FAILURES_MAX
    assert FAILURES_MAX * TIMEOUT_S <= 0.3
    errors = tier.link.errors
    for _ in range(1000):
        with pytest.raises(TierError):
            tier.find_many(item.page.tenant, item.page.root, [item.page.key])
    assert tier.link.errors <= errors + 2  # the watch's, none of these calls'
    server.resume()
    until(lambda: tier.link.ready, tier)
    assert fetch(tier, item) == item.payload
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "misses until" in line]) == 1
    assert len([line for line in said if line.endswith(": ok")]) == 1


def test_a_killed_redis_is_used_again_when_it_is_back_and_known_to_be_empty(
    tmp_path: Path,
) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        tier = opened(server)
        item = Chains().page()
        store_all(tier, [item])
        losses = tier.link.losses
        server.kill()
        with pytest.raises(TierError):
            fetch_once(tier, item)
        until(lambda: "breaker open" in tier.state, tier)
        with RedisProcess(tmp_path / "redis", port=server.port) as again:
            until(lambda: tier.link.ready, tier)
            assert fetch(tier, item) is None
            assert tier.link.losses > losses
            store_all(tier, [item])
            assert len(again.pages()) == 2
            tier.close()


def test_a_redis_that_was_emptied_is_noticed_by_the_watch(
    server: RedisProcess, tier: RedisTier
) -> None:
    until(lambda: bool(server.ask("KEYS", "kv:{watch-*")), tier)
    server.ask("FLUSHALL")
    tier.link._wake.set()  # as WATCH_EVERY_S later
    until(lambda: tier.link.losses == 1, tier)
    assert tier.state == "ok"


def test_nobody_at_the_address_is_a_state_and_no_error(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path / "redis")  # never started
    tier = opened(server, wait=False)
    assert not tier.link.wait_first(WAIT_S)
    assert tier.state.startswith("breaker open: ")
    [slot] = tier.reserve("t", 4096, 1)
    item = Chains().page()
    assert tier.write_many([slot], [item.page], [memoryview(item.payload)]) == [False]
    tier.free_many([slot])
    tier.close()


def test_a_cluster_and_sentinels_lead_to_the_same_pages(tmp_path: Path) -> None:
    item = Chains().page(2 * PIECE_BYTES)
    with RedisProcess(tmp_path / "node", "--cluster-enabled", "yes") as node:
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        address = RedisAddress.parse(f"redis+cluster://127.0.0.1:{node.port}")
        tier = RedisTier(address, 256 << 20, key_of)
        until(lambda: tier.link.ready, tier)
        until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), tier)
        until(lambda: store(tier, [item]) == [True], tier)
        assert fetch(tier, item) == item.payload
        node.pause()
        with pytest.raises(TierError):
            fetch_once(tier, item)
        until(lambda: "breaker open" in tier.state, tier)
        tier.close()
    folder = tmp_path / "sentinel"
    folder.mkdir()
    with RedisProcess(tmp_path / "master") as master:
        rules = folder / "sentinel.conf"
        rules.write_text(f"sentinel monitor pages 127.0.0.1 {master.port} 1\n")
        with RedisProcess(folder, sentinel_rules=rules) as watcher:
            url = f"redis+sentinel://127.0.0.1:{watcher.port}/pages"
            tier = RedisTier(RedisAddress.parse(url), 256 << 20, key_of)
            assert tier.link.wait_first(WAIT_S)
            store_all(tier, [item])
            assert fetch(tier, item) == item.payload
            assert len(master.pages()) == 3
            tier.close()


def test_a_unix_socket_and_a_database_are_addresses_too(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "r", "--unixsocket", str(tmp_path / "sock")) as server:
        tier = RedisTier(RedisAddress.parse(f"unix://{tmp_path}/sock?db=3"), 1 << 20, key_of)
        assert tier.link.wait_first(WAIT_S)
        item = Chains().page()
        store_all(tier, [item])
        assert fetch(tier, item) == item.payload
        assert server.pages() == []  # they are in database 3
        tier.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host", "no known scheme"),
        ("redis://:secret@host", "redis_password_file"),
        ("redis://user:secret@host", "redis_password_file"),
        ("redis://", "no host|none"),
        ("redis://host:0", "none"),
        ("redis://host:99999", "none"),
        ("redis://a,b", "several hosts"),
        ("redis://host/x", "no number"),
        ("redis://host/0/1", "more of a path"),
        ("redis://host?timeout=9", "options"),
        ("redis+sentinel://host", "no service"),
        ("redis+cluster://host/1", "more of a path"),
        ("unix://host/sock", "no socket"),
        ("unix:", "no socket"),
        ("redis://[::1", "address"),
    ],
)
def test_addresses_that_are_none_are_refused_without_repeating_them(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        RedisAddress.parse(url)
    assert "secret" not in str(caught.value)


def test_addresses_are_read_as_written() -> None:
    parse = RedisAddress.parse
    assert parse("redis://host") == RedisAddress("single", (("host", 6379),))
    assert parse("rediss://me@[::1]:7/2?ca=/ca.pem") == RedisAddress(
        "single", (("::1", 7),), db=2, user="me", tls=True, ca_file="/ca.pem"
    )
    assert parse("redis+sentinel://a,b:1/pages/4") == RedisAddress(
        "sentinel", (("a", 26379), ("b", 1)), service="pages", db=4
    )
    assert parse("rediss+cluster://a,b").kind == "cluster"
    local = ["redis://localhost", "redis://127.0.0.1", "redis://[::1]", "unix:///run/r.sock"]
    assert all(parse(url).is_local for url in local)
    assert not parse("redis+cluster://localhost,example.org").is_local


@pytest.mark.slow
def test_random_headers_are_never_believed() -> None:
    rng = random.Random(1)
    item = Chains().page(extras=b"x" * 40)
    secret = key_of("t")
    good = redis_record.encode(secret, Sealed(item.page, bytes(32)))
    assert redis_record.decode(secret, item.page.root, "tenant-0", good).record == item.page
    for _ in range(3000):
        value = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            value = value[: rng.randrange(len(value))]
        if value == good:
            continue
        with pytest.raises(redis_record.RecordError):
            redis_record.decode(secret, item.page.root, "tenant-0", bytes(value))
