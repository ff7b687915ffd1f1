"""The command `kvstore record`: record look-ups while a store is used, for `kvstore simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore.cli_directory import Place
from kvstore.cli_options import Json, bytes_of
from kvstore.errors import InvalidRequest
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.interface import OperatorLike
    from kvstore.recorder import Recording
    from kvstore.recording import Wish

ACTIONS = ("start", "stop", "status")


def record(
    store: Place,
    action: Annotated[
        str, typer.Argument(help="start, stop or status.", metavar="ACTION")
    ] = "status",
    name: Annotated[
        str | None, typer.Option(help="Of the file in DIR/records: .jsonl, or .jsonl.gz.")
    ] = None,
    max_bytes: Annotated[str, typer.Option(help="The most that the file may take.")] = "256MiB",
    json: Json = False,
) -> None:
    """Record which pages are looked up, anonymised, into DIR/records.

    A server begins and ends at once. A process that holds the directory itself does within a
    second or two; where nobody holds it, the next one that opens it does.
    """
    if action not in ACTIONS:
        raise InvalidRequest(f"record: {action!r} given; one of {', '.join(ACTIONS)}")
    from kvstore.recording import Wish, default_name

    wish = Wish(name or default_name(), bytes_of(max_bytes, "--max-bytes"))
    directory = store.held_without_server()
    if directory is None:
        with store.opened() as opened:
            found = _ask(opened, action, wish)
    else:
        found = _leave(directory, action, wish)
    if json:
        output.print_json(found.to_dict())
        return
    _show(found)


def _ask(opened: OperatorLike, action: str, wish: Wish) -> Recording:
    if action == "start":
        return opened.start_recording(wish.name, wish.bytes_max)
    return opened.stop_recording() if action == "stop" else opened.recording()


def _leave(directory: Path, action: str, wish: Wish) -> Recording:
    from kvstore.recorder import Recording
    from kvstore.recording import FOLDER, leave_note, noted_status, take_note_back

    if action == "start":
        leave_note(directory, wish)
        note = "a note is left for whoever holds the directory"
        return Recording(
            file=str(directory / FOLDER / wish.name), bytes_max=wish.bytes_max, note=note
        )
    if action == "stop":
        take_note_back(directory)
    return noted_status(directory)


def _show(found: Recording) -> None:
    out = output.console()
    if not found.file:
        out.print(f"Nothing is recorded. {found.note}".strip())
        return
    state = "recording" if found.is_recording else "not recording"
    out.print(
        f"{found.file}: {state}, {found.requests} look-ups in {format_bytes(found.file_bytes)} of "
        f"at most {format_bytes(found.bytes_max)}, {found.dropped} left out"
        + (f": {found.note}" if found.note else "")
    )
