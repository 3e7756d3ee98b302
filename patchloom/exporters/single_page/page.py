"""`export_page`: the classifier of a run as one HTML file that answers by itself, from disk, without a network.

The page holds a program (`networks.py`), the weights, kernels for WebAssembly and three scripts; its policy forbids
it to fetch anything, and no picture leaves it.
"""

import base64
import json
import os
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
from patchloom.report.page import ABOUT_MAPS, page_script, write_page
from patchloom.runs.run_metadata import read_run_metadata
from patchloom_runtime.errors import UsageError, nearest, with_near_options
from patchloom_runtime.printable import printable

_HERE = Path(__file__).parent
_MODEL_SCRIPTS = ("interpreter.js", "pictures.js", "serve.js")  # which run in a worker
_INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "box")  # FILTERS of pictures.js
_LEFT_OUT = " What the feed-forward layer after it makes of that is left out."


@dataclass(frozen=True)
class Page:
    """What was written."""

    path: Path
    size: int  # bytes
    weights: Weights
    map: str  # "evidence", "contribution", "attention", or "" where there is none
    draws: bool  # whether one can draw on it

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


@with_near_options
def export_page(run: str | os.PathLike[str], out: str | os.PathLike[str], *, weights: str = "fp16") -> Page:
    """Write the page of a classifier to the file `out`.

    `weights` are fp16, or int8 for a page of half the size: a matrix's entries are then rounded by at most 1/254 of the
    largest in their row, except in the stem and the classifier.
    """
    form = _form(weights)
    path = Path(out)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the file to write, such as {path / 'page.html'}")
    classifier = load(run, device="cpu")
    classifier.check_decides()
    return write_classifier_page(classifier, path, form)


def write_classifier_page(classifier: Classifier, path: Path, weights: Weights) -> Page:
    """The same of a classifier that is loaded."""
    shown = classifier.preprocessing
    if shown.interpolation not in _INTERPOLATIONS:
        known = ", ".join(_INTERPOLATIONS)
        raise UsageError(f"a page resizes by {known}; the run by {shown.interpolation}")
    program, image, answer = write_network(absorb(classifier.model), shown.image_size, weights)
    drawing = drawing_of(classifier.folder, shown.image_size) if classifier.folder else None
    write_page(
        path,
        "single_page.html.j2",
        title=_title(classifier),
        facts=_facts(classifier, program),
        about_map=ABOUT_MAPS[answer.kind] + (_LEFT_OUT if answer.kind == "contribution" else ""),
        has_map=answer.map is not None,
        drawing=drawing,
        model_script=Markup("\n".join((_HERE / name).read_text("utf-8") for name in _MODEL_SCRIPTS)),
        page_script=Markup(page_script("picture_page.js") + (_HERE / "page.js").read_text("utf-8")),
        described=_as_json(described(classifier, program, image, answer, drawing)),
        weights=Markup(program.encoded()),
    )
    return Page(path, path.stat().st_size, weights, answer.kind, drawing is not None)


def described(
    classifier: Classifier, program: PageProgram, image: Value, answer: PageOutput, drawing: Drawing | None
) -> dict[str, Any]:
    """All that the scripts are told, but for the weights."""
    shown = classifier.preprocessing
    ends = {"image": image.number, "logits": answer.logits.number, "map": answer.map.number if answer.map else None}
    modules = [("WebAssembly, fused", kernels(fused=True)), ("WebAssembly", kernels(fused=False))]
    return {
        "program": program.described() | ends,
        "modules": [(name, base64.b64encode(code).decode()) for name, code in modules],
        "preprocessing": {
            "size": shown.image_size,
            "crop": shown.crop_ratio,
            "interpolation": shown.interpolation,
            "resize": shown.resize,
            "mean": shown.mean,
            "std": shown.std,
        },
        "classes": [printable(name) for name in classifier.labels],
        "grid": answer.grid,
        "signed": answer.kind != "attention",
        "drawing": {"ink": drawing.ink, "fills": drawing.fills} if drawing else None,
    }


def _form(weights: str) -> Weights:
    known = get_args(Weights)
    if weights not in known:
        raise UsageError(f"weights are {' or '.join(known)}, given {weights!r}.{nearest(weights, known)}")
    return weights  # type: ignore[return-value]


def _title(classifier: Classifier) -> str:
    record = read_run_metadata(classifier.folder) if classifier.folder else None
    name = classifier.name
    return f"{name} · {record.data_name}" if record else name


def _facts(classifier: Classifier, program: PageProgram) -> list[tuple[str, str]]:
    height, width = classifier.preprocessing.image_size
    millions = len(program.blob) / 1e6
    return [
        ("classes", f"{len(classifier.labels):,}"),
        ("sees", f"{height} × {width} pixels"),
        ("weights", f"{program.weights}, {millions:.1f} MB"),
    ]


def _as_json(value: Any) -> Markup:
    """For a script element: nothing in it ends the element or begins a comment."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
