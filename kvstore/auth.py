"""Credentials to identities: bearer tokens, certificates, and which addresses need them.

Tenant and role come from the credential, never from a request; identity.py says what a role may do.
Must not be here: grpc (what a call carries comes through two methods of its context), sessions.
"""

from __future__ import annotations

import re
from time import time
from typing import TYPE_CHECKING, Any

from kvstore.call_budget import CallBudgets
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import (
    DEFAULT_TENANT,
    PUBLIC_TENANT,
    Identity,
    LocalAuthorizer,
    NotAuthenticated,
    Role,
    misplaced,
)
from kvstore.tenant import check_name
from kvstore.tenant_watch import TenantWatch
from kvstore.tenants import Quota, role_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from kvstore.tenants import TenantBook

__all__ = [
    "AnonymousAuthorizer",
    "CredentialAuthorizer",
    "HeaderCall",
    "authorizer_for",
    "certificate_name",
    "check_listen",
    "is_unix",
]

CERTIFICATE_SCHEME = "kvstore"  # a certificate's URI name: kvstore://TENANT/ROLE

NO_QUOTAS: Mapping[str, Quota] = {}

_BEARER = re.compile(r"[Bb]earer +(\S+)", re.ASCII)
_UNIX = ("unix:", "unix-abstract:")


class CredentialAuthorizer:
    """Bearer tokens of a tenant file, certificates that a TLS handshake verified, or both.

    A token that is sent must be good, also beside a good certificate, and then it counts; the two
    must name one tenant. With a tenant file a certificate's tenant must stand in it, so that
    taking a tenant out takes its certificates too.
    """

    def __init__(
        self,
        tenants: TenantWatch | None,
        *,
        certificates: bool,
        wall_clock: Callable[[], float] = time,
    ) -> None:
        if tenants is None and not certificates:
            raise ConfigError("credentials: neither a tenant file nor a client CA is given")
        self._tenants = tenants
        self._certificates = certificates
        self._wall_clock = wall_clock
        self._budgets = CallBudgets()

    def identify(self, context: Any) -> Identity:
        """See Authorizer. Counts as a call of the tenant; TooManyCalls when it is over its rate."""
        identity = self._identity(context)
        self._budgets.charge(identity.tenant, self.quota(identity.tenant).calls_per_s_max)
        return identity

    def quota(self, tenant: str) -> Quota:
        """How much of the server this tenant has, as the tenant file says now."""
        found = self._tenants.book().tenants.get(tenant) if self._tenants is not None else None
        return found.quota if found is not None else Quota()

    def quotas(self) -> Mapping[str, Quota]:
        """What all tenants of the tenant file may have, as it says now; empty without one."""
        return self._tenants.book().quotas if self._tenants is not None else NO_QUOTAS

    def _identity(self, context: Any) -> Identity:
        certified = _certified(context.auth_context()) if self._certificates else None
        token = _bearer_token(context.invocation_metadata() or ())
        if token is not None:
            identity = self._identity_of_token(token)
            if certified is not None and certified.tenant != identity.tenant:
                raise NotAuthenticated("the token and the certificate name different tenants")
            return identity
        if certified is None:
            raise NotAuthenticated(f"no credential; {self._wanted()}")
        known = self._tenants.book().tenants if self._tenants is not None else None
        if known is None and certified.tenant == PUBLIC_TENANT:
            raise NotAuthenticated(f"tenant {PUBLIC_TENANT} has to be in a tenant file")
        if known is not None and certified.tenant not in known:
            raise NotAuthenticated("the certificate's tenant is not in this server's tenant file")
        return certified

    def _identity_of_token(self, text: str) -> Identity:
        if self._tenants is None:
            raise NotAuthenticated("this server knows no tokens; it wants a client certificate")
        found = self._tenants.book().find_token(text)
        found = found or self._tenants.fresh_book().find_token(text)
        if found is None:
            raise NotAuthenticated("the token is not valid here; see `kvstore tenant list`")
        tenant, token = found
        if token.is_expired(self._wall_clock()):
            raise NotAuthenticated(f"token {token.id} has expired; see `kvstore tenant rotate`")
        return Identity(tenant.name, token.role, "token")

    def _wanted(self) -> str:
        token = "metadata authorization: Bearer TOKEN" if self._tenants is not None else ""
        certificate = "a client certificate" if self._certificates else ""
        return "send " + " or ".join(filter(None, (token, certificate)))


