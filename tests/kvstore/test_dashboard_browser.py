"""The dashboard in a real Chromium: it draws, in the light and the dark, on a desk and on a phone.

Needs playwright and a Chromium of this machine (`apt install chromium`); TEST_CHROMIUM names it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from command import run
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore.connect import connect
from kvstore.identity import Role
from kvstore.tenants import Quota, TenantBook, edit_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is not tried in a browser: pip install playwright"
)
CHROMIUM = os.environ.get("TEST_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="the page is not tried in a browser: there is no Chromium (TEST_CHROMIUM names one)",
    ),
]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as player:
        made = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with pages of two models, one of them with a hostile name."""
    folder = tmp_path_factory.mktemp("browser")
    flags = ("--host-bytes=16MiB", "--disk-bytes=64MiB", "--dashboard-listen=127.0.0.1:0")
    with ServerProcess(folder / "kv", *flags) as server:
        server.start()
        with connect(server.address, open_wait_s=10.0, lookup_deadline_s=5.0) as store:
            for spec in (SPEC, replace(SPEC, model=HOSTILE)):
                session = store.session(spec)
                for seed in range(12):
                    save(session, np.concatenate((prompt(0, 4), prompt(seed + 1, 1 + seed % 4))))
                for _ in range(6):
                    load(session, np.concatenate((prompt(0, 4), prompt(3, 3))))
        yield run("dashboard", str(server.directory)).strip()


class Tab:
    """A page, and all that it complained about or asked for."""

    def __init__(self, chromium: Any, address: str, size: str, scheme: str = "light") -> None:
        width, height = SIZES[size]
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def drawn(self) -> Any:
        """The page, once its last part is there."""
        self.page.locator("#tree-chart [data-box]").first.wait_for(timeout=WAIT_MS)
        self.page.locator("#hits-chart polygon").first.wait_for(timeout=WAIT_MS)
        self.page.locator("#cold td").first.wait_for(timeout=WAIT_MS)
        return self.page

    def close(self) -> None:
        self.page.context.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")])
def tab(request: pytest.FixtureRequest, chromium: Any, address: str) -> Iterator[Tab]:
    made = Tab(chromium, address, *request.param)
    yield made
    made.close()


def luminance(color: str) -> float:
    """Relative luminance of an rgb() that the browser computed."""
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Any, selector: str, behind: str, prop: str = "color") -> float:
    """Of the text of one element on the background of another, as WCAG counts it."""
    style = "([one, prop]) => getComputedStyle(document.querySelector(one))[prop]"
    front = luminance(page.evaluate(style, [selector, prop]))
    back = luminance(page.evaluate(style, [behind, "backgroundColor"]))
    return (max(front, back) + 0.05) / (min(front, back) + 0.05)


def test_the_page_draws_fits_and_asks_nobody_else(tab: Tab, address: str) -> None:
    page = tab.drawn()
    assert tab.complaints == []
    origin = address.partition("#")[0]
    assert all(url.startswith(origin) for url in tab.asked), tab.asked
    assert "#" not in page.url
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for chart in ("hits-chart", "room-chart", "tree-chart"):
        box = page.locator(f"#{chart} svg").bounding_box()
        assert box["width"] > 250, chart
        assert box["height"] > 50, chart
    widths = page.evaluate(
        """[...document.querySelectorAll("#tree-chart [data-box]")].filter(
             box => box.querySelector("text")).map(box => [
             box.querySelector("text").getBBox().width + 6,
             box.querySelector("rect").getBBox().width])"""
    )
    assert widths
    assert all(text <= box for text, box in widths), widths
    assert page.locator("#tiles .number").first.inner_text() != "- %"
    assert page.locator("#room .bar span").count() == 2
    assert page.locator("#tenants td").first.inner_text() == "default"
    assert page.locator("#tree-chart [data-box]").count() >= 20
    assert page.locator(".notice:visible").count() == 0


