"""`export_page`: a classifier as one HTML file that runs in a browser, from disk and offline.

The page contains a program (`networks.py`), the weights, WebAssembly kernels and three scripts. Its content policy
forbids it to fetch anything, and no image leaves it.
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup

from patchloom.exporters.single_page.drawing import Drawing, drawing_of
from patchloom.exporters.single_page.kernels import kernels
from patchloom.exporters.single_page.networks import PageOutput, write_network
from patchloom.exporters.single_page.program import PageProgram, Value, Weights
from patchloom.inference.classifier import Classifier, load
from patchloom.models.network import absorb
from patchloom.report.page import ABOUT_LABEL_MAPS, ABOUT_MAPS, ABOUT_NUMBER_MAPS, page_script, write_page
from patchloom.runs.run_metadata import read_run_metadata
from patchloom_runtime.errors import UsageError, nearest, with_near_options
from patchloom_runtime.printable import printable

_HERE = Path(__file__).parent
_MODEL_SCRIPTS = ("interpreter.js", "images.js", "serve.js")  # run in a worker
_INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "box")  # FILTERS of images.js
_ABOUT = {"class": ABOUT_MAPS, "label": ABOUT_LABEL_MAPS, "number": ABOUT_NUMBER_MAPS}
_NO_FEED_FORWARD = " It leaves out the feed-forward layer that follows."


@dataclass(frozen=True)
class Page:
    """The result of an export to a page."""

    path: Path
    size: int  # bytes
    weights: Weights
    unit: str  # what it predicts: "class", "label" or "number"
    map: str  # "evidence", "contribution", "attention", or "" for none
    draws: bool  # whether the page has a canvas to draw on

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


@with_near_options
def export_page(run: str | os.PathLike[str], out: str | os.PathLike[str], *, weights: str = "fp16") -> Page:
    """Write the page of a classifier to the file `out`.

    `weights` is fp16, or int8 for a page of half the size: the entries of a matrix are then rounded by at most 1/254 of
    the largest in their row, except in the stem and the classifier.
    """
    form = _form(weights)
    path = page_path(out)
    classifier = load(run, device="cpu")
    classifier.check_decides()
    return write_classifier_page(classifier, path, form)


def page_path(out: str | os.PathLike[str]) -> Path:
    """Return the path of a page; raise UsageError for a folder."""
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; pass the file to write, such as {path / 'page.html'}")
    return path


def write_classifier_page(
    classifier: Classifier,
    path: Path,
    weights: Weights,
    *,
    thresholds: Sequence[float] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
    neutral: Sequence[float] | None = None,
) -> Page:
    """Write the page of a loaded classifier.

    With `thresholds`, it predicts every label whose score reaches its own. With `scale`, the mean and std of numbers,
    it predicts numbers instead of classes. Both have `neutral` outputs, which speak neither for nor against them.
    """
    unit = "number" if scale is not None else "label" if thresholds is not None else "class"
    preprocessing = classifier.preprocessing
    if preprocessing.interpolation not in _INTERPOLATIONS:
        known = ", ".join(_INTERPOLATIONS)
        raise UsageError(f"a page can resize with {known}, but the run uses {preprocessing.interpolation}")
    program, image, output = write_network(absorb(classifier.model), preprocessing.image_size, weights)
    drawing = drawing_of(classifier.folder, preprocessing.image_size) if classifier.folder else None
    write_page(
        path,
        "single_page.html.j2",
        title=_title(classifier),
        facts=_facts(classifier, program, unit),
        unit=unit,
        about_map=_ABOUT[unit][output.kind] + (_NO_FEED_FORWARD if output.kind == "contribution" else ""),
        has_map=output.map is not None,
        drawing=drawing,
        model_script=Markup("\n".join((_HERE / name).read_text("utf-8") for name in _MODEL_SCRIPTS)),
        page_script=Markup(page_script("picture_page.js") + (_HERE / "page.js").read_text("utf-8")),
        described=_as_json(
            described(classifier, program, image, output, drawing)
            | {"thresholds": thresholds, "scale": scale, "neutral": neutral}
        ),
        weights=Markup(program.encoded()),
    )
    return Page(path, path.stat().st_size, weights, unit, output.kind, drawing is not None)


def described(
    classifier: Classifier,
    program: PageProgram,
    image: Value,
    output: PageOutput,
    drawing: Drawing | None,
) -> dict[str, Any]:
    """Return what the scripts read of a classifier of one class per image, except the weights."""
    preprocessing, rules = classifier.preprocessing, classifier.calibration.rules
    ends = {"image": image.number, "logits": output.logits.number, "map": output.map.number if output.map else None}
    modules = [("WebAssembly, fused", kernels(fused=True)), ("WebAssembly", kernels(fused=False))]
    return {
        "program": program.described() | ends,
        "modules": [(name, base64.b64encode(code).decode()) for name, code in modules],
        "preprocessing": {
            "size": preprocessing.image_size,
            "crop": preprocessing.crop_ratio,
            "interpolation": preprocessing.interpolation,
            "resize": preprocessing.resize,
            "mean": preprocessing.mean,
            "std": preprocessing.std,
        },
        "classes": [printable(name) for name in classifier.labels],
        "calibration": {
            "temperature": rules.temperature,
            "threshold": rules.promise.threshold if rules.promise else 0,
            "negatives": [number for number, name in enumerate(classifier.labels) if name in rules.negatives],
        },
        "thresholds": None,
        "scale": None,
        "neutral": None,
        "grid": output.grid,
        "signed": output.kind != "attention",
        "drawing": {"ink": drawing.ink, "fills": drawing.fills} if drawing else None,
    }


def _form(weights: str) -> Weights:
    known = get_args(Weights)
    if weights not in known:
        raise UsageError(f"weights is {weights!r}, expected {' or '.join(known)}.{nearest(weights, known)}")
    return weights  # type: ignore[return-value]


def _title(classifier: Classifier) -> str:
    record = read_run_metadata(classifier.folder) if classifier.folder else None
    name = classifier.name
    return f"{name} · {record.data_name}" if record else name


def _facts(classifier: Classifier, program: PageProgram, unit: str) -> list[tuple[str, str]]:
    height, width = classifier.preprocessing.image_size
    millions, rules = len(program.blob) / 1e6, classifier.calibration.rules
    # A promise that was tested together with a distance rule does not hold without it, and a page has none.
    promise = None if rules.distance else rules.promise
    return [
        ("classes" if unit == "class" else f"{unit}s", f"{len(classifier.labels):,}"),
        ("sees", f"{height} × {width} pixels"),
        ("weights", f"{program.weights}, {millions:.1f} MB"),
        *([("promise", f"wrong on at most {100 * promise.max_error:g} % of its answers")] if promise else []),
    ]


def _as_json(value: Any) -> Markup:
    """Return JSON for a script element. Escaped so that it cannot end the element or begin a comment."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
