"""The pages in a browser: no errors, no requests, every image is visible, on a phone and on a large screen."""

import io
import itertools
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchloom.data.reading_options import Reading
from patchloom.data.sources.corrections import read_corrections
from patchloom.data.sources.source import find_source
from tests.report.pages import KINDS, MadeUp

PHONE, SCREEN = 390, 1280
SMALLEST_IN_CHARTS = 8.5  # pixels of a letter
MOST_HEIGHT = 40_000  # pixels of a page that somebody still scrolls through


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium is installed: the pages are not looked at (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Path]]:
    """Return a function that writes the page of a kind with a number of classes, once."""
    sets: dict[int, MadeUp] = {}

    def write(kind: str, classes: int) -> Path:
        if classes not in sets:
            sets[classes] = MadeUp(tmp_path_factory.mktemp(f"classes{classes}"), classes)
        path = sets[classes].folder / f"{kind}.html"
        return path if path.exists() else sets[classes].page(kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield write


@pytest.fixture(scope="session")
def axe() -> Callable[[Any], list[str]]:
    """Return a function that lists what axe-core finds serious or critical in a page."""
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    source = (Path(package.__file__).parent / "axe.min.js").read_text("utf-8")

    def faults(page: Any) -> list[str]:
        page.evaluate(source)
        violations = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:120]}"
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]

    return faults


# Everything with few classes; with many, what depends on their number.
PAGES = [
    *((kind, 10) for kind in KINDS),
    *((kind, 81) for kind in ("report", "tasks", "comparison", "notebook")),
    *((kind, 1000) for kind in ("report", "check")),
]
each_page = pytest.mark.parametrize(("kind", "classes"), PAGES, ids=lambda value: str(value))


