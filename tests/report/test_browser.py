"""The pages in a browser: no errors, no requests, every image is visible, on a phone and on a large screen."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.reading import Reading
from patchloom.data.sources.corrections import read_corrections
from patchloom.data.sources.source import find_source
from patchloom.evaluation.classification import ClassificationReport
from patchloom.inference.classifier import load
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom.inference.search import write_search_page
from patchloom.report.check_page import write_check_page
from patchloom.report.pictures.look import ImageLook
from patchloom.report.pictures.sheets import SheetCell
from patchloom.report.run_report import Report, Summary, write_report
from patchloom.report.sections import (
    class_section,
    confusion_section,
    gallery_section,
    mistake_section,
    table_section,
)
from patchloom.runs.out_of_fold import OutOfFold
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.classification.ranked_page import write_ranked
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.images.look_page import look_at, write_look_page
from patchloom.tasks.report import report_run
from patchloom.training.auditing.audit import make_report
from patchloom.training.auditing.audit_report import WorthLabeling
from patchloom.training.auditing.page import write_audit_page
from patchloom.training.sweeps.page import write_sweep_page
from patchloom.training.sweeps.record import RunResult
from patchloom.training.sweeps.table import Sweep, rows_of
from tests.small_runs import trained  # noqa: F401
from tests.training.auditing.tinted import tinted_folders

PHONE, SCREEN = 390, 1400


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


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    folder = tmp_path_factory.mktemp("pages")
    ranked = folder / "ranked.html"
    result = check(str(trained / "data"), cache=False)
    write_check_page(folder / "check.html", result, problems=result.problems())
    return {
        "report": report_run(trained / "a", out=folder / "report.html"),
        "attention": report_run(trained / "vit", out=folder / "vit.html"),
        "comparison": report_runs([str(trained / "a"), str(trained / "vit")], out=folder / "comparison.html"),
        "look": look_at(str(trained / "vit"), [str(trained / "data" / "red")], out=folder / "look.html").path,
        "check": folder / "check.html",
        "search": searched(trained, folder),
        "notebook": noted(trained, folder),
        "audit": audited(folder, ["red", "green", "blue", "a, b"]),
        "ranked": write_ranked([str(trained / "a"), str(trained / "b")], str(trained / "data"), out=ranked).path,
    }


def audited(folder: Path, classes: list[str]) -> Path:
    """The page of an audit with an error, a conflict, an outlier and an unlabeled image."""
    data = folder / "audited"
    tinted_folders(data, classes, 3)
    for name in classes[:2]:
        Image.linear_gradient("L").save(data / name / "twin.png")
    result = check(str(data), cache=False)
    train = result.listings["train"]
    keys = tuple(train.images.key(row) for row in train.rows.tolist())
    p = np.full((len(keys), len(classes)), 0.1 / (len(classes) - 1), np.float32)
    p[np.arange(len(keys)), np.roll(train.labels, 1)] = 0.9
    distances = np.ones(len(keys), np.float32)
    distances[-1] = 40
    predictions = OutOfFold(train.names, ("0",), keys, train.labels, np.ones(len(keys), np.int64), p, distances)
    report = make_report(str(data), folder, predictions, result, frozenset())
    assert report.wrong_labels
    assert report.conflicts
    assert report.outliers
    unlabeled = WorthLabeling(str(data / classes[0] / "twin.png"), classes[-1], 0.3, 0.9)
    write_audit_page(folder / "audit.html", replace(report, unlabeled=(unlabeled,)))
    return folder / "audit.html"


def searched(trained: Path, folder: Path) -> Path:  # noqa: F811
    index(str(trained / "vit"), [str(trained / "data")], out=str(folder / "index"))
    opened = open_index(folder / "index", images=[trained / "data"])
    write_search_page(folder / "search.html", opened, opened.search([str(trained / "data" / "red")], top=5))
    return folder / "search.html"


def noted(trained: Path, folder: Path) -> Path:  # noqa: F811
    """Outputs of a notebook, one below the other."""
    seeing, picture = load(trained / "vit", device="cpu"), trained / "data" / "red" / "0.png"
    both = evaluate([trained / "a", trained / "vit"])
    result = open_index(folder / "index", images=[trained / "data"]).search(picture)
    outputs = [one._repr_html_() for one in (seeing, seeing.look(picture), both, *both.evaluations.values(), result)]
    page = folder / "notebook.html"
    page.write_text("<!doctype html><meta charset='utf-8'>" + "<br>".join(outputs), "utf-8")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, SCREEN])
@pytest.mark.parametrize(
    "name", ["report", "attention", "comparison", "look", "check", "search", "ranked", "notebook", "audit"]
)
def test_a_page_is_whole(name: str, width: int, scheme: str, pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults: list[str] = []
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url[:80]}"))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(pages[name].as_uri())
    assert faults == []
    assert [url for url in requested if not url.startswith(("data:", pages[name].as_uri()))] == []
    # Nothing sticks out: the page itself is never scrolled sideways.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unseen = page.evaluate(
        """() => [...document.querySelectorAll('img, svg')].filter(e => {
            const box = e.getBoundingClientRect()
            return !e.closest('details:not([open])') && (box.width < 8 || box.height < 8 || e.naturalWidth === 0)
        }).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert unseen == []
    small = page.evaluate(
        """() => [...document.querySelectorAll('p, td, th, dd, h1, h2, figcaption')]
            .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12)
            .map(e => e.textContent.slice(0, 40))"""
    )
    assert small == []
    page.close()


