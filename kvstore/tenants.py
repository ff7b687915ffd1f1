"""The tenant file: who may call, as what, and how much of the server is theirs.

It holds digests of tokens, never tokens, so that it can be copied to every server as it is. A
token's secret is 32 random bytes, so one fast hash is enough: there is nothing to guess.
Every change makes a new book; the file is replaced whole. Expiry is wall time, since it must mean
the same on all servers. Must not be here: sockets, calls.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Role, misplaced
from kvstore.private_file import locked_folder, read_private, replace_private
from kvstore.quantity import shown
from kvstore.tenant import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

__all__ = [
    "Quota",
    "Tenant",
    "TenantBook",
    "TokenRecord",
    "edit_tenants",
    "load_tenants",
    "load_token",
    "no_tenant",
    "role_of",
]

FORMAT = 1
FILE_BYTES_MAX = 16 << 20
TENANTS_MAX = 10_000
TOKENS_MAX = 16  # of one tenant
TOKEN_CHARS_MAX = 128
TOKEN_CHARS_MIN = 16
NUMBER_MAX = (1 << 63) - 1
_TOKEN = re.compile(r"kvs1\.([0-9a-f]{12})\.([A-Za-z0-9_-]{43})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much of a server one tenant has. None: no bound, or for a share, an equal part."""

    # Guaranteed: only bytes beyond it are evicted for the sake of other tenants.
    host_bytes_share: int | None = None
    disk_bytes_share: int | None = None
    host_bytes_max: int | None = None
    disk_bytes_max: int | None = None
    pinned_pages_max: int | None = None
    reservations_max: int | None = None
    sessions_max: int | None = None
    calls_per_s_max: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not _is_count(value):
                raise ConfigError(
                    f"{each.name}: {shown(value)} given; must be a whole number, 0 to {NUMBER_MAX}"
                )
        for tier in ("host", "disk"):
            share = getattr(self, f"{tier}_bytes_share")
            most = getattr(self, f"{tier}_bytes_max")
            if share is not None and most is not None and share > most:
                raise ConfigError(
                    f"{tier}_bytes_share: {share} is more than {tier}_bytes_max, {most}"
                )


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One bearer token: its public id, what it may do, until when, and the digest of its text."""

    id: str
    role: Role
    digest: str
    created: int
    expires: int | None = None  # seconds since 1970

    def is_expired(self, wall_now: float) -> bool:
        return self.expires is not None and wall_now >= self.expires


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of the file."""

    name: str
    quota: Quota = field(default_factory=Quota)
    tokens: tuple[TokenRecord, ...] = ()


