"""HTML pages in a single file: one style, all text escaped, images embedded, nothing loaded from elsewhere.

This module does not import torch, so that `patchloom check` stays fast.
"""

import base64
import hashlib
import io
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from patchloom.disk import atomic_write
from patchloom.report.charts.svg import DARK_COLORS, DASHES, LIGHT_COLORS
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
LEAST_LINKS = 4  # sections of a page from which on it has a list of them
_SECTION = re.compile(r'<section id="([\w-]+)">\s*<h2>(.*?)</h2>', re.DOTALL)
_SIGNED = "Red patches speak for the class, blue patches against it"
_SIGNED_LABEL = "Red patches speak for the label, blue patches against it"
_SIGNED_NUMBER = "Red patches raise the number, blue patches lower it"
_LAST_LAYER = "in the last layer in which the class token attends to patches"
# What a page says about its maps, by the kind of map (see `pictures/explanations.py`).
ABOUT_MAPS = {
    "evidence": f"{_SIGNED}: the logit of each patch, relative to the other classes. The mean over the patches is the "
    "logit of the image.",
    "contribution": f"{_SIGNED}, relative to the other classes: the contribution of each patch to the logit, "
    f"{_LAST_LAYER}.",
    "attention": "Red patches get the most attention from the class token.",
    "share": "Red patches contribute most to the vector that images are compared by.",
    "": "The output of this network does not depend on single patches, so there is no map.",
}
ABOUT_LABEL_MAPS = ABOUT_MAPS | {
    "evidence": f"{_SIGNED_LABEL}: the logit of each patch, relative to that of the label's threshold. The mean over "
    "the patches is the logit of the image.",
    "contribution": f"{_SIGNED_LABEL}: the contribution of each patch to the logit, {_LAST_LAYER}.",
}
ABOUT_NUMBER_MAPS = ABOUT_MAPS | {
    "evidence": f"{_SIGNED_NUMBER}: the number of each patch, relative to the mean of the training images. The mean "
    "over the patches is the number of the image.",
    "contribution": f"{_SIGNED_NUMBER}: the contribution of each patch, {_LAST_LAYER}.",
}


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template; text is escaped, and so are characters that change the direction of text."""
    html = _PAGES.get_template(template).render(**values)
    return "\n".join(map(printable, html.split("\n")))


def section_links(html: str) -> list[tuple[str, Markup]]:
    """Return id and heading of the sections of a page; none if there are few."""
    links = [(place, Markup(heading)) for place, heading in _SECTION.findall(html)]  # a template has escaped them
    return links if len(links) >= LEAST_LINKS else []


def breakable_path(path: str) -> Markup:
    """Return a path that a browser may wrap after its slashes."""
    return escape(path).replace("/", Markup("/<wbr>"))


def inline_policy(script: str) -> str:
    """Return the source expression of a content security policy that allows one inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def page_script(name: str) -> str:
    """Return the text of a script in the templates folder."""
    return (_TEMPLATES / name).read_text("utf-8")


LIST_SCRIPT = "\n" + page_script("lists.js")  # sorts and filters lists and tables
LIST_POLICY = inline_policy(LIST_SCRIPT)
_PAGES.filters.update(links=section_links, breakable=breakable_path)
_PAGES.globals.update(
    light_colors=LIGHT_COLORS,
    dark_colors=DARK_COLORS,
    dashes=DASHES,
    list_script=Markup(LIST_SCRIPT),
    list_policy=Markup(LIST_POLICY),
)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write a page atomically."""
    html = render(template, **values)
    try:
        atomic_write(path, html.encode())
    except (UsageError, ResourceError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise ResourceError(f"the page {path} cannot be written ({reason})") from error


def data_uri(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Return the image as a data URI; `options` are those of `Image.save`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def image_base64(image: Image.Image) -> str:
    """Return the image for JSON in base64: a PNG up to 64 pixels per side, where single pixels show, else a JPEG."""
    uri = data_uri(image) if max(image.size) <= 64 else data_uri(image, "JPEG", quality=85)
    return uri.partition(",")[2]
