"""Writes a store's look-ups to a trace file that `kvstore simulate` reads, without any of their
content.

A page is named by a keyed hash of its key, and the key of that hash is made anew for each file and
kept nowhere: no prompt, tenant or salt can be found from a file, or matched with another file. What
remains is who shares what, when, and how long prompts are. Invariant: a look-up never waits for
the file; what a thread has not written by then is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvstore.errors import DirectoryError
from kvstore.prefix_index.page_key import PAGE_KEY_BYTES, page_keys

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.request import Extras

QUEUE_LOOKUPS_MAX = 1024
FILE_BYTES_MAX = 4 << 30
_ID_BYTES = 8
_log = logging.getLogger("kvstore.store")


class Recorder:
    """A trace file being written, and its thread."""

    def __init__(self, file: Path) -> None:
        """Raises DirectoryError when the file can't be made; one that exists is not overwritten."""
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise DirectoryError(
                f"record_file: {file}: {exc.strerror}; name a file that does not exist yet"
            ) from exc
        self._file = open(handle, "w", encoding="ascii")  # noqa: SIM115 - closed by its thread
        self._secret = secrets.token_bytes(32)
        self._queue: queue.Queue[tuple[float, bytes, bytes, int, Extras] | None] = queue.Queue(
            QUEUE_LOOKUPS_MAX
        )
        self.dropped = 0
        self._written = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-recorder", daemon=True)
        self._thread.start()

    def add(self, now: float, root: bytes, tokens: bytes, page_tokens: int, extras: Extras) -> None:
        """A look-up took place. `tokens` are int32, little-endian."""
        try:
            self._queue.put_nowait((now, root, tokens, page_tokens, extras))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        first = size = None
        with self._file:
            while (item := self._queue.get()) is not None:
                now, root, tokens, page_tokens, extras = item
                first = now if first is None else first
                size = page_tokens if size is None else size
                if page_tokens != size:  # a trace has blocks of one size
                    self.dropped += 1
                    continue
                line = self._line(1000 * (now - first), root, tokens, page_tokens, extras)
                if self._written + len(line) > FILE_BYTES_MAX:
                    self.dropped += 1
                    continue
                try:
                    self._file.write(line)
                    if self._queue.empty():
                        self._file.flush()
                    self._written += len(line)
                except OSError as exc:
                    if not self.dropped:
                        _log.warning("record_file: %s; look-ups are not recorded", exc.strerror)
                    self.dropped += 1

    def _line(
        self, time_ms: float, root: bytes, tokens: bytes, page_tokens: int, extras: Extras
    ) -> str:
        whole = len(tokens) // (4 * page_tokens) * 4 * page_tokens
        keys = page_keys(root, tokens[:whole], page_tokens, extras)
        names = [
            blake2b(
                keys[at : at + PAGE_KEY_BYTES], digest_size=_ID_BYTES, key=self._secret
            ).hexdigest()
            for at in range(0, len(keys), PAGE_KEY_BYTES)
        ]
        record = {
            "timestamp": round(time_ms, 3),
            "input_length": len(tokens) // 4,
            "output_length": 0,
            "hash_ids": names,
            "block_tokens": page_tokens,
        }
        return json.dumps(record) + "\n"
