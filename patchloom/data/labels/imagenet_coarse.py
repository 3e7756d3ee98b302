"""ImageNet's 1,000 classes in 127 coarse ones (Huh et al., arXiv 1608.08614), as thesis 2.4.1 uses them.

`imagenet127.csv` was derived from WordNet 3.0 (Princeton University) by the authors' rule: every class goes to its
parent, and a parent that lies below another one of these is replaced by it. 38 classes have several parents; the
authors' code takes the first by name, not by WordNet's own order, which would give 121 coarse classes. With that the
127 synsets are those of the list the authors published; their lists of images were not compared.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

NAME = "imagenet127"  # what `--taxonomy` takes for it


def imagenet_coarse() -> dict[str, str]:
    """Class → coarse class, for every name the 1,000 classes have: WordNet ids, timm's and torchvision's words."""
    with (Path(__file__).parent / f"{NAME}.csv").open(encoding="utf-8", newline="") as file:
        of_id = {row["class"]: row["coarse"] for row in csv.DictReader(file)}
    found = of_id.copy()
    shared: set[str] = set()  # by classes of several coarse ones, as "crane": a bird and a machine
    for known_as, coarse in zip(_words(), of_id.values(), strict=True):
        for name in known_as:
            if found.setdefault(name, coarse) != coarse:
                shared.add(name)
    own = {name: coarse for name, coarse in found.items() if name not in shared}
    return own | dict(zip(_single_names(), of_id.values(), strict=True))


def _words() -> list[Sequence[str]]:
    """'tench, Tinca tinca', as some data sets call a class, and each of its words, in the order of the WordNet ids."""
    from timm.data import ImageNetInfo

    texts = ImageNetInfo("imagenet-1k").label_descriptions()
    return [(text, *(word.strip() for word in text.split(","))) for text in texts]


def _single_names() -> Sequence[str]:
    """One name of each class, each another, as published networks call them."""
    from torchvision.models import ResNet50_Weights

    return list(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])
