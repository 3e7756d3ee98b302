"""`README.md` of an artefact: what it is, how it compares with its run, how it is used."""

from typing import TYPE_CHECKING

from patchloom.deployment.export.parity import COLUMNS

if TYPE_CHECKING:
    from patchloom.deployment.classifier import Classifier
    from patchloom.deployment.export.export import Exported

_NAMES_SHOWN = 20


def artefact_card(classifier: "Classifier", exported: "Exported") -> str:
    """The text of the card."""
    shown, files = classifier.preprocessing, classifier._files
    labels = files.labels if files.decides else ()
    names = ", ".join(labels[:_NAMES_SHOWN]) + (" …" if len(labels) > _NAMES_SHOWN else "")
    use = (
        'model.predict("photo.jpg")  # names and probabilities; also bytes, PIL images, arrays, folders, lists'
        if labels
        else 'model.embed("photo.jpg")  # a vector; also bytes, PIL images, arrays, folders, lists'
    )
    head = [column.removeprefix("#") for column in COLUMNS]
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *(row.cells() for row in exported.rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    height, width = shown.image_size
    return f"""---
library_name: patchloom
tags: [patchloom, {exported.to}]
---

# {files.network}, {exported.to} {exported.precision}

{f"{len(labels)} classes: {names}" if labels else "One vector per image."}

Compared with the run on {exported.images:,} images, on the machine that exported it:

{lines}

The graph takes `pixels`, uint8 (batch, {height}, {width}, 3), RGB, and gives
`{"` and `".join(["logits", "embedding"] if labels else ["embedding"])}`. Mean and deviation are inside it. Images are
resized so that a centre crop of {height}×{width} is {shown.crop_ratio:g} of the short side
(Pillow, {shown.interpolation}).

```python
import patchloom_runtime  # numpy, Pillow and the format's own package; or patchloom.load, the same

model = patchloom_runtime.load("this/folder")
{use}
```
"""
