"""The page of `patchloom app` in a real browser: pictures in, answers out, on a phone and a screen, by keyboard too."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchloom.report.pictures.overlays import palette
from patchloom_runtime.images.object_masks import ObjectMask
from tests.report.test_browser import axe, browser  # noqa: F401
from tests.serving.conftest import IMAGE_FILES
from tests.serving.pages import MODELS, over_http, page_of

PHONE, SCREEN = 390, 1280
DROP = """([name, bytes]) => {
  const given = new DataTransfer()
  given.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }))
  dispatchEvent(new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true }))
}"""
COLORS = """() => {
  const { width, height } = document.getElementById("seen")
  const { data } = document.getElementById("seen").getContext("2d").getImageData(0, 0, width, height), found = new Map()
  for (let i = 0; i < data.length; i += 4) found.set(data.slice(i, i + 3).join(), [...data.slice(i, i + 3)])
  return [...found.values()]
}"""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the page of each model is, begun when it is asked for."""

    class Begun(dict[str, str]):
        def __missing__(self, kind: str) -> str:
            folder = tmp_path_factory.mktemp("model")
            page = page_of(MODELS[kind](folder), images=folder / "files" if kind == "index" else None)
            self[kind] = started.enter_context(over_http(page))
            return self[kind]

    with ExitStack() as started:
        yield Begun()


