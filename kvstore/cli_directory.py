"""Where a command looks: in the server that holds a directory, in a server at an address, else in
the directory itself, with as little memory as works. Commands cannot tell which it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
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
    from kvstore.tiers.lock_holder import LockHolder

HOST_BYTES = 1 << 20
START_WAIT_S = 5.0  # for a server that has the directory and does not listen yet
STARTING_S_MAX = 60.0  # one that has had it longer listens elsewhere, or is in trouble
POLL_S = 0.05

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
        if _is_served(directory, address.socket, self.config.trusted_uid):
            with _connected(address, self.config) as client:
                yield client
            return
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


def _is_served(directory: Path, path: Path, trusted_uid: int) -> bool:
    """Whether a server answers at `path`, once it has started; False when nobody is there.

    Raises DirectoryError when somebody has the directory and can't be asked.
    """
    from kvstore.tiers.lock_holder import find_holder

    deadline_s = time.monotonic() + START_WAIT_S
    while True:
        reason = why_unreachable(path, trusted_uid)
        if not reason:
            return True
        holder = find_holder(directory)
        if holder is None:
            return False
        starts = holder.serves and holder.held_s < STARTING_S_MAX
        if not starts or time.monotonic() > deadline_s:
            raise DirectoryError(_refusal(directory, holder, reason, starts=starts))
        time.sleep(POLL_S)


def _refusal(directory: Path, holder: LockHolder, reason: str, *, starts: bool) -> str:
    if starts:
        return (
            f"{directory}: kvstore serve (pid {holder.pid}) is starting: try again; if it listens "
            f"elsewhere, name that address: {SCHEME}HOST:PORT"
        )
    if holder.looks:
        return f"{directory}: in use by {holder.words}: try again when it has ended"
    return (
        f"{directory}: in use by {holder.words}, and no server answers there ({reason}); stop it,"
        f" or name the address that it listens at: {SCHEME}HOST:PORT"
    )
