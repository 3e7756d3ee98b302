"""One HTML page that runs the classifier by itself (`deployment/single_page/`)."""

from pathlib import Path
from typing import Any

from patchloom_runtime.engines.formats import PageFormat
from patchloom_runtime.errors import UsageError


class Html(PageFormat):
    """Weights in float16, or int8 for half the size."""

    name = "html"

    def write_page(self, run: str, out: str, *, int8: bool) -> Any:
        """A `single_page.Page`."""
        from patchloom.exporters.single_page.page import export_page

        if Path(out).suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--to html writes one file, given --out {out}; name it so, such as {out}.html")
        return export_page(run, out, weights="int8" if int8 else "fp16")