@each_page
def test_a_page_is_whole(kind: str, classes: int, page_of: Callable[[str, int], Path], browser: Any) -> None:
    address = page_of(kind, classes).as_uri()
    page = browser.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url[:80]}"))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address)
    for width, scheme in itertools.product((PHONE, SCREEN), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        # Nothing sticks out: the page itself is never scrolled sideways.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        unseen = page.evaluate(
            """() => [...document.querySelectorAll('img, svg')].filter(e => {
                const box = e.getBoundingClientRect(), small = box.width < 8 || box.height < 8 || e.naturalWidth === 0
                return e.checkVisibility() && !e.closest('details:not([open])') && small
            }).map(e => e.outerHTML.slice(0, 120))"""
        )
        assert unseen == []
        small = page.evaluate(
            """() => [...document.querySelectorAll('p, td, th, dd, h1, h2, figcaption')]
                .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12)
                .map(e => e.textContent.slice(0, 40))"""
        )
        assert small == []
        unstyled = page.evaluate(
            """() => [...document.querySelectorAll('svg :is(rect, circle, path, text)')]
                .filter(e => e.checkVisibility() && getComputedStyle(e).fill === 'rgb(0, 0, 0)')
                .map(e => e.outerHTML.slice(0, 120))"""
        )
        assert unstyled == []
        tiny = page.evaluate(
            """smallest => [...document.querySelectorAll('svg text')].filter(e => {
                const { a, b } = e.getScreenCTM(), drawn = Math.hypot(a, b) * parseFloat(getComputedStyle(e).fontSize)
                return e.checkVisibility() && drawn < smallest
            }).map(e => e.textContent)""",
            SMALLEST_IN_CHARTS,
        )
        assert tiny == []
    assert faults == []
    assert [url for url in requested if not url.startswith(("data:", "blob:", address))] == []
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (SCREEN, "light")])
@each_page
def test_a_page_is_accessible(
    kind: str,
    classes: int,
    width: int,
    scheme: str,
    page_of: Callable[[str, int], Path],
    browser: Any,
    axe: Callable[[Any], list[str]],
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(page_of(kind, classes).as_uri())
    assert axe(page) == []
    assert page.evaluate("document.documentElement.lang") == "en"
    nameless = "[...document.querySelectorAll('svg[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert page.evaluate(nameless) == 0
    page.close()


@pytest.mark.parametrize("width", [PHONE, SCREEN])
@pytest.mark.parametrize("kind", ["report", "tasks", "look", "comparison", "sweep", "audit", "check"])
def test_long_names_of_many_classes_are_not_cut_off(
    kind: str, width: int, page_of: Callable[[str, int], Path], browser: Any
) -> None:
    """Neither the page nor its text is wider than the screen; wide tables of numbers may scroll."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(page_of(kind, 81).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll('h1, h2, h3, p, li, td, th, dd, figcaption, .bars span, img')]
            .filter(e => !e.closest('.matrix, .scroll, figure.wide'))
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
            .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert cut == []
    narrow = page.evaluate(
        """() => [...document.querySelectorAll('.scroll td:first-child')]
            .filter(e => e.getBoundingClientRect().width < 100).map(e => e.textContent)"""
    )
    assert narrow == []  # a name is not broken into single letters
    outside = page.evaluate(
        """() => [...document.querySelectorAll('svg.lines text, svg.scatter text')].filter(e => {
            const chart = e.closest('svg').getBoundingClientRect(), box = e.getBoundingClientRect()
            return box.left < chart.left - 1 || box.right > chart.right + 1
        }).map(e => e.textContent)"""
    )
    assert outside == []
    assert page.evaluate("document.documentElement.scrollHeight") < MOST_HEIGHT
    page.close()


@pytest.mark.parametrize("kind", ["report", "check", "comparison", "audit"])
def test_a_page_can_be_printed(kind: str, page_of: Callable[[str, int], Path], browser: Any) -> None:
    pypdf = pytest.importorskip("pypdf", reason="pypdf is not installed")
    page = browser.new_page(color_scheme="dark")
    page.goto(page_of(kind, 10).as_uri())
    headings = page.locator("h1, h2").all_inner_texts()
    printed = pypdf.PdfReader(io.BytesIO(page.pdf(format="A4")))
    assert 2 <= len(printed.pages) <= 6
    written = unicodedata.normalize("NFKC", "".join(one.extract_text() for one in printed.pages))  # no ligatures
    text = "".join(written.split())  # spaces depend on the kerning
    assert [heading for heading in headings if "".join(heading.split()) not in text] == []
    assert "harborseal" in text  # a class
    assert "Sortby" not in text  # a control
    # What is printed is light, whatever the screen is, and no wider than the paper.
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 34, 48)"
    wide = "[...document.querySelectorAll('table, svg, img')].filter(e => e.getBoundingClientRect().right > 719).length"
    assert page.evaluate(wide) == 0
    page.close()


def test_mistakes_are_sorted_and_filtered_by_keyboard(page_of: Callable[[str, int], Path], browser: Any) -> None:
    page = browser.new_page(viewport={"width": SCREEN, "height": 900})
    page.goto(page_of("report", 10).as_uri())
    mistakes = page.locator("#mistakes figure")

    def values(key: str) -> list[str]:
        read: list[str] = mistakes.evaluate_all(f"all => all.filter(e => !e.hidden).map(e => e.dataset.{key})")
        return read

    assert values("confidence") == sorted(values("confidence"), reverse=True)
    page.get_by_label("Sort by").focus()
    page.keyboard.press("ArrowDown")
    assert values("truth") == sorted(values("truth"))
    assert values("confidence") != sorted(values("confidence"), reverse=True)
    page.keyboard.press("Tab")
    page.keyboard.type("LANTERN png")
    assert 0 < len(values("file")) < mistakes.count()
    assert all(
        "lantern" in f"{truth} {other}" for truth, other in zip(values("truth"), values("predicted"), strict=True)
    )
    assert page.locator("#mistakes output").inner_text().startswith(f"{len(values('file'))} of {mistakes.count()} ")
    page.close()


def test_a_table_is_sorted_and_filtered_by_keyboard(page_of: Callable[[str, int], Path], browser: Any) -> None:
    page = browser.new_page(viewport={"width": SCREEN, "height": 900})
    page.goto(page_of("tasks", 81).as_uri())
    table = page.locator("table[data-table]").first
    head = table.locator("thead th").first

    def names() -> list[str]:
        read: list[str] = table.locator("tbody tr:not([hidden]) td:first-child").all_inner_texts()
        return read

    assert len(names()) == 81
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert names() == sorted(names(), reverse=True)
    page.get_by_label("Filter").first.fill("velvet")
    assert 0 < len(names()) < 10
    assert all("velvet" in name for name in names())
    page.close()


def test_the_watch_page_loads_itself_again_until_it_is_paused(tmp_path: Path, browser: Any) -> None:
    path = MadeUp(tmp_path, 10).page("watch")
    path.write_text(path.read_text("utf-8").replace('data-seconds="600"', 'data-seconds="3"'), "utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    with page.expect_event("load"):
        pass  # without a click
    page.get_by_role("button", name="Pause").click()
    assert page.get_by_role("button", name="Pause").get_attribute("aria-pressed") == "true"
    page.close()


def test_the_first_stop_of_the_keyboard_skips_to_the_content(page_of: Callable[[str, int], Path], browser: Any) -> None:
    page = browser.new_page()
    page.goto(page_of("report", 10).as_uri())
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    links = page.locator("nav a").evaluate_all("all => all.map(a => a.hash.slice(1))")
    assert len(links) >= 4
    assert page.evaluate("links => links.every(id => document.getElementById(id))", links)
    page.close()


def test_decisions_on_the_audit_page_become_corrections(tmp_path: Path, browser: Any) -> None:
    made_up = MadeUp(tmp_path, 4)
    path, last = made_up.page("audit"), made_up.names[-1]
    page = browser.new_page(viewport={"width": SCREEN, "height": 900}, accept_downloads=True)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(path.as_uri())
    cards = page.locator("#wrong .item")
    keys = [card.locator(".file").inner_text().replace("\n", "") for card in cards.all()]
    cards.nth(0).get_by_role("button", name="Keep").click()
    cards.nth(1).get_by_role("button", name="Drop").click()
    cards.nth(2).locator("select").focus()
    cards.nth(2).locator("select").select_option(last)
    cards.nth(3).focus()
    page.keyboard.press("r")  # and on to the next card
    page.keyboard.press("d")
    page.keyboard.press("u")  # not that one
    assert page.locator("#counts").inner_text().startswith("2 relabel · 1 drop · 1 keep")
    suggestion = cards.nth(3).locator("select").input_value()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    download.value.save_as(tmp_path / "corrections.csv")
    read = {one.path: (one.action, one.label) for one in read_corrections(tmp_path / "corrections.csv").values()}
    decided = [("keep", ""), ("drop", ""), ("relabel", last), ("relabel", suggestion)]
    assert read == dict(zip(keys, decided, strict=False))
    assert find_source(made_up.data, reading=Reading(corrections=tmp_path / "corrections.csv"))
    page.reload()  # the browser remembers
    assert page.locator("#counts").inner_text().startswith("2 relabel · 1 drop · 1 keep")
    assert cards.nth(1).get_by_role("button", name="Drop").get_attribute("aria-pressed") == "true"
    cards.nth(1).get_by_role("button", name="Drop").click()  # again: undecided
    assert page.locator("#counts").inner_text().startswith("2 relabel · 0 drop · 1 keep")
    page.get_by_role("button", name="Accept").click()
    assert " 0 undecided" not in page.locator("#counts").inner_text()  # an outlier has no suggestion
    assert faults == []
    page.close()
