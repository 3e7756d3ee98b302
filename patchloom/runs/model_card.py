"""`README.md`: the model card, in the form of the Hugging Face hub."""

from collections.abc import Mapping, Sequence

from patchloom.runs.config import Preprocessing

_MOST_NAMES = 20


def card(
    network: str,
    preprocessing: Preprocessing,
    labels: Sequence[str],
    *,
    decides: bool,
    origin: str,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a model card.

    Args:
        network: Name of the network.
        preprocessing: How images become inputs of the network.
        labels: Class names.
        decides: Whether `labels` are the classes of a classifier.
        origin: First sentence, without a full stop.
        facts: Rows of a table: license, accuracy, publisher …
    """
    names = ", ".join(labels[:_MOST_NAMES]) + (" …" if len(labels) > _MOST_NAMES else "")
    tag = "image-classification" if decides else "image-feature-extraction"
    summary = f"{origin}. Classes: {names}" if labels else f"{origin}."
    size = preprocessing.image_size
    table = (
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]) if facts else ""
    )
    use = (
        'classifier.predict("photo.jpg")  # names and probabilities; also PIL images, arrays, tensors, folders'
        if decides
        else 'classifier.embed("photo.jpg")  # one vector; also PIL images, arrays, tensors, folders'
    )
    return f"""---
library_name: patchloom
pipeline_tag: {tag}
tags: [{tag}, patchloom]
---

# {network}, {len(labels)} classes

{summary}
{f"{chr(10)}{table}{chr(10)}" if table else ""}
Images are resized so that a center crop of {size[0]}×{size[1]} is {preprocessing.crop_ratio:g} of the
short side ({preprocessing.interpolation}), divided by 255, and normalized by mean {list(preprocessing.mean)} and
standard deviation {list(preprocessing.std)}.

```python
import patchloom

classifier = patchloom.load("this/folder")
{use}
```
"""
