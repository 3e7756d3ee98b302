"""One self-contained HTML page that runs the classifier (`single_page/`)."""

from pathlib import Path
from typing import Any

from patchloom.exporters.formats import PageFormat
from patchloom.exporters.single_page.page import Page, page_path, write_classifier_page
from patchloom.inference.classifier import Classifier
from patchloom_runtime.errors import UsageError


class HtmlFormat(PageFormat):
    """A page with float16 weights, or int8 weights for half the size."""

    name = "html"

    def write_page(self, model: Any, out: str, *, int8: bool) -> Page:
        if Path(out).suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--to html writes one file, but --out is {out}; use a name such as {out}.html")
        classifier = model if isinstance(model, Classifier) else getattr(model, "classifier", None)
        if classifier is None:
            raise UsageError("--to html writes pages of models of whole images: classes, labels or numbers")
        classifier.check_decides()
        thresholds, scale, neutral = (getattr(model, name, None) for name in ("thresholds", "scale", "neutral"))
        return write_classifier_page(
            classifier,
            page_path(out),
            "int8" if int8 else "fp16",
            thresholds=None if thresholds is None else thresholds.tolist(),
            scale=None if scale is None else {"mean": scale.mean.tolist(), "std": scale.std.tolist()},
            neutral=None if neutral is None else neutral.tolist(),
        )