MANY = [f"a class with the rather long name of {number} that goes on for a while" for number in range(80)]
MANY.append("anamewithoutanyspacethatisfarlongerthanaphoneiswideandthereforehastobreaksomewhereorother")


@pytest.fixture(scope="module")
def many(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """Every kind of page with 81 classes of long names."""
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(81), 4)
    predictions = np.where(rng.random(len(labels)) < 0.6, labels, rng.integers(0, 81, len(labels)))
    wrong, sure = (predictions != labels).astype(np.int64), np.full(len(labels), 0.5, np.float32)
    report = ClassificationReport(tuple(MANY), np.arange(len(labels)), labels, predictions, wrong, sure, sure)
    image, place = Image.new("RGB", (40, 30), "olive"), f"photos/{MANY[-1]}/{'x' * 70}.jpg"
    worst = [(image, mistake, place) for mistake in report.worst(12)]
    sections = [
        confusion_section(report.confusion, MANY),
        class_section(report.class_accuracy, MANY, report.confusion),
        mistake_section(worst, MANY),
        gallery_section("worst", place, "told", [([image] * 4, MANY[:4])], [(name, (1, 2, 3)) for name in MANY]),
        table_section(
            "Classes, worst first",
            ["class", "IoU", "95 % interval", "recall", "boundary IoU", "share of pixels"],
            [(name, "16.7 %", "76.7 … 79.5", "98.7 %", "48.6 %", "76.4 %") for name in MANY],
        ),
    ]
    summary = Summary(model="torchvision:mobilenet_v2", data=place, best="12.3 %", command=f"patchloom train {place}")
    write_report(folder / "report.html", Report(title=place, summary=summary, sections=sections))
    cells = [SheetCell(image, name) for name in MANY[:3]]
    look_of = ImageLook(image, [(name, 0.2) for name in MANY[-5:]], cells, MANY[-1])
    write_look_page(folder / "look.html", f"Predictions of {place}", [place], [look_of.card(place)] * 3)
    names = [trained / name for name in ("a", "b")]
    long = [Path(shutil.copytree(name, folder / f"{name.name}-{'of-a-run-with-a-long-name' * 3}")) for name in names]
    report_runs([str(name) for name in long], out=folder / "comparison.html")
    runs = [
        RunResult(data=place, setting={"optim.lr": lr, "model": MANY[-1]}, metric="top1", metrics={"top1": 75.0})
        for lr in (0.003, 0.001)
    ]
    rows = rows_of([run.setting for run in runs], runs)
    write_sweep_page(Sweep(folder, rows, {place + str(i): run for i, run in enumerate(runs)}, "top1"))
    audited(folder, MANY)
    return {name: folder / f"{name}.html" for name in ("report", "look", "comparison", "sweep", "audit")}


@pytest.mark.parametrize("width", [PHONE, SCREEN])
@pytest.mark.parametrize("name", ["report", "look", "comparison", "sweep", "audit"])
def test_long_names_of_many_classes_are_not_cut_off(name: str, width: int, many: dict[str, Path], browser: Any) -> None:
    """Neither the page nor its text is wider than the screen; wide tables of numbers may scroll."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(many[name].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """() => [...document.querySelectorAll('h1, h2, h3, p, li, td, th, dd, figcaption, .bars span, img')]
            .filter(e => !e.closest('.matrix, .scroll') && e.getBoundingClientRect().right > innerWidth + 1)
            .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert cut == []
    narrow = page.evaluate(
        """() => [...document.querySelectorAll('.scroll td:first-child')]
            .filter(e => e.getBoundingClientRect().width < 100).map(e => e.textContent)"""
    )
    assert narrow == []  # a name is not broken into single letters
    outside = page.evaluate(
        """() => [...document.querySelectorAll('svg.lines text')].filter(e => {
            const chart = e.closest('svg').getBoundingClientRect(), box = e.getBoundingClientRect()
            return box.left < chart.left - 1 || box.right > chart.right + 1
        }).map(e => e.textContent)"""
    )
    assert outside == []
    assert page.evaluate("document.documentElement.scrollHeight") < 40_000
    page.close()


def test_decisions_on_the_audit_page_become_corrections(tmp_path: Path, browser: Any) -> None:
    path = audited(tmp_path, ["red", "green", "blue", "a, b"])
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
    cards.nth(2).locator("select").select_option("a, b")
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
    decided = [("keep", ""), ("drop", ""), ("relabel", "a, b"), ("relabel", suggestion)]
    assert read == dict(zip(keys, decided, strict=False))
    assert find_source(tmp_path / "audited", reading=Reading(corrections=tmp_path / "corrections.csv"))
    page.reload()  # the browser remembers
    assert page.locator("#counts").inner_text().startswith("2 relabel · 1 drop · 1 keep")
    assert cards.nth(1).get_by_role("button", name="Drop").get_attribute("aria-pressed") == "true"
    cards.nth(1).get_by_role("button", name="Drop").click()  # again: undecided
    assert page.locator("#counts").inner_text().startswith("2 relabel · 0 drop · 1 keep")
    page.get_by_role("button", name="Accept").click()
    assert " 0 undecided" not in page.locator("#counts").inner_text()  # an outlier has no suggestion
    assert faults == []
    page.close()
