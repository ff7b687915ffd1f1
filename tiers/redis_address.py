"""Where a Redis or Valkey is: the forms of `redis_url`, parsed strictly and without connecting.

    redis://[USER@]HOST[:PORT][/DB]   one server; rediss:// with TLS; unix:///PATH[?db=N] by socket
    redis+sentinel://HOST[:PORT],HOST.../SERVICE[/DB]    the master that Sentinels name
    redis+cluster://HOST[:PORT],HOST...                  a cluster, found through these nodes

`?ca=FILE` names the CA of a rediss address. A password is refused here: addresses are shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

KINDS = ("single", "unix", "sentinel", "cluster")
FORMS = (
    "redis://host:6379/0, rediss://..., unix:///path, redis+sentinel://host,host/service or "
    "redis+cluster://host,host"
)
PORT = 6379
SENTINEL_PORT = 26379
DB_MAX = 1_000_000

_SCHEME = re.compile(r"(?P<tls>rediss|redis)(?:\+(?P<kind>sentinel|cluster))?|unix")
_NODE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed redis_url."""

    kind: str  # one of KINDS
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""  # of a Unix socket
    service: str = ""  # that Sentinels watch
    db: int = 0
    user: str = ""
    tls: bool = False
    ca_file: str = ""

    @property
    def is_local(self) -> bool:
        """Whether nobody else's machine lies between."""
        return self.kind == "unix" or all(_LOOPBACK.fullmatch(host) for host, _ in self.nodes)

    def __str__(self) -> str:
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"{where}/{self.service}" if self.service else where

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """The address of a redis_url. Raises ValueError that says what is wrong, never the url."""
        try:
            parts = urlsplit(url)
        except ValueError as exc:
            raise ValueError(f"is not an address; {FORMS} is wanted") from exc
        scheme = _SCHEME.fullmatch(parts.scheme)
        if scheme is None:
            raise ValueError(f"begins with no known scheme; {FORMS} is wanted")
        user, _, hosts = parts.netloc.rpartition("@")
        if ":" in user:
            raise ValueError("holds a password; put it in a file, see redis_password_file")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        known = {"db"} if parts.scheme == "unix" else {"ca"}
        if options.keys() - known or parts.fragment:
            raise ValueError(f"has options beyond {', '.join(known)}")
        if parts.scheme == "unix":
            if not parts.path.startswith("/") or hosts:
                raise ValueError("names no socket; unix:///path is wanted")
            db = _number(options.get("db", "0"))
            return cls("unix", path=unquote(parts.path), db=db, user=unquote(user))
        kind = scheme["kind"] or "single"
        nodes = _nodes(hosts, SENTINEL_PORT if kind == "sentinel" else PORT)
        if kind == "single" and len(nodes) > 1:
            raise ValueError("names several hosts; say redis+sentinel:// or redis+cluster://")
        names = [unquote(name) for name in parts.path.split("/") if name]
        service = names.pop(0) if kind == "sentinel" and names else ""
        if kind == "sentinel" and not service:
            raise ValueError("names no service that the Sentinels watch")
        if len(names) > 1 or (names and kind == "cluster"):
            raise ValueError("has more of a path than a database's number")
        return cls(
            kind,
            nodes,
            service=service,
            db=_number(names[0]) if names else 0,
            user=unquote(user),
            tls=scheme["tls"] == "rediss",
            ca_file=options.get("ca", ""),
        )


def _nodes(hosts: str, port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for each in hosts.split(","):
        node = _NODE.fullmatch(each)
        number = int(node["port"] or port) if node else 0
        if node is None or not 0 < number < 65_536:
            raise ValueError("names a host that is none; host or host:port is wanted")
        found.append((node["host"].strip("[]"), number))
    return tuple(found)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > DB_MAX:
        raise ValueError("names a database that is no number")
    return int(text)
