"""A store's share in a Redis: the tier, and the threads that find, read and write its pages there.

Nothing here can keep a store from opening or from answering: a Redis that is away, full, slow or
hostile is a row in `stats` and misses.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.private_file import read_private
from kvstore.redis_finder import RedisFinder
from kvstore.redis_stager import RedisStager
from kvstore.redis_writer import RedisWriter
from kvstore.tenant import tenant_secret
from kvstore.tiers.redis_address import RedisAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.config import StoreConfig
    from kvstore.disk_writer import DiskWriter
    from kvstore.evictor import Evictor
    from kvstore.state import StoreState
    from kvstore.tiers.host_tier import HostTier
    from kvstore.tiers.redis_tier import RedisTier

PASSWORD_BYTES_MAX = 4096
FIRST_WAIT_S = 0.3  # at start, for the first answer
FLUSH_S_MAX = 2.0  # at the end, for what still waits to be written
# Pages that only Redis has are known so long after they were last asked for.
IDLE_S = 10.0

_log = logging.getLogger("kvstore.redis")


class RedisShare:
    """Made by a Store whose config has a redis_url."""

    def __init__(
        self,
        state: StoreState,
        host: HostTier,
        evictor: Evictor,
        disk_writer: DiskWriter | None,
    ) -> None:
        """Begin to connect; waits FIRST_WAIT_S at most. Raises ConfigError for what can't work."""
        self._state = state
        self._keys: dict[str, bytes] = {}
        self.tier = state.redis = _open_tier(state.config, self._key_of)
        self.finder = RedisFinder(state, self.tier)
        self.writer = RedisWriter(state, self.tier, host)
        self.stager = RedisStager(state, self.tier, host, evictor, disk_writer, self.finder)
        self.tier.link.wait_first(FIRST_WAIT_S)

    @property
    def problem(self) -> str:
        """What is wrong, or nothing."""
        return "" if self.tier.state == "ok" else self.tier.state

    def count(self) -> None:
        """Bring the counters of the store up to date. Its lock is held."""
        counters, found = self._state.counters, self.tier.counters
        counters.redis_bad_pages = found.bad_headers + found.bad_payloads
        counters.redis_errors = self.tier.link.errors + found.refused_writes
        counters.redis_breaker_opened = self.tier.link.times_opened

    def stop(self, deadline: float) -> None:
        """Write what waits if it goes quickly, end the threads, close the connections."""
        self.finder.stop(deadline)
        self.stager.stop(deadline)
        self.writer.stop(min(deadline, self._state.clock() + FLUSH_S_MAX))
        self.tier.close()

    def _key_of(self, tenant: str) -> bytes:
        """What names and seals a tenant's pages in Redis: of the store secret, so in common."""
        key = self._keys.get(tenant)
        if key is None:
            secret = tenant_secret(self._state.secret, tenant)
            key = hashlib.blake2b(b"kvstore redis pages", key=secret, digest_size=32).digest()
            self._keys[tenant] = key
        return key


def _open_tier(config: StoreConfig, key_of: Callable[[str], bytes]) -> RedisTier:
    try:
        from kvstore.tiers.redis_tier import RedisTier  # a store without Redis needs no client
    except ImportError as exc:
        raise ConfigError(
            "redis_url: the Redis client is missing; run: pip install 'kvstore-llm[redis]'"
        ) from exc
    address = RedisAddress.parse(config.redis_url)
    password = redis_password(config)
    if not password and not address.is_local:
        _log.warning(
            "redis at %s asks for no password: whoever reaches it can read the pages and lose "
            "them; set redis_password_file, and an ACL as the README says",
            address,
        )
    if config.secret_file is None:
        _log.warning(
            "redis at %s: this store has a secret of its own, so no other store can use its "
            "pages; give all of them the same secret_file",
            address,
        )
    return RedisTier(
        address, config.redis_bytes, key_of, password=password, ttl_s=config.redis_ttl_s
    )


def redis_password(config: StoreConfig) -> str:
    """What redis_password_file holds, "" without one; ConfigError."""
    if config.redis_password_file is None:
        return ""
    content = read_private("redis_password_file", config.redis_password_file, PASSWORD_BYTES_MAX)
    try:
        return content.decode().rstrip("\r\n")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"redis_password_file {config.redis_password_file}: no text") from exc
