"""Writes a store's look-ups to a trace file that `kvstore simulate` reads, without any of their
content.

A page is named by a keyed hash of its key, and the key of that hash is made anew for each file and
kept nowhere: no prompt, tenant or salt can be found from a file, or matched with another file. What
remains is who shares what, when, and how long prompts are. The lines are Mooncake's, in JSON, whole
numbers as ids; a name in .gz is written in whole members, so that it can be read after a kill too.
Invariant: a look-up never waits for the file; what a thread has not written by then, or has no room
for, is dropped and counted.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import queue
import secrets
import threading
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvstore.errors import DirectoryError
from kvstore.prefix_index.page_key import PAGE_KEY_BYTES, page_keys

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.request import Extras

QUEUE_LOOKUPS_MAX = 1024
FILE_BYTES_MAX = 4 << 30
PIECE_BYTES = 256 << 10  # of text that is written at once
IDLE_S = 0.5  # without a look-up, after which what there is is written
_ID_BITS = 63
_log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class Recording:
    """How far a recording is."""

    file: str = ""
    is_recording: bool = False
    requests: int = 0
    file_bytes: int = 0
    bytes_max: int = 0
    dropped: int = 0
    note: str = ""  # why look-ups were dropped, if some were

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """A trace file being written, and its thread."""

    def __init__(self, file: Path, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Raises DirectoryError when the file can't be made; one that exists is not overwritten."""
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise DirectoryError(
                f"record_file: {file}: {exc.strerror}; name a file that does not exist yet"
            ) from exc
        self._handle = handle  # closed by its thread
        self._path = file
        self._zipped = file.suffix == ".gz"
        self._bytes_max = bytes_max
        self._secret = secrets.token_bytes(32)
        self._queue: queue.Queue[tuple[float, bytes, bytes, int, Extras] | None] = queue.Queue(
            QUEUE_LOOKUPS_MAX
        )
        self._first_s: float | None = None
        self._page_tokens = 0
        self._lines: list[str] = []
        self._waiting_bytes = self._written = self._requests = 0
        self._note = ""
        self._open = True
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-recorder", daemon=True)
        self._thread.start()

    def add(self, now: float, root: bytes, tokens: bytes, page_tokens: int, extras: Extras) -> None:
        """A look-up took place. `tokens` are int32, little-endian."""
        try:
            self._queue.put_nowait((now, root, tokens, page_tokens, extras))
        except queue.Full:
            self._drop("look-ups came faster than they could be written")

    def status(self) -> Recording:
        """How far it is; requests that wait to be written are not counted yet."""
        return Recording(
            file=str(self._path),
            is_recording=self._open,
            requests=self._requests,
            file_bytes=self._written,
            bytes_max=self._bytes_max,
            dropped=self.dropped,
            note=self._note,
        )

    def close(self) -> None:
        """Write what waits, and end."""
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=IDLE_S)
                break
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    item = self._queue.get(timeout=IDLE_S)
                except queue.Empty:
                    self._write()
                    continue
                if item is None:
                    return
                self._take(*item)
        finally:
            self._write()
            self._open = False
            os.close(self._handle)

    def _take(
        self, now: float, root: bytes, tokens: bytes, page_tokens: int, extras: Extras
    ) -> None:
        if self._first_s is None:
            self._first_s, self._page_tokens = now, page_tokens
        if page_tokens != self._page_tokens:
            self._drop("a trace has pages of one size, and others were looked up too")
            return
        line = self._line(1000 * (now - self._first_s), root, tokens, page_tokens, extras)
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= PIECE_BYTES:
            self._write()

    def _write(self) -> None:
        lines, self._lines, self._waiting_bytes = self._lines, [], 0
        if not lines:
            return
        piece = "".join(lines).encode("ascii")
        if self._zipped:
            piece = gzip.compress(piece, mtime=0)
        if self._written + len(piece) > self._bytes_max:
            self._drop("the file has all the bytes that it may have", len(lines))
            return
        try:
            os.truncate(self._handle, self._written)  # of a piece that failed halfway
            if os.pwrite(self._handle, piece, self._written) < len(piece):
                raise OSError(28, "the disk is full")
        except OSError as exc:
            self._drop(f"{exc.strerror}", len(lines))
            return
        self._written += len(piece)
        self._requests += len(lines)

    def _drop(self, why: str, count: int = 1) -> None:
        if not self.dropped:
            _log.warning("recording look-ups to %s: some are left out: %s", self._path, why)
        self.dropped += count
        self._note = why

    def _line(
        self, time_ms: float, root: bytes, tokens: bytes, page_tokens: int, extras: Extras
    ) -> str:
        whole = len(tokens) // (4 * page_tokens) * 4 * page_tokens
        keys = page_keys(root, tokens[:whole], page_tokens, extras)
        names = [
            self._name(keys[at : at + PAGE_KEY_BYTES]) for at in range(0, len(keys), PAGE_KEY_BYTES)
        ]
        record = {
            "timestamp": round(time_ms, 3),
            "input_length": len(tokens) // 4,
            "output_length": 0,
            "hash_ids": names,
            "block_tokens": page_tokens,
        }
        return json.dumps(record) + "\n"

    def _name(self, key: bytes) -> int:
        digest = blake2b(key, digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)
