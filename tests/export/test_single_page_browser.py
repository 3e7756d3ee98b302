"""The page in a real browser, from disk and offline: images, drawings, classes, maps, phone and screen."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import patchloom
from patchloom.cli import make_app
from patchloom.exporters.single_page.page import export_page
from patchloom.inference.classifier import Classifier, load
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from tests.networks import small
from tests.report.test_browser import axe, browser  # noqa: F401

CLASSES = tuple("0123456789")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits with weights that were never trained."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    options: dict[str, Any] = {"num_classes": 10, "image_size": 8, "patch_size": 2, "depth": 1, "dim": 16}
    network = small("resmlp_s12", **options)
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, (8, 8), 1.0)
    Classifier(network, RunFiles("resmlp_s12", options, preprocessing, None, CLASSES)).save_pretrained(folder)
    write_run_metadata(folder, RunMetadata(data="digits", data_name="digits <i>&"))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of several sizes and modes, one of them transparent."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(4)]
    kinds = [((8, 8), "L"), ((40, 30), "RGB"), ((21, 50), "RGB"), ((16, 16), "RGBA")]
    for path, (size, mode) in zip(paths, kinds, strict=True):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 4), dtype=np.uint8), "RGBA")
        coarse.resize(size).convert(mode).save(path)
    return paths


@pytest.fixture
def page(run: Path, tmp_path: Path, browser: Any) -> Iterator[Any]:  # noqa: F811
    """The page, open, offline; whatever it complains of or asks for fails the test."""
    path = tmp_path / "page.html"
    assert export_page(run, path).draws
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    opened, faults = context.new_page(), []
    opened.on("console", lambda message: faults.append(message.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: faults.append(request.url) if "file:" not in request.url else None)
    opened.goto(path.as_uri())
    opened.wait_for_selector("body[data-kernels]")
    yield opened
    context.close()
    assert [fault for fault in faults if not fault.startswith("blob:")] == []


def pixels(page: Any, canvas: str) -> str:
    url: str = page.evaluate(f"document.getElementById('{canvas}').toDataURL()")
    return url


def test_predictions_are_accessible(images: list[Path], page: Any, axe: Callable[[Any], list[str]]) -> None:  # noqa: F811
    page.set_input_files("#files", [str(path) for path in images])
    page.wait_for_selector("#strip li:nth-child(4)")
    for width in (390, 1280):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert (width, scheme, axe(page)) == (width, scheme, [])


def test_files_are_answered_as_by_the_run(run: Path, images: list[Path], page: Any) -> None:
    answered = load(run, device="cpu").predict([str(path) for path in images], top=10)
    page.set_input_files("#files", [str(path) for path in images])
    page.wait_for_selector("#strip li:nth-child(4)")
    for number, answers in enumerate(answered):
        page.click(f"#strip li:nth-child({number + 1}) button")
        names = page.locator("#rows .name").all_inner_texts()
        shares = [float(text.removesuffix(" %")) / 100 for text in page.locator("#rows .share").all_inner_texts()]
        expected = dict(answers)
        assert names[0] == answers[0][0]
        assert page.inner_text("#best").startswith(names[0])
        assert all(abs(share - expected[name]) < 1e-2 for name, share in zip(names, shares, strict=True))
    assert "digits <i>&" in page.inner_text("h1")


def test_another_class_has_another_map_by_keyboard_and_by_name(images: list[Path], page: Any) -> None:
    page.set_input_files("#files", str(images[1]))
    page.wait_for_selector("#answer:not([hidden])")
    first, plain = pixels(page, "map"), pixels(page, "seen")
    page.focus("#rows input:checked")
    page.keyboard.press("ArrowDown")
    second = pixels(page, "map")
    page.select_option("#all", "9" if page.locator("#rows input:checked").get_attribute("value") != "9" else "8")
    third = pixels(page, "map")
    assert len({first, second, third, plain}) == 4
    assert pixels(page, "seen") == plain


def test_a_drawing_is_answered_and_fitted(page: Any) -> None:
    box = page.locator("#paper").bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 120, steps=4)
    page.mouse.up()
    page.wait_for_selector("#answer:not([hidden])")
    page.wait_for_timeout(100)
    fitted = pixels(page, "seen")
    page.uncheck("#fit")
    page.wait_for_timeout(100)
    assert pixels(page, "seen") != fitted
    page.click("#clear")


def test_what_is_no_picture_is_said(tmp_path: Path, page: Any) -> None:
    (tmp_path / "notes.txt").write_text("not an image")
    page.set_input_files("#files", str(tmp_path / "notes.txt"))
    page.wait_for_selector("#fault:not([hidden])")
    assert "notes.txt" in page.inner_text("#fault")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits(width: int, images: list[Path], page: Any) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.set_input_files("#files", [str(path) for path in images])
    page.wait_for_selector("#strip li:nth-child(4)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small_texts = page.evaluate(
        """() => [...document.querySelectorAll('p, label, figcaption, span, button')]
            .filter(e => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).length"""
    )
    assert small_texts == 0


def test_labels_and_numbers_have_maps_of_their_own(images: list[Path], tmp_path: Path, browser: Any) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    pixels_of = rng.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    options: dict[str, Any] = {"model": "resmlp_s12", "size": 8, "epochs": 1, "device": "cpu", "workers": 0}
    options["set"] = {"model.options.patch_size": 2, "model.options.depth": 1, "model.options.dim": 16}
    targets = {"label": rng.integers(0, 2, (24, 3)), "number": rng.random((24, 1)).tolist()}
    for unit, values in targets.items():
        folder = patchloom.train((pixels_of, values), out=str(tmp_path / unit), **options).folder
        patchloom.export(str(folder), str(tmp_path / f"{unit}.html"))
        predicted = patchloom.load(folder, device="cpu").predict(str(images[1]))
        context = browser.new_context(offline=True)
        opened = context.new_page()
        opened.goto((tmp_path / f"{unit}.html").as_uri())
        opened.wait_for_selector("body[data-kernels]")
        opened.set_input_files("#files", str(images[1]))
        opened.wait_for_selector("#answer:not([hidden])")
        assert opened.inner_text("#best").count("%") == (len(predicted) if unit == "label" else 0)
        rows = opened.locator("#rows .share").all_inner_texts()
        assert sum("below" in row for row in rows) == (3 - len(predicted) if unit == "label" else 0)
        assert unit in opened.inner_text("#answers legend")
        assert unit in opened.inner_text(".about")
        plain = pixels(opened, "seen")
        for number in range(len(rows)):
            opened.locator("#rows input").nth(number).check(force=True)
            assert pixels(opened, "map") != plain
        context.close()


def test_the_command_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = CliRunner().invoke(make_app(["export"]), ["export", str(run), "--out", str(path), "--int8"])
    assert (done.exit_code, done.exception) == (0, None)
    line, written = done.output.splitlines()
    assert f"{path.stat().st_size / 1e6:.1f} MB" in line
    assert "int8" in line
    assert written == str(path)
