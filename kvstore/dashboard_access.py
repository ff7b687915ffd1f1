"""Who may see what of a dashboard: the caller's credential, and whether a stranger's page asks.

A server with credentials wants one of them here; without, a key that only its user can read, or a
Unix socket that only its user can open. No cookies, so no other page can borrow a login.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvstore.auth import CredentialAuthorizer, HeaderCall
from kvstore.call_budget import TooManyCalls
from kvstore.identity import DEFAULT_TENANT, ROLES, Identity, NotAuthenticated, Role

if TYPE_CHECKING:
    from kvstore.identity import Authorizer

# What a view shows, as the method of the service that shows it to the same roles.
NEEDS = {
    "state": "Stats",
    "history": "List",
    "chains": "List",
    "tree": "Tree",
    "explain": "Explain",
}
OPERATOR = Identity(DEFAULT_TENANT, Role.ADMIN, "local")


class Refusal(Exception):
    """Why a request gets no answer; the sentence is safe to send."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """Made by `of`."""

    authorizer: CredentialAuthorizer | None
    key: str  # "": none is wanted

    @staticmethod
    def of(authorizer: Authorizer, listen: str) -> Access:
        """What to ask of callers at this address."""
        if isinstance(authorizer, CredentialAuthorizer):
            return Access(authorizer, "")
        return Access(None, "" if listen.startswith("unix:") else secrets.token_urlsafe(32))

    def identify(self, view: str, authorization: list[str]) -> Identity:
        """Who asks for a view, from the Authorization headers; Refusal if that one may not."""
        identity = self._identity(authorization)
        if identity.role not in ROLES[NEEDS[view]]:
            raise Refusal(
                HTTPStatus.FORBIDDEN, f"this is not for the role {identity.role}; ask as an admin"
            )
        return identity

    def _identity(self, authorization: list[str]) -> Identity:
        if self.authorizer is not None:
            try:
                return self.authorizer.identify(HeaderCall(authorization))
            except TooManyCalls as exc:
                raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, str(exc)) from exc
            except NotAuthenticated as exc:
                raise Refusal(HTTPStatus.UNAUTHORIZED, str(exc)) from exc
        wanted = f"Bearer {self.key}".encode()
        given = authorization[0].encode() if len(authorization) == 1 else b""
        if self.key and not hmac.compare_digest(given, wanted):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, "no key, or an old one; `kvstore dashboard DIR` says it"
            )
        return OPERATOR


def check_origin(hosts: list[str], site: str) -> None:
    """Refusal unless a browser was sent here by this host's own page.

    hosts: all Host headers. A name that leads here but is not this host's (DNS rebinding) would
    let a stranger's page read along. site: Sec-Fetch-Site, where a browser says it.
    """
    if len(hosts) != 1 or not _is_loopback(hosts[0]):
        raise Refusal(
            HTTPStatus.MISDIRECTED_REQUEST, "call this host 127.0.0.1, [::1] or localhost"
        )
    if site not in ("", "same-origin", "none"):
        raise Refusal(HTTPStatus.FORBIDDEN, "another page asks; open this one itself")


def _is_loopback(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal() or not port.isascii():
        name = host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
