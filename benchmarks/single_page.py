"""The single page in headless Chromium, offline: the same answers as the run, seconds per picture, size.

python benchmarks/single_page.py same RUN DATA --pictures 100   # val pictures of DATA, as PNG
python benchmarks/single_page.py speed resmlp_s12               # random weights, 224 px, 1,000 classes, on one core
"""

import argparse
import base64
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import patchloom
from patchloom.data.sources.source import find_source
from patchloom.exporters.single_page.page import export_page, write_classifier_page
from patchloom.exporters.single_page.program import Weights
from patchloom.inference.classifier import Classifier, load
from patchloom.runs.config import Preprocessing, RunFiles

ASK = """async text => {
  const bytes = Uint8Array.from(atob(text), x => x.charCodeAt(0)), start = performance.now()
  const { probabilities } = await patchloom.classify(new Blob([bytes]))
  return [[...probabilities], (performance.now() - start) / 1000]
}"""
FORMS: tuple[Weights, ...] = ("int8", "fp16")


@contextmanager
def opened(path: Path, folder: Path, *, one_core: bool = False) -> Iterator[Any]:
    """The page in a browser without a network."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "install Chromium"
    if one_core:
        launcher = folder / "chromium"
        launcher.write_text(f'#!/bin/sh\nexec taskset -c 0 {chromium} "$@"\n')
        launcher.chmod(0o755)
        chromium = str(launcher)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-kernels]", timeout=120_000)
        yield page
        browser.close()


def as_png(picture: Image.Image) -> str:
    """The picture as a file in base64."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def same(run: str, data: str, count: int, folder: Path) -> None:
    """Compare the page's probabilities with the run's."""
    classifier, listing = load(run, device="cpu"), find_source(data).val
    assert listing is not None, f"{data} has no val"
    pictures = [listing.images.read(int(row)) for row in listing.rows[:count]]
    expected = [dict(answers) for answers in classifier.predict(pictures, top=len(classifier.labels))]
    for form in FORMS:
        written = export_page(run, folder / f"{form}.html", weights=form)
        with opened(written.path, folder) as page:
            found = [page.evaluate(ASK, as_png(picture))[0] for picture in pictures]
        rows = np.array([[answers[name] for name in classifier.labels] for answers in expected])
        agree = int((np.argmax(found, axis=1) == rows.argmax(axis=1)).sum())
        print(
            f"{form}: {written.size / 1e6:.2f} MB, top-1 the same on {agree} of {len(rows)}, "
            f"largest difference of a probability {np.abs(np.array(found) - rows).max():.5f}"
        )


def speed(name: str, folder: Path, rounds: int = 9) -> None:
    """Seconds from a PNG of 640×480 to its answer."""
    network = patchloom.create_model(name).eval()
    shown = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 0.9)
    labels = tuple(f"class {number}" for number in range(network.config.num_classes))
    classifier = Classifier(network, RunFiles(name, {"num_classes": len(labels)}, shown, None, labels))
    noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    sent = as_png(Image.fromarray(noise).resize((640, 480)))
    for form in FORMS:
        written = write_classifier_page(classifier, folder / f"{form}.html", form)
        with opened(written.path, folder, one_core=True) as page:
            seconds = [page.evaluate(ASK, sent)[1] for _ in range(rounds)]
            kernels = page.evaluate("document.body.dataset.kernels")
        print(
            f"{name} {form}: {written.size / 1e6:.1f} MB, first {seconds[0]:.2f} s, median {median(seconds):.2f} s, "
            f"slowest {max(seconds):.2f} s ({kernels})"
        )


def main() -> None:
    """Read what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    comparing = verbs.add_parser("same")
    comparing.add_argument("run")
    comparing.add_argument("data")
    comparing.add_argument("--pictures", type=int, default=100)
    timing = verbs.add_parser("speed")
    timing.add_argument("network")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.verb == "same":
            same(given.run, given.data, given.pictures, Path(folder))
        else:
            speed(given.network, Path(folder))


if __name__ == "__main__":
    main()
