"""A server in this process with a tenant file, and clients that come with its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import kvstore_pb2 as messages
from kvstore.client import RemoteStore
from kvstore.client_config import ClientConfig
from kvstore.identity import Role
from kvstore.server import Server
from kvstore.server_address import parse_address
from kvstore.server_config import ServerConfig
from kvstore.tenants import Quota, TenantBook, edit_tenants

if TYPE_CHECKING:
    from pathlib import Path


class TenantServer:
    """Use it in a `with` statement; `connect` as any tenant and role that the file has."""

    def __init__(self, folder: Path, quotas: dict[str, Quota], **settings: Any) -> None:
        self.folder = folder
        self.file = folder / "tenants.json"
        for tenant, quota in quotas.items():
            self.set_quota(tenant, quota)
        config = ServerConfig(
            directory=folder / "kv",
            tenants_file=self.file,
            **{"host_bytes": "4MiB", "disk_bytes": "64MiB"} | settings,
        )
        self.server = Server(config)
        self.store = self.server.store
        self.registry = self.server.registry
        self._clients: list[RemoteStore] = []

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Write it into the tenant file; the server reads it when it looks next."""
        edit_tenants(self.file, lambda book: book.with_tenant(tenant, quota), create=True)

    def token(self, tenant: str, role: Role = Role.WRITER) -> Path:
        """A file with a new token."""
        path = self.folder / f"{tenant}-{role}.token"
        if not path.exists():
            path.touch(mode=0o600)
            edit_tenants(self.file, lambda book: self._with(book, tenant, role, path), create=False)
        return path

    def connect(self, tenant: str, role: Role = Role.WRITER, **settings: Any) -> RemoteStore:
        """A client; it is closed with the server."""
        config = ClientConfig(token_file=self.token(tenant, role), lookup_deadline_s=5, **settings)
        made = RemoteStore(parse_address(f"kvstore://{self.server.config.address}"), config)
        self._clients.append(made)
        return made

    def stats(self, tenant: str, role: Role) -> dict[str, Any]:
        """What Stats tells this caller."""
        return self.connect(tenant, role).stats().to_dict()

    def ask(self, tenant: str, role: Role, method: str, request: Any) -> Any:
        """A bare call, as a client without any manners makes it; grpc.RpcError."""
        client = self.connect(tenant, role)
        channel = client._link.channel
        return channel.call(method, request, 10.0, wait_for_ready=True)

    def __enter__(self) -> TenantServer:
        self.server.start()
        self.store.wait_warm(10.0)
        host = self.store.state.host
        assert host is not None
        host.wait_populated(10.0)
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()
        self.store.check()
        self.server.stop()

    @staticmethod
    def _with(book: TenantBook, tenant: str, role: Role, path: Path) -> TenantBook:
        changed, token = book.with_token(tenant, role, 0.0, None)
        path.write_text(token)
        return changed


def evict_request(**selection: Any) -> messages.EvictRequest:
    """What `kvstore evict --yes` sends."""
    return messages.EvictRequest(**selection)
