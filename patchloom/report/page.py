"""HTML pages that stand alone: one style, every text escaped, pictures inside, nothing loaded from anywhere.

Free of torch, so that a check of data stays quick.
"""

import base64
import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from patchloom.disk import atomic_write
from patchloom_runtime.errors import ResourceError, UsageError
from patchloom_runtime.printable import printable

_TEMPLATES = Path(__file__).parent / "templates"
_PAGES = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    """The HTML of a template of this folder; every text in it is escaped, and what would steer a browser's text too."""
    html = _PAGES.get_template(template).render(**values)
    return "\n".join(map(printable, html.split("\n")))


def page_script(name: str) -> str:
    """The text of a script of this folder."""
    return (_TEMPLATES / name).read_text("utf-8")


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write the page, whole or not at all."""
    html = render(template, **values)
    try:
        atomic_write(path, html.encode())
    except (UsageError, ResourceError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ResourceError(f"the page {path} cannot be written ({reason})") from error


def data_uri(image: Image.Image, kind: str = "PNG", **saving: Any) -> str:
    """The image as a file inside an address."""
    file = io.BytesIO()
    image.save(file, kind, **saving)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