class TenantBook:
    """All tenants of a file; immutable. Edits return another book or raise InvalidRequest."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        self.tenants: dict[str, Tenant] = dict(sorted((tenants or {}).items()))
        if len(self.tenants) > TENANTS_MAX:
            raise ConfigError(f"{len(self.tenants)} tenants; at most {TENANTS_MAX}")
        self.quotas = {name: tenant.quota for name, tenant in self.tenants.items()}
        self._by_id: dict[str, tuple[Tenant, TokenRecord]] = {}
        for tenant in self.tenants.values():
            for token in tenant.tokens:
                problem = misplaced(tenant.name, token.role)
                if problem:
                    raise ConfigError(f"tenant {tenant.name}: token {token.id}: {problem}")
            if len(tenant.tokens) > TOKENS_MAX:
                raise ConfigError(
                    f"tenant {tenant.name}: {len(tenant.tokens)} tokens; at most {TOKENS_MAX}"
                )
            for token in tenant.tokens:
                if token.id in self._by_id:
                    raise ConfigError(f"token id {token.id} is there twice")
                self._by_id[token.id] = (tenant, token)

    def find_token(self, text: str) -> tuple[Tenant, TokenRecord] | None:
        """Whose token this is, expired or not; None if nobody's. In constant time a length."""
        matched = _TOKEN.fullmatch(text) if len(text) <= TOKEN_CHARS_MAX else None
        if matched is None:
            return None
        found = self._by_id.get(matched[1])
        expected = found[1].digest if found is not None else "0" * 64
        same = hmac.compare_digest(_digest(text), expected)
        return found if same else None

    def with_tenant(self, name: str, quota: Quota) -> TenantBook:
        """A new tenant, or a known one with another quota; its tokens stay."""
        check_name("tenant", name)
        known = self.tenants.get(name, Tenant(name))
        return self._with(replace(known, quota=quota))

    def with_token(
        self, name: str, role: Role, wall_now: float, ttl_s: float | None
    ) -> tuple[TenantBook, str]:
        """The book with one more token of a tenant, and the token: it is shown only here."""
        tenant = self._tenant(name)
        problem = misplaced(name, role)
        if problem:
            raise InvalidRequest(problem)
        kept = tuple(token for token in tenant.tokens if not token.is_expired(wall_now))
        if len(kept) >= TOKENS_MAX:
            raise InvalidRequest(
                f"tenant {name} has {len(kept)} valid tokens, the most there can be; rotate with "
                "--grace 0s, so that old ones end"
            )
        text = f"kvs1.{secrets.token_hex(6)}.{secrets.token_urlsafe(32)}"
        matched = _TOKEN.fullmatch(text)
        assert matched is not None
        expires = None if ttl_s is None else int(wall_now + ttl_s)
        record = TokenRecord(matched[1], role, _digest(text), int(wall_now), expires)
        return self._with(replace(tenant, tokens=(*kept, record))), text

    def with_rotated(
        self, name: str, role: Role, wall_now: float, ttl_s: float | None, grace_s: float
    ) -> tuple[TenantBook, str]:
        """A new token; the tenant's others of this role end `grace_s` from now."""
        end = int(wall_now + grace_s)
        tenant = self._tenant(name)
        ending = tuple(
            replace(token, expires=min(end, token.expires if token.expires is not None else end))
            if token.role is role
            else token
            for token in tenant.tokens
        )
        return self._with(replace(tenant, tokens=ending)).with_token(name, role, wall_now, ttl_s)

    def without_token(self, name: str, token_id: str) -> TenantBook:
        """Revoke one token by its id."""
        tenant = self._tenant(name)
        kept = tuple(token for token in tenant.tokens if token.id != token_id)
        if len(kept) == len(tenant.tokens):
            raise InvalidRequest(f"tenant {name} has no token {token_id}; `kvstore tenant list`")
        return self._with(replace(tenant, tokens=kept))

    def without_tenant(self, name: str) -> TenantBook:
        """Take a tenant and all its tokens out; its pages stay until they are evicted."""
        self._tenant(name)
        return TenantBook({key: each for key, each in self.tenants.items() if key != name})

    def to_json(self) -> str:
        """The file's content."""
        tenants = {}
        for tenant in self.tenants.values():
            quota = {key: value for key, value in asdict(tenant.quota).items() if value is not None}
            tokens = [asdict(token) for token in tenant.tokens]
            tenants[tenant.name] = {"quota": quota, "tokens": tokens}
        return json.dumps({"format": FORMAT, "tenants": tenants}, indent=2) + "\n"

    @staticmethod
    def from_json(content: bytes) -> TenantBook:
        """Parse a tenant file; ConfigError says where it is wrong."""
        try:
            document = json.loads(content, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"is not JSON: {exc}") from None
        top = _table("the file", document, {"format", "tenants"})
        if top.get("format") != FORMAT:
            raise ConfigError(
                f"format {shown(top.get('format'))}; this version reads format {FORMAT}"
            )
        found = top.get("tenants", {})
        if not isinstance(found, dict):
            raise ConfigError("tenants: must be an object")
        return TenantBook({name: _tenant_of(name, entry) for name, entry in found.items()})

    def _tenant(self, name: str) -> Tenant:
        check_name("tenant", name)
        if name not in self.tenants:
            raise InvalidRequest(no_tenant(name, self.tenants))
        return self.tenants[name]

    def _with(self, tenant: Tenant) -> TenantBook:
        return TenantBook({**self.tenants, tenant.name: tenant})


