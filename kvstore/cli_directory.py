"""Where a command looks: in the server that holds a directory, in a server at an address, else in
the directory itself, with as little memory as works. Commands cannot tell which it is.
"""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from kvstore.client_config import ClientConfig
from kvstore.errors import ConfigError, DirectoryError
from kvstore.server_address import SCHEME, parse_address
from kvstore.socket_probe import why_unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.interface import OperatorLike
    from kvstore.server_address import ServerAddress
    from kvstore.store import Store

HOST_BYTES = 1 << 20
HOLDER_BYTES_MAX = 200

# How to reach a server: an option of every command that looks into a store.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "token_file": (Path | None, typer.Option(help="A file with this client's token.")),
    "ca": (Path | None, typer.Option(help="Certificates of the CA to believe, PEM.")),
    "cert": (Path | None, typer.Option(help="This client's certificate, PEM.")),
    "key": (Path | None, typer.Option(help="Its key, PEM.")),
    "insecure_network": (
        bool,
        typer.Option("--insecure-network", help="Talk to a network address without TLS."),
    ),
    "server_uid": (
        int | None,
        typer.Option(help="The user whose server to trust on a Unix socket."),
    ),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The store that a command was given: a directory or an address, and how to get in."""

    where: str
    config: ClientConfig

    @contextmanager
    def opened(self, *, host_bytes: int = HOST_BYTES) -> Iterator[OperatorLike]:
        """The store; with `host_bytes` of memory if it is opened here.

        Raises DirectoryError when there is none or it can't be asked.
        """
        address = parse_address(self.where)
        directory = address.directory
        if directory is None:
            with _connected(address, self.config) as client:
                yield client
            return
        _check(directory)
        assert address.socket is not None
        reason = why_unreachable(address.socket, self.config.trusted_uid)
        if not reason:
            with _connected(address, self.config) as client:
                yield client
            return
        holder = _holder(directory)
        if holder:
            raise DirectoryError(
                f"{directory}: in use by {holder}, and no server answers there ({reason}); stop it,"
                f" or name the address that it listens at: {SCHEME}HOST:PORT"
            )
        from kvstore.store import Store  # not needed where a server is asked

        with Store.open(directory, host_bytes=host_bytes, for_a_look=True) as store:
            yield store

    def held_without_server(self) -> Path | None:
        """The directory, if no server answers for it: a process may have opened it for itself."""
        address = parse_address(self.where)
        if address.directory is None or address.socket is None:
            return None
        _check(address.directory)
        reason = why_unreachable(address.socket, self.config.trusted_uid)
        return address.directory if reason else None


def is_here(opened: OperatorLike) -> TypeGuard[Store]:
    """Whether this process opened the store itself, instead of asking a server."""
    loaded = sys.modules.get("kvstore.store")
    return loaded is not None and isinstance(opened, loaded.Store)


def on_store(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument is a Place: as DIR or an address, and options to get in."""

    @functools.wraps(command)
    def wrapped(where: str, **given: Any) -> None:
        access = {name: given.pop(name) for name in _OPTIONS}
        config = ClientConfig(
            token_file=access["token_file"],
            ca_file=access["ca"],
            cert_file=access["cert"],
            key_file=access["key"],
            insecure_network=access["insecure_network"],
            server_uid=access["server_uid"],
        )
        command(Place(where, config), **given)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    where = Annotated[
        str,
        typer.Argument(help="The store's directory, or a kvstore:// address.", metavar="STORE"),
    ]
    parameters = [inspect.Parameter("where", kind, annotation=where)]
    parameters += [each.replace(kind=kind) for each in own]
    for name, (annotation, option) in _OPTIONS.items():
        default = False if annotation is bool else None
        said: Any = Annotated[annotation, option]
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=said))
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


@contextmanager
def _connected(address: ServerAddress, config: ClientConfig) -> Iterator[OperatorLike]:
    try:
        from kvstore.operator_client import OperatorClient  # grpc, for those who need it
    except ImportError as exc:
        raise ConfigError(f"a server needs the package grpcio: {exc}") from exc
    client = OperatorClient(address, config)
    try:
        yield client
    finally:
        client.close()


def _check(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise DirectoryError(f"{directory}: this is a file; a store is a directory")
    if not directory.is_dir():
        raise DirectoryError(f"{directory}: there is no such directory")
    if not (directory / "store.json").is_file():
        raise DirectoryError(
            f"{directory}: this is no store directory (it has no store.json); `kvstore serve "
            f"{directory}` makes it one"
        )


def _holder(directory: Path) -> str:
    """Who has the directory open now, as it wrote itself down; "" when nobody has."""
    from kvstore.tiers.store_directory import LOCK_NAME

    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(descriptor, HOLDER_BYTES_MAX, 0).decode(errors="replace").strip()
        return said or "another process"
    finally:
        os.close(descriptor)
    return ""
