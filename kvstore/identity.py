"""Who calls, and what each role may call: the one table that every method of the service is in.

An Authorizer turns a call's credentials into an Identity; the tenant comes from there and from no
request. A method that is missing from ROLES is open to nobody, so that none can be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_TENANT = "default"
# Whose pages all tenants may read. It exists where an operator put it in the tenant file.
PUBLIC_TENANT = "public"


class Role(StrEnum):
    """What a credential is for. Each one may do what is listed for it in ROLES, nothing else."""

    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"
    METRICS = "metrics"
    PUBLISHER = "publisher"  # a writer of the public tenant


_WRITING = frozenset({Role.WRITER, Role.PUBLISHER, Role.ADMIN})
_READING = _WRITING | {Role.READER}
_OPERATING = frozenset({Role.ADMIN})
_WATCHING = frozenset({Role.METRICS, Role.ADMIN})

ROLES: Mapping[str, frozenset[Role]] = {
    "Open": _READING,
    "Heartbeat": _READING,
    "Close": _READING,
    "Attach": _READING,
    "Match": _READING,
    "Stage": _READING,
    "Release": _READING,
    "ReadPages": _READING,
    "Reserve": _WRITING,
    "Commit": _WRITING,
    "Abort": _WRITING,
    "WritePages": _WRITING,
    "Flush": _WRITING,
    "Pin": _WRITING,
    "Unpin": _WRITING,
    "Hint": _WRITING,
    "Evict": _OPERATING,
    "List": _OPERATING,
    "Inspect": _OPERATING,
    "Explain": _OPERATING,
    "Tree": _OPERATING,
    "PinChain": _OPERATING,
    "Record": _OPERATING,
    "Verify": _OPERATING,
    "Export": _OPERATING,
    "Import": _OPERATING,
    "Watch": _READING,
    "Stats": _WATCHING,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a call comes from. `name` tells credentials of one tenant apart."""

    tenant: str
    role: Role
    name: str = ""


def misplaced(tenant: str, role: Role) -> str:
    """Why a tenant can have no credential of this role; "" when it can."""
    if tenant == PUBLIC_TENANT and role in (Role.READER, Role.WRITER):
        return f"tenant {PUBLIC_TENANT} is written by the role {Role.PUBLISHER}, and read by all"
    if tenant != PUBLIC_TENANT and role is Role.PUBLISHER:
        return f"the role {Role.PUBLISHER} is for the tenant {PUBLIC_TENANT} only"
    return ""


class NotAuthenticated(Exception):
    """No credential, or none that is known and valid now; the message is safe to send back."""


class Authorizer(Protocol):
    """Finds out who calls. Safe to call from several threads, and never slow."""

    def identify(self, context: Any) -> Identity:
        """The identity behind a grpc.ServicerContext; raises NotAuthenticated."""


class LocalAuthorizer:
    """For a Unix socket: whoever may open it, by its directory's permissions, is the operator."""

    def identify(self, context: Any) -> Identity:
        """Everybody is the same administrator of the default tenant."""
        return _LOCAL


_LOCAL = Identity(DEFAULT_TENANT, Role.ADMIN, "local")