def load_tenants(path: Path) -> TenantBook:
    """The book in a 0600 file of this user; ConfigError if there is none or it is malformed."""
    content = read_private("tenant file", path, FILE_BYTES_MAX)
    try:
        return TenantBook.from_json(content)
    except ConfigError as exc:
        raise ConfigError(f"tenant file {path}: {exc}") from exc


def edit_tenants(path: Path, edit: Callable[[TenantBook], TenantBook], *, create: bool) -> None:
    """Replace the file's book by what `edit` makes of it; editors at the same time queue up.

    Without a file, `create` begins with an empty book. Nothing changes when `edit` raises.
    """
    with locked_folder(path.parent):
        absent = create and not path.exists()
        book = edit(TenantBook() if absent else load_tenants(path))
        try:
            # A link to the file stays a link, as configuration tools make them.
            replace_private(path.resolve(), book.to_json().encode())
        except OSError as exc:
            raise ConfigError(f"tenant file {path}: cannot be written ({exc.strerror})") from exc


def load_token(path: Path) -> str:
    """A client's token from a 0600 file of this user; ConfigError if it is empty or too short."""
    content = read_private("token file", path, TOKEN_CHARS_MAX + 2)
    text = content.decode("ascii", errors="replace").strip()
    if len(text) < TOKEN_CHARS_MIN or not text.isprintable() or not text.isascii() or " " in text:
        raise ConfigError(
            f"token file {path}: {len(text)} characters; must be one token, as `kvstore tenant "
            "add` prints it"
        )
    return text


def no_tenant(name: str, known: Collection[str]) -> str:
    """In a sentence, that there is none of that name, and which one was meant, most likely."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`kvstore tenant list` shows them"
    return f"there is no tenant {name}; {hint}"


def role_of(text: object) -> Role:
    """The role with this name; else ConfigError."""
    try:
        return Role(str(text))
    except ValueError:
        raise ConfigError(f"role: {shown(text)} given; one of {', '.join(Role)}") from None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"kvstore-token-1").hexdigest()


def _tenant_of(name: str, entry: object) -> Tenant:
    try:
        check_name("tenant", name)
        table = _table("entry", entry, {"quota", "tokens"})
        limits = _table("quota", table.get("quota", {}), {each.name for each in fields(Quota)})
        tokens = table.get("tokens", [])
        if not isinstance(tokens, list):
            raise ConfigError("tokens: must be a list")
        return Tenant(name, Quota(**limits), tuple(_token_of(each) for each in tokens))
    except (ConfigError, InvalidRequest) as exc:
        raise ConfigError(f"tenant {shown(name)}: {exc}") from None


def _token_of(entry: object) -> TokenRecord:
    table = _table("token", entry, {each.name for each in fields(TokenRecord)})
    token_id, digest, expires = (table.get(key) for key in ("id", "digest", "expires"))
    if not isinstance(token_id, str) or not _ID.fullmatch(token_id):
        raise ConfigError("token: id must be 12 hex digits")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"token {token_id}: digest must be 64 hex digits")
    created = table.get("created", 0)
    if not _is_count(created) or not (expires is None or _is_count(expires)):
        raise ConfigError(f"token {token_id}: created and expires are seconds since 1970")
    return TokenRecord(token_id, role_of(table.get("role")), digest, created, expires)


def _table(what: str, found: object, known: set[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{what}: must be an object")
    unknown = sorted(set(found) - known)
    if unknown:
        raise ConfigError(f"{what}: unknown key {shown(unknown[0])}; known: {sorted(known)}")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ConfigError("a key is there twice")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= NUMBER_MAX
