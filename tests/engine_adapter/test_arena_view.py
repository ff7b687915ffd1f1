"""The arena as a worker maps it: what a device may read in place, and when that ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")

from server_process import ServerProcess  # noqa: E402 - after the importorskip
from worker_engines import Engine, make_engine, tokens_of  # noqa: E402

from kvstore.engine_adapter import arena_view  # noqa: E402
from kvstore.engine_adapter.arena_view import ArenaPage, ArenaView  # noqa: E402
from kvstore.engine_adapter.pinned_arena import DeviceFacts, PinnedArena  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow
READS_ONLY = DeviceFacts("cuda", host_register=True, read_only_host_register=True)


class Registrar:
    """Answers as CUDA does, and keeps book."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.ever: list[int] = []

    def register(self, address: int, size: int, flags: int) -> int:
        if address in self.held:
            return 712
        self.held.add(address)
        self.ever.append(address)
        return 0

    def unregister(self, address: int) -> int:
        if address not in self.held:
            return 713
        self.held.remove(address)
        return 0


class Pinned:
    """A view whose extents are registered as soon as it asks for it."""

    def __init__(self) -> None:
        self.registrar = Registrar()
        pins = PinnedArena(torch.device("cuda"), facts=READS_ONLY, registrar=self.registrar)
        self.view = ArenaView()
        self.view.use_pins(pins, self.view.settle_pins)

    def close(self) -> None:
        self.view.close()


@pytest.fixture
def pinned() -> Iterator[Pinned]:
    made = Pinned()
    yield made
    made.close()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Engine]:
    with ServerProcess(tmp_path / "store") as server:
        made = make_engine(server.start().address).attach()
        yield made
        made.close()


def stored_page(mine: Engine, pinned: Pinned) -> ArenaPage:
    tokens = tokens_of(1)
    mine.save(tokens, [1, 2])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 1
        [slot], [generation] = hit.places(0, 1)
        return pinned.view.page(mine.session.epoch, int(slot), int(generation), 64)


def test_extents_are_registered_when_they_are_mapped_and_no_longer_than_the_view(
    mine: Engine, pinned: Pinned
) -> None:
    assert pinned.view.attach(mine.grant(), 0)
    page = stored_page(mine, pinned)  # of an extent that is new, as it may be
    page = stored_page(mine, pinned)
    assert page.in_place
    assert not page.moved
    assert pinned.registrar.held
    pinned.view.close()
    assert not pinned.registrar.held
    assert bytes(page.memory), "what a copy holds stays mapped"


def test_nothing_is_let_go_of_while_it_may_be_read(
    mine: Engine, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_view, "ATTACHED_MAX", 1)
    assert pinned.view.attach(mine.grant(), 0)
    assert stored_page(mine, pinned) is not None
    before = set(pinned.registrar.held)
    assert before
    epoch = mine.session.epoch
    with pinned.view.reading():
        pinned.view._attached[epoch + 1] = pinned.view._attached.pop(epoch)  # another session's
        assert pinned.view.attach(mine.grant(), 0)
        assert before <= pinned.registrar.held
        done = threading.Event()
        threading.Thread(target=lambda: (pinned.view.settle_pins(), done.set())).start()
        assert done.wait(10), "it does not wait for readers, either"
        assert before <= pinned.registrar.held
    assert not before & pinned.registrar.held, "let go of by the last reader"
    assert stored_page(mine, pinned).in_place
    pinned.view.close()
    assert not pinned.registrar.held


def test_without_a_device_nothing_is_in_place(mine: Engine) -> None:
    view = ArenaView()
    assert view.attach(mine.grant(), 0)
    view.settle_pins()
    tokens = tokens_of(1)
    mine.save(tokens, [1, 2])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 1
        [slot], [generation] = hit.places(0, 1)
        assert not view.page(mine.session.epoch, int(slot), int(generation), 64).in_place
    view.close()