class Opened:
    """A page; whatever it complains of, or asks of another address, is kept."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str = "light") -> None:  # noqa: F811
        self.context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self._seen(request.url, address))
        self.page.goto(address)
        self.width = width

    def _seen(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.faults.append(f"asked {url}")

    def answered(self) -> None:
        self.page.wait_for_selector("#place:not([aria-busy]) #answer:not([hidden])")

    def drawn(self, canvas: str) -> str:
        result: str = self.page.evaluate(f"document.getElementById('{canvas}').toDataURL()")
        return result

    def close(self) -> None:
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width
        small = """() => [...document.querySelectorAll('p, label, figcaption, span, button, b, dd, option')]
            .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).length"""
        assert self.page.evaluate(small) == 0
        self.context.close()
        assert self.faults == []


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (SCREEN, "light")])
def test_a_picture_its_classes_their_maps_and_what_is_like_it(
    width: int,
    scheme: str,
    addresses: dict[str, str],
    browser: Any,  # noqa: F811
) -> None:
    opened = Opened(browser, addresses["index"], width, scheme)
    page = opened.page
    assert page.inner_text("#empty")
    page.evaluate(DROP, ["a <b>.png", list(IMAGE_FILES[0])])
    opened.answered()
    best = page.inner_text("#rows .name >> nth=0")
    assert page.inner_text("#best").startswith(best)
    assert page.inner_text("#name").startswith("a <b>.png")
    # The photo is drawn large from the file itself; what the network sees stands small beside it.
    sizes = page.evaluate("['photo', 'seen'].map(id => document.getElementById(id).getBoundingClientRect().width)")
    assert sizes[0] > 1.5 * sizes[1] > 0
    assert opened.drawn("photo") != opened.drawn("seen")
    first = opened.drawn("map")
    # By keyboard alone: the chosen class is one step of Tab away, arrows change it.
    page.focus("#files")
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "class":
            break
    page.keyboard.press("ArrowDown")
    second = page.inner_text("#rows .name >> nth=1")
    page.locator("#for", has_text=second).wait_for()
    assert opened.drawn("map") != first
    assert page.inner_text("#best").startswith(best)
    assert page.locator("#hits li").count() == 12
    assert re.search(r"\b(crimson|tomato|navy)\b.*\b[\d.]+ %", page.inner_text("#voted"))
    assert page.evaluate("[...document.images].every(one => one.naturalWidth > 0)")
    labels = set(page.locator("#hits b").all_inner_texts())
    page.select_option("#level", "temperature")
    page.locator("#hits b", has_text="warm").first.wait_for()
    assert (labels, set(page.locator("#hits b").all_inner_texts())) == ({"crimson", "tomato", "navy"}, {"warm", "cold"})
    assert 0 < page.locator("#hits .same").count() < 12
    opened.close()


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (SCREEN, "light")])
@pytest.mark.parametrize("kind", ["index", "segmenter", "detector", "translator"])
def test_the_page_is_accessible(
    kind: str,
    width: int,
    scheme: str,
    addresses: dict[str, str],
    browser: Any,  # noqa: F811
    axe: Callable[[Any], list[str]],  # noqa: F811
) -> None:
    opened = Opened(browser, addresses[kind], width, scheme)
    assert axe(opened.page) == []
    if kind != "translator":
        opened.page.evaluate(DROP, ["a.png", list(IMAGE_FILES[0])])
        opened.answered()
        assert axe(opened.page) == []
    opened.close()


def test_a_fault_is_the_servers_own_line(tmp_path: Path, addresses: dict[str, str], browser: Any) -> None:  # noqa: F811
    opened = Opened(browser, addresses["artifact"], SCREEN)
    page = opened.page
    (tmp_path / "notes.txt").write_text("no picture")
    page.set_input_files("#files", str(tmp_path / "notes.txt"))
    page.wait_for_selector("#fault:not([hidden])")
    assert page.inner_text("#fault").startswith("notes.txt: ")
    assert page.is_visible("#empty")
    answers = iter([(503, '{"error": "busy; try again in 1 s"}')])

    def busy(route: Any) -> None:
        reply = next(answers, None)
        if reply is None:
            route.continue_()
        else:
            route.fulfill(
                status=reply[0], body=reply[1], headers={"Retry-After": "1", "Content-Type": "application/json"}
            )

    page.route("**/predict*", busy)
    page.evaluate(DROP, ["a.png", list(IMAGE_FILES[0])])
    page.locator("#status", has_text="1 s").wait_for()
    opened.answered()
    assert not page.is_visible("#fault")
    assert page.locator("#rows input").count() == 0  # there are no maps to choose
    page.unroute("**/predict*")
    page.route("**/predict*", lambda route: route.abort())
    page.evaluate(DROP, ["b.png", list(IMAGE_FILES[0])])
    page.wait_for_selector("#fault:not([hidden])")
    for fact in ("b.png: ", "patchloom app"):
        assert fact in page.inner_text("#fault")
    expected = "Failed to load resource"
    opened.faults = [fault for fault in opened.faults if not fault.startswith(expected)]
    opened.close()


def test_a_picture_that_is_too_large_is_sent_smaller(addresses: dict[str, str], browser: Any) -> None:  # noqa: F811
    opened = Opened(browser, addresses["artifact"], SCREEN)
    large = io.BytesIO()
    Image.fromarray(np.zeros((5001, 5000, 3), np.uint8)).save(large, "PNG")
    opened.page.set_input_files("#files", {"name": "large.png", "mimeType": "image/png", "buffer": large.getvalue()})
    opened.answered()
    assert "3463 × 3464" in opened.page.inner_text("#name")
    opened.close()


@pytest.mark.parametrize(("kind", "width"), [("segmenter", PHONE), ("detector", SCREEN)])
def test_masks_and_boxes(kind: str, width: int, addresses: dict[str, str], browser: Any) -> None:  # noqa: F811
    opened = Opened(browser, addresses[kind], width)
    page = opened.page
    page.evaluate(DROP, ["a.png", list(IMAGE_FILES[1])])
    opened.answered()
    if kind == "detector":
        page.fill("#range", "5")
    together, rows = opened.drawn("seen"), page.locator("#rows label").count()
    assert rows > 1
    page.click("#rows label:nth-child(2)")
    alone = opened.drawn("seen")
    assert rows == 2 or alone != together
    page.fill("#range", "100" if kind == "detector" else "0")
    assert opened.drawn("seen") not in (alone, together)
    if kind == "detector":
        assert page.locator("#rows label").count() == 1  # no object, beside the row for all of them
        bits = np.random.default_rng(0).random((40, 30)) > 0.3
        bits[:, 7:20] = True  # runs of more than one letter
        result = page.evaluate("text => runsOf(text)", ObjectMask.of(bits).to_coco(bits.shape)["counts"])
        inside = np.repeat(np.arange(len(result)) % 2 == 1, result)
        assert (bits == inside.reshape(30, 40).T).all()
    else:  # the colours alone are those of the classes
        page.click("#rows label:nth-child(1)")
        page.fill("#range", "100")
        colors = page.evaluate(COLORS)
        assert 0 < len(colors) < rows
        assert set(map(tuple, colors)) <= set(map(tuple, palette(3).tolist()))
    opened.close()


@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_lines_are_translated(width: int, addresses: dict[str, str], browser: Any) -> None:  # noqa: F811
    pytest.importorskip("sentencepiece")
    opened = Opened(browser, addresses["translator"], width)
    opened.page.fill("#text", "one two\n\nthree")
    opened.page.keyboard.press("Control+Enter")
    opened.page.wait_for_selector("#translation p:nth-child(3)", state="attached")
    assert re.search(r"\d", opened.page.inner_text("#status"))  # the time it took
    opened.page.fill("#text", "\n" * 20 + "one")
    opened.page.click("#send")
    opened.page.wait_for_selector("#fault:not([hidden])")
    for fact in ("21", "16"):
        assert fact in opened.page.inner_text("#fault")
    opened.faults = [fault for fault in opened.faults if "status of 422" not in fault]
    opened.close()


def test_a_model_without_classes_shows_what_its_vector_is_made_of(addresses: dict[str, str], browser: Any) -> None:  # noqa: F811
    opened = Opened(browser, addresses["without classes"], SCREEN)
    opened.page.evaluate(DROP, ["a.png", list(IMAGE_FILES[0])])
    opened.answered()
    assert opened.page.inner_text("#for")
    assert not opened.page.is_visible("#best")
    opened.close()
