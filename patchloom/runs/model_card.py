"""`README.md` of a model: what a stranger needs to know of it, in the Hugging Face hub's form."""

from collections.abc import Mapping, Sequence

from patchloom.runs.config import Preprocessing

_NAMES_SHOWN = 20


def card(
    network: str,
    shown: Preprocessing,
    labels: Sequence[str],
    *,
    decides: bool,
    origin: str,
    facts: Mapping[str, str] | None = None,
) -> str:
    """The text of a card; `decides` says that `labels` are the classes of a classifier, `origin` is a sentence.

    `facts` are further lines of a table: licence, accuracy, where it was published …
    """
    names = ", ".join(labels[:_NAMES_SHOWN]) + (" …" if len(labels) > _NAMES_SHOWN else "")
    tag = "image-classification" if decides else "image-feature-extraction"
    told = f"{origin}. Classes: {names}" if labels else f"{origin}."
    table = (
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]) if facts else ""
    )
    use = (
        'classifier.predict("photo.jpg")  # names and probabilities; also PIL images, arrays, tensors, folders'
        if decides
        else 'classifier.embed("photo.jpg")  # a vector; also PIL images, arrays, tensors, folders'
    )
    return f"""---
library_name: patchloom
pipeline_tag: {tag}
tags: [{tag}, patchloom]
---

# {network}, {len(labels)} classes

{told}
{f"{chr(10)}{table}{chr(10)}" if table else ""}
Images are resized so that a centre crop of {shown.image_size[0]}×{shown.image_size[1]} is {shown.crop_ratio:g} of the
short side ({shown.interpolation}), divided by 255, and normalised by mean {list(shown.mean)} and deviation
{list(shown.std)}.

```python
import patchloom

classifier = patchloom.load("this/folder")
{use}
```
"""
