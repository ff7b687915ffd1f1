"""The commands `kvstore export` and `kvstore import`: chains to a file and back."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_directory import Place
from kvstore.cli_options import Json, Namespace
from kvstore.errors import DirectoryError, InvalidRequest
from kvstore.quantity import format_bytes
from kvstore.server_address import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from kvstore.importer import Imported

HOST_BYTES = 256 << 20  # of a directory that is opened to import into it


def export(
    store: Place,
    file: Annotated[Path, typer.Argument(help="Where to; - is stdout.", metavar="FILE")],
    namespace: Namespace = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's chains.")] = None,
    chain: Annotated[
        str | None, typer.Option(help="Only the chain whose id begins so; see `ls`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if there is one.")] = False,
    json: Json = False,
) -> None:
    """Write chains to a file that any other server can import.

    It holds prompts and their pages in plain, and no key or secret: mode 0600. Checksummed
    throughout. Trees with a salt are left out, since nobody could ask for them elsewhere.
    """
    to_stdout = str(file) == "-"
    if file.is_dir():
        raise InvalidRequest(f"{file}: this is a folder; name a file in it")
    if not to_stdout and not file.parent.is_dir():
        raise InvalidRequest(f"{file}: there is no folder {file.parent}; make it first")
    if file.exists() and not force and not to_stdout:
        raise InvalidRequest(f"{file}: is there already; --force replaces it")
    with store.opened() as opened, output.progress("export", "bytes") as show:
        space = prompt.namespace_prefix(opened, namespace)
        if tenant is not None:
            prompt.check_tenant(opened, tenant)
        pieces = opened.export(tenant=tenant, namespace=space, chain=chain)
        if to_stdout:
            size = _copy(pieces, sys.stdout.buffer, show)
            sys.stdout.buffer.flush()
            return
        with _replacing(file) as target:
            size = _copy(pieces, target, show)
    with file.open("rb") as made:
        end = _checked(made, lambda done, total: None)
    if json:
        output.print_json({"file": str(file), "file_bytes": size} | end)
        return
    out = output.console()
    out.print(
        f"{end['pages']} pages of {end['trees']} trees, {format_bytes(end['payload_bytes'])}, "
        f"are in {file} ({format_bytes(size)})."
    )
    for key, words in _LEFT_OUT.items():
        if end[key]:
            out.print(f"left out: {end[key]} {words}")


_LEFT_OUT = {
    "trees_with_salt": "trees with a salt",
    "trees_without_spec": "trees whose spec this store has not met",
    "damaged_pages": "pages that fail their checksum, with all below them; see `kvstore verify`",
}


def import_file(
    store: Place,
    file: Annotated[Path, typer.Argument(help="What export wrote; - is stdin.", metavar="FILE")],
    tenant: Annotated[
        str | None, typer.Option(help="Whose the pages become, instead of as in the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Read an exported file into a store.

    The same tokens and bytes, under this store's own keys.

    The whole file is checked first, and refused with the position where it is damaged (from
    stdin, as it comes). Pages that are there already stay.
    """
    _refuse_no_store(parse_address(store.where).directory)
    with store.opened(host_bytes=HOST_BYTES) as opened:
        if str(file) == "-":
            found = opened.import_pages(_exactly(sys.stdin.buffer.read), tenant=tenant)
        else:
            found = _import_checked(opened.import_pages, file, tenant)
        (last,) = deque(found, maxlen=1)
    if json:
        output.print_json(last.to_dict())
        return
    out = output.console()
    out.print(
        f"{last.stored} pages stored, {last.present} were there already; "
        f"{format_bytes(last.payload_bytes)} read."
    )
    if last.left_out:
        out.print(f"{last.left_out} pages found no room; raise --host-bytes or --disk-bytes.")


def _refuse_no_store(directory: Path | None) -> None:
    """With a word on how there comes to be one; other commands have nothing to do in a new one."""
    if directory is None:
        return
    if not directory.exists():
        raise DirectoryError(
            f"{directory}: there is no such directory; `kvstore serve {directory}` makes a store, "
            "and takes the file in while it runs"
        )
    if not directory.is_dir():
        raise DirectoryError(
            f"{directory}: this is a file; the store comes first: kvstore import STORE FILE"
        )


def _import_checked(
    take: Callable[..., Iterator[Imported]], file: Path, tenant: str | None
) -> Iterator[Imported]:
    try:
        source = file.open("rb")
    except OSError as exc:
        raise InvalidRequest(f"{file}: cannot be read: {exc.strerror}") from exc
    with source:
        size = os.fstat(source.fileno()).st_size
        try:
            with output.progress("check", "bytes") as show:
                end = _checked(source, show)
        except InvalidRequest as exc:
            raise InvalidRequest(f"{file}: {exc}") from exc
        source.seek(0)
        with output.progress("import") as show:
            for each in take(_exactly(source.read), tenant=tenant):
                show(each.pages, end["pages"])
                yield each
        assert source.tell() == size


def _checked(source: BinaryIO, show: Callable[[float, float], None]) -> dict[str, int]:
    """Look at every byte of a file; what its END says. InvalidRequest where it is damaged."""
    from kvstore.export_file import frames

    size = os.fstat(source.fileno()).st_size
    end: dict[str, int] = {}
    for frame in frames(source.read):
        show(frame.position, size)
        end = frame.head
    return end


def _exactly(read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """read(n) that gives less only at the end, also from a pipe."""
    from kvstore.export_file import PieceReader

    def pieces() -> Iterator[bytes]:
        while piece := read(1 << 20):
            yield piece

    return PieceReader(pieces())


def _copy(pieces: Iterator[bytes], target: BinaryIO, show: Callable[[float, float], None]) -> int:
    size = 0
    for piece in pieces:
        target.write(piece)
        size += len(piece)
        show(size, 0)
    return size


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    """A new file beside, 0600, that takes the name only when it is whole and on disk."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        os.replace(aside, file)
    except OSError as exc:
        raise InvalidRequest(f"{file}: cannot be written: {exc.strerror}") from exc
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