class HeaderCall:
    """What an authorizer asks of a call, for one over HTTP: headers, and never a certificate."""

    def __init__(self, authorization: list[str]) -> None:
        self._authorization = authorization

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", value) for value in self._authorization]


class AnonymousAuthorizer:
    """For `--insecure-network` without credentials: all are writers of the default tenant."""

    def identify(self, context: Any) -> Identity:
        """Everybody is the same writer."""
        return Identity(DEFAULT_TENANT, Role.WRITER, "anonymous")


def authorizer_for(
    listen: str,
    tenants_file: Path | None,
    *,
    certificates: bool,
    check: Callable[[TenantBook], object] = lambda book: None,
) -> CredentialAuthorizer | AnonymousAuthorizer | LocalAuthorizer:
    """Who decides about calls to this address; ConfigError for a bad tenant file.

    With a tenant file or a client CA every call needs a credential, on a Unix socket too. check:
    raises ConfigError for tenants that this server can't serve together.
    """
    if tenants_file is not None or certificates:
        watch = TenantWatch(tenants_file, check=check) if tenants_file is not None else None
        return CredentialAuthorizer(watch, certificates=certificates)
    return LocalAuthorizer() if is_unix(listen) else AnonymousAuthorizer()


def is_unix(listen: str) -> bool:
    """Whether an address is a Unix socket of the file system."""
    return listen.startswith("unix:")


def check_listen(listen: str, *, tls: bool, credentials: bool, insecure_network: bool) -> str:
    """A warning to say at start and in `status`, "" if there is nothing to say.

    ConfigError for an address that others can reach without TLS and credentials. That is also a
    loopback port: every user of the machine can open it; only a Unix socket has an owner.
    """
    if is_unix(listen):
        return ""
    if listen.startswith(_UNIX):
        raise ConfigError(f"listen: {listen}: has no owner and no mode; use unix:/path")
    missing = " and ".join(
        what for what, given in (("TLS", tls), ("credentials", credentials)) if not given
    )
    if not missing:
        return ""
    if insecure_network:
        return f"insecure_network: {listen} is open without {missing}; pages there are prompts"
    raise ConfigError(
        f"listen: {listen} can be reached by others and has no {missing}; give --tls-cert, "
        "--tls-key and --tenants-file or --tls-client-ca, or listen on unix:/path, or say "
        "--insecure-network"
    )


def certificate_name(tenant: str, role: Role) -> str:
    """The URI that a client certificate carries as its alternative name."""
    problem = misplaced(tenant, role)
    if problem:
        raise InvalidRequest(problem)
    return f"{CERTIFICATE_SCHEME}://{check_name('tenant', tenant)}/{role.value}"


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    matched = _BEARER.fullmatch(found[0]) if isinstance(found[0], str) else None
    if matched is None or len(found) > 1:
        raise NotAuthenticated("metadata authorization: send one value, Bearer TOKEN")
    return matched[1]


def _certified(auth_context: Mapping[str, Sequence[bytes]]) -> Identity | None:
    """The identity in a verified certificate; None without one, or without a name of ours."""
    names = auth_context.get("peer_uri", ())  # URI names only, and only when verified
    prefix = f"{CERTIFICATE_SCHEME}://".encode()
    ours = {bytes(name) for name in names if bytes(name).startswith(prefix)}
    if not ours:
        return None
    tenant, _, role = ours.pop().removeprefix(prefix).decode("latin-1").partition("/")
    try:
        if ours:
            raise NotAuthenticated("the certificate has several kvstore:// names; one is wanted")
        found = Identity(check_name("certificate's tenant", tenant), role_of(role), "certificate")
        problem = misplaced(found.tenant, found.role)
        if problem:
            raise ConfigError(problem)
        return found
    except (ConfigError, ValueError) as exc:
        raise NotAuthenticated(
            f"the certificate's name is not kvstore://TENANT/ROLE: {exc}"
        ) from exc
