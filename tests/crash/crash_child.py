"""The process that is killed: audit, damage, open, verify everything, then work until the end.

Forked from the parent with the ledger as it stood after the last kill. It reports one JSON object a
line through a pipe, at once, so that nothing found is lost with it:

    {"event": "audited", "records": n}                      so many slots were compared
    {"event": "opening"}                                    the store is about to be opened
    {"event": "ready", "hits": n, "verified": n}            every chain was looked up and compared
    {"event": "frozen"}                                     at the step where it is to end
    {"event": "bad", "kind": "wrong" | "lost" | "unsound" | "revived" | "error", "text": ...}
    {"event": "end", "verified": n, "faults": n}            closed in peace
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from audit import CATALOG, Audit, cut_catalog
from crash_world import PAGE_TOKENS, SPEC, STORE_SETTINGS, TENANTS, KeyMap
from ledger import LedgerWriter
from mutants import plant

from kvstore import Store
from kvstore.errors import DirectoryError
from kvstore.removal import Selection
from kvstore.state import StoreState

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from crash_files import CrashFiles
    from crash_world import Chain
    from ledger import Ledger

    from kvstore.session import Session

STAGE_S = 60.0  # a loaded machine must not look like a loss
COMMIT_S = 20.0
LINES_MAX = 20  # findings of one kind that a child reports in full


@dataclass(frozen=True, slots=True)
class Plan:
    """What one child is to do, besides being killed."""

    seed: str
    directory: Path
    disk_bytes: int
    ledger_path: Path
    log_path: Path
    work_s: float  # then it closes the store in peace
    flips: int = 0
    cut_catalog: bool = False  # damage the catalog itself before opening
    mutant: str = ""
    encrypt: bool = False
    freeze: bool = False  # at its step the child waits for its end, and says so


@dataclass(frozen=True, slots=True)
class Prefix:
    """Whole pages at the start of a chain."""

    tokens: np.ndarray
    last_key: str


class Child:
    """One life of the store."""

    def __init__(self, plan: Plan, files: CrashFiles, ledger: Ledger, chains: list[Chain]) -> None:
        self._plan = plan
        self._files = files
        self._ledger = ledger
        self._chains = chains
        self._writer = LedgerWriter(plan.ledger_path)
        self._rng = random.Random(plan.seed)
        self._verified = 0
        self._reported: Counter[str] = Counter()
        self._report_to = -1

    def run(self, report_to: int) -> None:
        """All of it. Anything unexpected is a finding."""
        self._report_to = report_to
        if self._plan.freeze:
            self._files.end = self._freeze
        logging.basicConfig(filename=self._plan.log_path, level=logging.WARNING)
        try:
            self._live()
        except Exception:
            self._bad("error", traceback.format_exc())

    def _live(self) -> None:
        plan = self._plan
        self._look_and_damage()
        if plan.mutant:
            plant(plan.mutant, self._files)
        self._tell_damage()
        self._say({"event": "opening"})
        store = Store.open(
            plan.directory,
            files=self._files,
            disk_bytes=plan.disk_bytes,
            encrypt=plan.encrypt,
            **STORE_SETTINGS,
        )
        store.state.on_left_disk = self._left_disk
        keys = KeyMap.of_store(plan.directory, self._chains)
        store.check()
        sessions = {tenant: store.session(SPEC, tenant=tenant) for tenant in TENANTS}
        if self._rebuilt():  # copies of evicted pages in slots freed long ago may be back
            self._note("S", set(self._ledger.gone))
        hits = self._verify(sessions, keys)
        self._note("Q", {"none", *self._quarantines()})  # all that it brought back was read
        store.check()
        self._say({"event": "ready", "hits": hits, "verified": self._verified})
        self._files.arm()
        end = time.monotonic() + plan.work_s
        threads = [
            threading.Thread(target=self._work, args=(store, sessions[tenant], keys, tenant, end))
            for tenant in TENANTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.check()
        store.close(60.0)
        self._say({"event": "end", "verified": self._verified})

    # -- before the store opens -------------------------------------------------------------------

    def _look_and_damage(self) -> None:
        """Audit the files, flip bits, cut the catalog."""
        plan = self._plan
        if not (plan.directory / "secret").exists():
            return
        audit = Audit.of_store(plan.directory)
        self._say({"event": "audited", "records": len(audit.records)})
        # A rebuild believes headers; bytes that a kill left unfinished below one are found on read.
        only = self._ledger.required if self._rebuilt() else None
        for line in audit.unsound(self._ledger.flipped, self._ledger.required, only):
            self._bad("unsound", line)
        keys = KeyMap.of_store(plan.directory, self._chains)
        for _ in range(plan.flips):
            for record in audit.flip(self._rng):
                below = keys.subtree(record.key)
                self._note("X", {record.place})
                self._note("F", {record.key} | below)
        if plan.cut_catalog:
            cut_catalog(plan.directory, self._rng)
        if not (plan.directory / CATALOG).exists():  # a rebuild was cut off
            self._note("Q", {"unfinished"})

    def _note(self, code: str, items: set[str]) -> None:
        self._writer.note(code, items)
        self._ledger.take(code, items)

    def _left_disk(self, keys: list[bytes]) -> None:
        self._writer.note("E", [key.hex() for key in keys])
        self._files.step("left-disk")

    def _tell_damage(self) -> None:
        """Write down what the store drops as damaged: it must not pass for an eviction."""
        drop = StoreState.drop_subtree
        writer = self._writer

        def drop_subtree(state: StoreState, page: int, *why: Any) -> bool:
            pages = state.index.subtree(page).tolist()
            writer.note("D", [state.index.table.key_of(item).hex() for item in pages])
            return drop(state, page, *why)

        StoreState.drop_subtree = drop_subtree  # type: ignore[method-assign]

    # -- after it opened --------------------------------------------------------------------------

    def _rebuilt(self) -> bool:
        """Whether the catalog was rebuilt from headers since a life last verified all."""
        known = self._ledger.quarantines
        return "unfinished" in known or not self._quarantines() <= known

    def _quarantines(self) -> set[str]:
        return {path.name for path in self._plan.directory.glob("quarantine-*")}

    def _verify(self, sessions: dict[str, Session], keys: KeyMap) -> int:
        """Look every chain up, compare every byte; then hold the hits against the ledger."""
        hits: set[str] = set()
        for chain, names in zip(self._chains, keys.keys, strict=True):
            hits.update(names[: self._load(sessions[chain.tenant], chain)])
        for key in sorted(self._ledger.required - hits):
            self._bad("lost", keys.name(key))
        for key in sorted(self._ledger.gone & hits):
            self._bad("revived", keys.name(key))
        return len(hits)

    def _load(self, session: Session, chain: Chain) -> int:
        """Pages that hit; wrong bytes are findings."""
        with session.match(chain.tokens) as hit:
            pages = hit.stage(STAGE_S)
            for page, view in enumerate(hit.views(0, pages)):
                if bytes(view) != chain.content(page):
                    self._bad("wrong", f"{chain.tenant}/{int(chain.tokens[0])}/page {page}")
            self._verified += pages
            return pages

    def _work(self, store: Store, session: Session, keys: KeyMap, tenant: str, end: float) -> None:
        """What one tenant does, in its own thread."""
        rng = random.Random(f"{self._plan.seed} {tenant}")
        mine = [
            (chain, names)
            for chain, names in zip(self._chains, keys.keys, strict=True)
            if chain.tenant == tenant
        ]
        try:
            while time.monotonic() < end:
                chain, names = rng.choice(mine)
                choice = rng.random()
                if choice < 0.65:
                    self._save(session, chain, names, durable=choice < 0.45)
                elif choice < 0.93:
                    self._load(session, chain)
                else:
                    pages = rng.randint(1, chain.pages)
                    prefix = Prefix(chain.tokens[: pages * PAGE_TOKENS], names[pages - 1])
                    self._evict(store, session, keys, prefix)
        except Exception:
            self._bad("error", traceback.format_exc())

    def _save(self, session: Session, chain: Chain, names: list[str], *, durable: bool) -> None:
        while True:
            with session.reserve(chain.tokens) as run:
                if not run.count:
                    return
                stop = run.start + run.count
                self._writer.note("B" if durable else "S", names[:stop])
                for offset, view in enumerate(run.views()):
                    view[:] = chain.content(run.start + offset)
                done = run.commit(durable=durable, deadline_s=COMMIT_S)
            if done.durable:
                self._files.step("ack-before")
                self._writer.note("A", names[:stop])
                self._files.step("ack-done")
            elif durable:
                return

    def _evict(self, store: Store, session: Session, keys: KeyMap, prefix: Prefix) -> None:
        """An operator's eviction of a prefix; it may fail on a failing disk, and then says so."""
        try:
            done = store.evict(Selection(prefix=prefix.tokens, root=session.root))
        except DirectoryError:
            return
        disk = store.state.disk
        whole = not done.kept_leased and not done.kept_pinned
        if whole and disk is not None and disk.writable:  # a failed disk keeps what it had
            self._writer.note("G", keys.subtree(prefix.last_key))

    def _freeze(self) -> None:
        self._say({"event": "frozen"})
        time.sleep(60)

    # -- reports ----------------------------------------------------------------------------------

    def _bad(self, kind: str, text: str) -> None:
        self._reported[kind] += 1
        shown = text if self._reported[kind] <= LINES_MAX else ""
        self._say({"event": "bad", "kind": kind, "text": shown})

    def _say(self, message: dict[str, Any]) -> None:
        os.write(self._report_to, (json.dumps(message) + "\n").encode())