def test_text_stands_out_from_what_is_behind_it(tab: Tab) -> None:
    page = tab.drawn()
    for front, behind in (
        *(("h1", "body"), (".tile .number", ".tile"), (".tile .note", ".tile")),
        *(("footer", "body"), ("#cold td", ".card"), ("#cold th", ".card"), (".pill", ".pill")),
        *(("#why button", "#why button"), ("#why-prompt", "#why-prompt"), ("#cold code", "code")),
    ):
        assert contrast(page, front, behind) >= 4.5, front
    assert contrast(page, "#hits-chart text", ".card", "fill") >= 4.5
    labels = page.evaluate(
        """[...document.querySelectorAll("#tree-chart [data-box]")].filter(
             box => box.querySelector("text")).map(box => [
             getComputedStyle(box.querySelector("text")).fill,
             getComputedStyle(box.querySelector("rect")).fill])"""
    )
    assert labels
    for front, back in labels:
        pair = sorted((luminance(front), luminance(back)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (front, back)


def test_light_and_dark_differ(chromium: Any, address: str) -> None:
    backs = []
    for scheme in ("light", "dark"):
        tab = Tab(chromium, address, "desk", scheme)
        backs.append(
            luminance(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        )
        tab.close()
    assert backs[0] > 0.8
    assert backs[1] < 0.02


@pytest.fixture
def desk(chromium: Any, address: str) -> Iterator[Tab]:
    made = Tab(chromium, address, "desk")
    yield made
    made.close()


def test_hostile_names_are_text(desk: Tab) -> None:
    """Names of models, and of tenants if they could be so: whatever the server says is shown."""

    def hostile(route: Any) -> None:
        document = route.fetch().json()
        for each in document["tenants"]:
            each["tenant"] = HOSTILE
        document["version"] = HOSTILE
        document["reasons"][0] |= {"left": 3, "words": HOSTILE}
        document["troubles"] = {HOSTILE: 1}
        route.fulfill(body=json.dumps(document), content_type="application/json")

    desk.page.route("**/api/state", hostile)
    desk.page.reload()
    page = desk.drawn()
    assert page.locator("#tenants td").first.inner_text() == HOSTILE
    assert HOSTILE in page.locator("#about").inner_text()
    assert HOSTILE in page.locator("#left").inner_text()
    assert HOSTILE in page.locator("#notice").inner_text()
    labels = page.locator('#tree-chart [data-box][aria-level="1"]').evaluate_all(
        "boxes => boxes.map(box => box.getAttribute('aria-label'))"
    )
    assert any(HOSTILE in label for label in labels)
    assert page.locator("main img, main script, header script").count() == 0
    assert page.title() == "kvstore"
    assert desk.complaints == []


def test_a_prompt_is_explained(desk: Tab) -> None:
    page = desk.drawn()
    tokens = np.concatenate((prompt(0, 4), prompt(3, 3)))
    tokens[-1] += 1
    options = page.locator("#why-where option").all_inner_texts()
    page.locator("#why-where").select_option(
        index=next(at for at, text in enumerate(options) if "unit" in text)
    )
    page.get_by_label("Prompt", exact=True).fill(str(tokens.tolist()))
    page.get_by_role("button", name="Explain").click()
    page.locator(".verdict").wait_for(timeout=WAIT_MS)
    assert "hit on 6 of 7 pages" in page.locator(".verdict").inner_text()
    assert (
        f"Token {len(tokens) - 1} is {tokens[-1]}"
        in page.locator("#why-answer li").last.inner_text()
    )
    page.get_by_label("Prompt", exact=True).fill("not a number")
    page.get_by_role("button", name="Explain").click()
    page.locator("#why-answer .notice").wait_for(timeout=WAIT_MS)
    said = page.locator("#why-answer .notice").inner_text()
    assert "not a token id" in said
    assert "text needs a server with --dashboard-tokenizer" in said
    assert page.get_by_label("Prompt as").is_hidden()


def test_a_prompt_is_explained_as_text_where_the_server_has_a_tokenizer(
    chromium: Any, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers", reason="texts are made tokens by it")
    tokenizer, file = byte_tokenizer(), tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    flags = ("--host-bytes=16MiB", "--disk-bytes=64MiB", "--dashboard-listen=127.0.0.1:0")
    with ServerProcess(tmp_path / "kv", *flags, f"--dashboard-tokenizer={file}") as server:
        server.start()
        with connect(server.address, open_wait_s=10.0, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            save(session, np.array(tokenizer.encode("A bicycle shop: tyres!!!").ids, np.int32))
        tab = Tab(chromium, run("dashboard", str(server.directory)).strip(), "phone")
        page = tab.page
        page.locator("#tree-chart [data-box]").first.wait_for(timeout=WAIT_MS)
        page.get_by_label("Prompt as").select_option("text")
        page.get_by_label("Prompt", exact=True).fill("A bicycle shop: chains!!")
        page.get_by_role("button", name="Explain").click()
        page.locator(".verdict").wait_for(timeout=WAIT_MS)
        assert "hit on 4 of 6 pages" in page.locator(".verdict").inner_text()
        stored, given = (tokenizer.encode(letter).ids[0] for letter in "tc")
        assert page.locator("#why-answer li").last.inner_text() == (
            f"Token 16 is {given} (c); the closest stored chain has {stored} (t) there."
        )
        page.get_by_label("Prompt as").select_option("tokens")
        page.get_by_role("button", name="Explain").click()
        page.locator("#why-answer .notice").wait_for(timeout=WAIT_MS)
        assert "not a token id" in page.locator("#why-answer .notice").inner_text()
        assert not [said for said in tab.complaints if "400" not in said]
        tab.close()


def test_everything_can_be_reached_and_read_without_a_pointer(desk: Tab) -> None:
    page = desk.drawn()
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "[document.activeElement.tagName, document.activeElement.textContent]"
        )
        if found[0] == "BODY":
            break
        seen.append(found)
    tags = [tag for tag, _ in seen]
    assert seen[0][1] == "Skip to the content"
    assert tags.index("INPUT") < tags.index("svg") < tags.index("g") < tags.index("TEXTAREA")
    assert tags.count("SUMMARY") == 4
    assert tags.count("g") == 1  # the tree is one stop; arrows move in it
    assert tags[-1] == "BUTTON"
    for svg in page.locator("main svg").all():
        assert svg.get_attribute("aria-label") or svg.get_attribute("aria-hidden") == "true"
    for field in page.locator("main select:visible, main textarea:visible").all():
        assert field.evaluate("field => field.labels.length") == 1
    assert page.locator("h1").count() == 1
    for name in ("hits", "room", "left", "tree"):
        summary = page.locator(f"details:has(#{name}-table) summary")
        summary.press("Enter")
        page.locator(f"#{name}-table td").first.wait_for(timeout=WAIT_MS)
        assert page.locator(f"#{name}-table caption").count() == 1


def test_the_tree_is_walked_and_opened_with_keys(desk: Tab) -> None:
    page = desk.drawn()
    count = page.locator("#tree-chart [data-box]").count()
    page.locator('#tree-chart [tabindex="0"]').focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    assert "pages" in page.locator("#tree-facts").inner_text()
    assert "kvstore inspect DIR" in page.locator("#tree-facts").inner_text()
    page.keyboard.press("Enter")
    inside = page.locator("#tree-chart [data-box]").count()
    assert 0 < inside < count
    assert page.locator("#tree-out").is_visible()
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "1"
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator("#tree-chart [data-box]").count() == count
    assert page.locator("#tree-out").is_hidden()


def test_the_chart_is_read_with_arrow_keys(desk: Tab) -> None:
    page = desk.drawn()
    page.locator("#hits-chart svg").focus()
    page.keyboard.press("ArrowLeft")
    assert "look-up" in page.locator("#tip").inner_text()
    assert "look-up" in page.locator("#hits-chart svg").get_attribute("aria-label")


def test_without_the_key_it_asks_for_one_and_takes_it(chromium: Any, address: str) -> None:
    bare, _, fragment = address.partition("#")
    tab = Tab(chromium, bare, "phone")
    page = tab.page
    page.locator("#login").wait_for(timeout=WAIT_MS)
    assert page.locator("#board").is_hidden()
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type(fragment.removeprefix("key="))
    page.keyboard.press("Enter")
    tab.drawn()
    assert page.locator("#login").is_hidden()
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("localStorage.length") == 0
    tab.close()


def test_the_role_metrics_sees_its_own_numbers_on_the_same_page(
    chromium: Any, tmp_path: Path
) -> None:
    tokens: dict[Role, str] = {}

    def edit(book: TenantBook) -> TenantBook:
        book = book.with_tenant("acme", Quota()).with_tenant("globex", Quota())
        for role in (Role.WRITER, Role.METRICS):
            book, tokens[role] = book.with_token("acme", role, 0.0, None)
        return book

    edit_tenants(tmp_path / "tenants.json", edit, create=True)
    flags = ("--host-bytes=16MiB", "--disk-bytes=64MiB", "--dashboard-listen=127.0.0.1:0")
    with ServerProcess(
        tmp_path / "kv", *flags, f"--tenants-file={tmp_path}/tenants.json"
    ) as server:
        server.start()
        (tmp_path / "token").touch(mode=0o600)
        (tmp_path / "token").write_text(tokens[Role.WRITER])
        with connect(
            server.address, token_file=tmp_path / "token", open_wait_s=10.0, lookup_deadline_s=5.0
        ) as store:
            session = store.session(SPEC)
            save(session, prompt(0, 4))
            tab = Tab(chromium, f"{place_of(server)}#key={tokens[Role.METRICS]}", "phone")
            tab.page.locator("#tenants td").first.wait_for(timeout=WAIT_MS)
            assert load(session, prompt(0, 4)) == 4
            tab.page.locator("#hits-chart polygon").first.wait_for(timeout=WAIT_MS)
    assert tab.page.locator("#tenants tbody tr").count() == 1
    assert tab.page.locator(".admin:visible").count() == 0
    assert tab.page.locator("#tiles .number").first.inner_text() == "100 %"
    assert {url.partition("/api/")[2] for url in tab.asked if "/api/" in url} == {"state"}
    tab.close()


def place_of(server: ServerProcess) -> str:
    return run("dashboard", str(server.directory)).strip()
