"""One HTML page that runs the classifier by itself (`single_page/`)."""

from pathlib import Path

from patchloom.exporters.formats import PageFormat
from patchloom.exporters.single_page.page import Page, export_page
from patchloom_runtime.errors import UsageError


class HtmlFormat(PageFormat):
    """A page with float16 weights, or int8 weights for half the size."""

    name = "html"

    def write_page(self, run: str, out: str, *, int8: bool) -> Page:
        if Path(out).suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--to html writes one file, but --out is {out}; use a name such as {out}.html")
        return export_page(run, out, weights="int8" if int8 else "fp16")
