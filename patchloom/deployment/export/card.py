"""`README.md` of an artefact: what it is, how it compares with its run, how it is used."""

from typing import TYPE_CHECKING

from patchloom.deployment.export.parity import columns

if TYPE_CHECKING:
    from patchloom.deployment.export.export import Exported
    from patchloom.deployment.export.subject import Subject


def artefact_card(subject: "Subject", outputs: tuple[str, ...], exported: "Exported") -> str:
    """The text of the card."""
    shown = subject.shown
    head = [column.removeprefix("#") for column in columns(exported.measure)]
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *(row.cells() for row in exported.rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    height, width = shown.image_size
    return f"""---
library_name: patchloom
tags: [patchloom, {exported.to}]
---

# {subject.network}, {exported.to} {exported.precision}

{subject.answers}

Compared with the run on {exported.images:,} images, on the machine that exported it:

{lines}

The graph takes `pixels`, {subject.takes.format(height, width)}, and gives `{"` and `".join(outputs)}`. Mean and
deviation are inside it. {_resized(subject)}

```python
import patchloom_runtime  # numpy, Pillow and the format's own package; or patchloom.load, the same

model = patchloom_runtime.load("this/folder")
{subject.use}
```
"""


def _resized(subject: "Subject") -> str:
    shown, (height, width) = subject.shown, subject.shown.image_size
    if subject.told:
        return f"Pictures of any size are seen through windows of {height}×{width}."
    by = f"(Pillow, {shown.interpolation})"
    if shown.resize == "square":
        return f"Images are resized to a square of which the middle {shown.crop_ratio:g} of each side is seen {by}."
    return (
        f"Images are resized so that a centre crop of {height}×{width} is {shown.crop_ratio:g} of the short side {by}."
    )
