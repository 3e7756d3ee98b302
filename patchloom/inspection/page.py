"""HTML pages that stand alone: one style, every text escaped, pictures inside, nothing loaded from anywhere.

Free of torch, so that a check of data stays quick.
"""

import base64
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from patchloom.errors import ResourceError

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write the page, whole or not at all."""
    html = _PAGES.get_template(template).render(**values)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(html, "utf-8", "backslashreplace")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ResourceError(f"the page {path} cannot be written ({error.strerror})") from error


def data_uri(image: Image.Image, kind: str = "PNG", **saving: Any) -> str:
    """The image as a file inside an address."""
    file = io.BytesIO()
    image.save(file, kind, **saving)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
