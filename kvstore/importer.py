"""Read an export into an open store: keys are derived anew, under this store's own roots.

Pages go in as any writer's do: reserved, filled, checked, committed in order, so that what is there
already stays, and a tier that is full takes fewer. A damaged file is refused where the damage is;
what came before it is stored and sound.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.export_file import FORMAT, frames
from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.spec import CacheSpec, canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.export_file import Frame
    from kvstore.operator_tools import OperatorTools
    from kvstore.reservation import Reservation
    from kvstore.session import Session

ROOM_S = 10.0  # how long to wait for room for a page
FLUSH_S = 30.0
PROGRESS_S = 0.2


@dataclass(frozen=True, slots=True)
class Imported:
    """How far it is; the last one has `finished`."""

    trees: int = 0
    pages: int = 0  # in the file so far
    payload_bytes: int = 0
    stored: int = 0
    present: int = 0  # were there already
    left_out: int = 0  # for want of room, or since a page before them is not there
    on_disk: bool = False
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Importer:
    """One import. `tenant`: whose all pages become, instead of the tenants in the file."""

    def __init__(self, store: OperatorTools, tenant: str | None, *, room_s: float = ROOM_S) -> None:
        self._store = store
        self._tenant = tenant
        self._room_s = room_s
        self._now = Imported()
        self._tree: tuple[CacheSpec, str] | None = None
        self._session: Session | None = None
        self._writer = ""

    def run(self, read: Callable[[int], bytes]) -> Iterator[Imported]:
        """Progress now and then. Raises InvalidRequest where the file is not as it should be."""
        said_s = time.monotonic()
        run: _Run | None = None
        try:
            for number, frame in enumerate(frames(read)):
                _expect_place(frame, number, run)
                if frame.kind == b"FILE":
                    _check_format(frame)
                elif frame.kind == b"TREE":
                    self._begin_tree(frame)
                elif frame.kind == b"RUN ":
                    run = self._begin_run(frame)
                elif frame.kind == b"PAGE":
                    assert run is not None
                    self._page(run, frame)
                if time.monotonic() - said_s > PROGRESS_S:
                    said_s = time.monotonic()
                    yield self._now
        finally:
            if run is not None:
                run.give_up()
            self._end_session()
        on_disk = self._now.stored > 0 and self._store.flush(FLUSH_S)
        yield replace(self._now, on_disk=on_disk, finished=True)

    def _begin_tree(self, frame: Frame) -> None:
        try:
            spec = CacheSpec.from_json(canonical_json(frame.head["spec"]))
            tenant = str(self._tenant or frame.head["tenant"])
        except (KeyError, KVStoreError) as exc:
            raise InvalidRequest(f"byte {frame.position}: {exc!r:.200}") from exc
        self._end_session()
        self._tree = spec, tenant
        self._now = replace(self._now, trees=self._now.trees + 1)

    def _begin_run(self, frame: Frame) -> _Run:
        if self._tree is None:
            raise InvalidRequest(f"byte {frame.position}: pages of no tree")
        spec, tenant = self._tree
        run = _Run.of(frame, spec)
        if self._session is None or self._writer != run.writer:
            self._end_session()
            self._writer = run.writer
            self._session = self._store.session(spec, tenant=tenant, writer=run.writer)
        run.session, run.room_s = self._session, self._room_s
        return run

    def _page(self, run: _Run, frame: Frame) -> None:
        assert self._tree is not None
        if len(frame.body) != self._tree[0].page_bytes:
            raise InvalidRequest(
                f"byte {frame.position}: a page of {len(frame.body)} bytes, "
                f"{self._tree[0].page_bytes} are in the spec"
            )
        stored, present, left_out = run.add(frame.body)
        now = self._now
        self._now = replace(
            now,
            pages=now.pages + 1,
            payload_bytes=now.payload_bytes + len(frame.body),
            stored=now.stored + stored,
            present=now.present + present,
            left_out=now.left_out + left_out,
        )

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


@dataclass(slots=True)
class _Run:
    """Pages [start, end) of a chain, one at a time; `at` is the next."""

    tokens: bytes
    extras: dict[int, bytes]
    start: int
    end: int
    page_bytes: int  # of tokens
    writer: str
    at: int = 0
    session: Session | None = None
    room_s: float = ROOM_S
    _open: Reservation | None = None
    _filled: int = 0
    _views: list[memoryview] | None = None
    _is_over: bool = False  # what is left of it has no place

    @classmethod
    def of(cls, frame: Frame, spec: CacheSpec) -> _Run:
        head, page_bytes = frame.head, TOKEN_BYTES * spec.page_tokens
        try:
            start, count = int(head["start"]), int(head["pages"])
            extras = {int(page): bytes.fromhex(text) for page, text in head["extras"].items()}
            writer = str(head["writer"])
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise InvalidRequest(f"byte {frame.position}: {exc!r:.200}") from exc
        if start < 0 or count < 1 or len(frame.body) != (start + count) * page_bytes:
            raise InvalidRequest(
                f"byte {frame.position}: {len(frame.body)} bytes of tokens for pages "
                f"{start} to {start + count - 1}"
            )
        return cls(bytes(frame.body), extras, start, start + count, page_bytes, writer, at=start)

    def add(self, payload: memoryview) -> tuple[int, int, int]:
        """Take the next page: how many are stored now, were present, are left out."""
        page, self.at = self.at, self.at + 1
        if self._open is None and not self._is_over:
            self._reserve()
        run = self._open
        if run is None:
            return (0, 0, 1) if self._is_over else (0, 1, 0)
        if page < run.start:
            return 0, 1, 0
        if self._views is None:
            self._views = run.views()
        self._views[page - run.start][:] = payload
        self._filled += 1
        if self._filled < run.count:
            return 0, 0, 0
        stored = run.commit().pages
        failed = self._filled - stored
        self._open, self._views, self._filled = None, None, 0
        self._is_over = failed > 0
        return stored, 0, failed

    def give_up(self) -> None:
        """Whatever is not committed."""
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _reserve(self) -> None:
        assert self.session is not None
        page = self.at - 1
        made = self.session.reserve(self.tokens, self.extras, deadline_s=self.room_s)
        if made.count and made.start >= page:
            self._open = made
        elif made.reason != "present":
            made.abort()  # a page before is not there, or there is no room, or somebody writes it
            self._is_over = True


def _expect_place(frame: Frame, number: int, run: _Run | None) -> None:
    """Frames come in the order that export_file.py says."""
    is_open = run is not None and run.at < run.end
    right = (frame.kind == b"FILE") == (number == 0) and (frame.kind == b"PAGE") == is_open
    if not right:
        name = frame.kind.decode().strip()
        raise InvalidRequest(f"byte {frame.position}: {name} does not belong here")


def _check_format(frame: Frame) -> None:
    found = frame.head.get("format")
    if found != FORMAT:
        raise InvalidRequest(
            f"byte {frame.position}: format {found!r:.20}; this version reads {FORMAT}"
        )
