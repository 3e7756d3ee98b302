"""ImageNet's classes in words, with what else they are called: WordNet ids and synonyms, as data often name them."""

from collections import Counter
from collections.abc import Sequence

from patchloom.data.datasets import plain_form
from patchloom.runs.published import class_names, imagenet_names


def imagenet_labels(count: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Names of a published network's classes, each another, and further names of each that no other class has.

    The number of its classes tells which they are, as in timm: 1,000, Google's 21,843 or Alibaba's 11,221.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return tuple(map(str, range(count))), [[] for _ in range(count)]
    known = ImageNetInfo(subset)
    ids = known.label_names()
    words = [[word.strip() for word in text.split(",")] for text in known.label_descriptions()]
    if count == 1000:
        labels = imagenet_names()
    else:
        first = Counter(each[0] for each in words)
        labels = tuple(
            each[0] if first[each[0]] == 1 else f"{each[0]} ({of})" for each, of in zip(words, ids, strict=True)
        )
    owners = Counter(form for each in words for form in {plain_form(word) for word in each})
    taken = {plain_form(label) for label in labels}
    others = [
        [of, *(word for word in each if owners[plain_form(word)] == 1 and plain_form(word) not in taken)]
        for of, each in zip(ids, words, strict=True)
    ]
    return labels, others


def names_for(count: int, given: Sequence[str] | None) -> tuple[tuple[str, ...], list[list[str]] | None]:
    """Names of a network's classes and further ones: those `given`, which have none, or ImageNet's, or numbers."""
    return imagenet_labels(count) if given is None else (class_names(count, given), None)
