"""One door to every kind of store: in this process, in a directory's server, at an address.

    connect(None)                          in memory, in this process
    connect("/var/cache/kv")               the server of that directory; started if there is none,
                                           unless an operator's `kvstore serve` has it
    connect("kvstore://unix:/run/kv.sock") a server on this host
    connect("kvstore://cache-host:7070")   a server on another one

Adapters take what comes out; they cannot tell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvstore.client_config import CLIENT_SETTINGS, ClientConfig
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.server_address import parse_address
from kvstore.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.interface import StoreLike

PRIVATE_OPEN_WAIT_S = 10.0


def connect(where: str | Path | None = None, **settings: Any) -> StoreLike:
    """The store at `where`. Raises ConfigError for settings that cannot be, and for no lost server.

    settings: fields of ClientConfig; for a store in memory and for a server that has to be started
    also those of StoreConfig (`host_bytes="2GiB"`, ...). Whether a server is there or not, the call
    returns at once: until one answers, all look-ups are misses.
    """
    client = {name: value for name, value in settings.items() if name in CLIENT_SETTINGS}
    store = {name: value for name, value in settings.items() if name not in CLIENT_SETTINGS}
    if where is None:
        return Store.open(None, **store)
    from kvstore.client import RemoteStore  # a store in this process needs no gRPC

    address = parse_address(where)
    if address.directory is None:
        if store:
            raise ConfigError(
                f"{', '.join(sorted(store))}: not settings of a client; the server at "
                f"{os.fspath(where)} has its own"
            )
        return RemoteStore(address, ClientConfig(**client))
    from kvstore.private_server import PrivateServer

    StoreConfig(directory=address.directory, **store)  # refuses what no server would start with
    client.setdefault("open_wait_s", PRIVATE_OPEN_WAIT_S)
    config = ClientConfig(**client)
    if config.private_server is False:
        return RemoteStore(address, config)
    starter = PrivateServer(address.directory, store, even_if_served=bool(config.private_server))
    return RemoteStore(address, config, starter)
