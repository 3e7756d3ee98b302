"""Class names of published networks: ImageNet's words, with WordNet ids and synonyms, which datasets often use."""

from collections import Counter
from collections.abc import Sequence

from patchloom.data.datasets import plain_form
from patchloom_runtime.errors import UsageError


def class_names(count: int, labels: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return `labels` after checking them, or by default ImageNet's names for 1,000 classes, else numbers."""
    if labels is None:
        return imagenet_names() if count == 1000 else tuple(map(str, range(count)))
    if len(labels) != count:
        raise UsageError(f"the network has {count:,} classes, but {len(labels):,} names were given")
    if len(set(labels)) < count:
        duplicate = next(name for name in labels if list(labels).count(name) > 1)
        raise UsageError(f"the name {duplicate!r} was given to more than one class")
    return tuple(labels)


def imagenet_names() -> tuple[str, ...]:
    """Return the distinct names of ImageNet's 1,000 classes in the order of their WordNet ids: 'tench', 'goldfish' …"""
    from torchvision.models import ResNet50_Weights

    return tuple(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])


def imagenet_labels(count: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the distinct class names of a published network, and the synonyms that belong to one class only.

    The number of classes tells the label set, as in timm: ImageNet-1k, Google's 21,843 or Alibaba's 11,221 classes.
    """
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return tuple(map(str, range(count))), [[] for _ in range(count)]
    info = ImageNetInfo(subset)
    ids = info.label_names()
    words = [[word.strip() for word in text.split(",")] for text in info.label_descriptions()]
    if count == 1000:
        labels = imagenet_names()
    else:
        first = Counter(each[0] for each in words)
        labels = tuple(
            each[0] if first[each[0]] == 1 else f"{each[0]} ({wordnet_id})"
            for each, wordnet_id in zip(words, ids, strict=True)
        )
    owners = Counter(form for each in words for form in {plain_form(word) for word in each})
    taken = {plain_form(label) for label in labels}
    synonyms = [
        [wordnet_id, *(word for word in each if owners[plain_form(word)] == 1 and plain_form(word) not in taken)]
        for wordnet_id, each in zip(ids, words, strict=True)
    ]
    return labels, synonyms


def names_for(count: int, labels: Sequence[str] | None) -> tuple[tuple[str, ...], list[list[str]] | None]:
    """Return class names and synonyms: the user's `labels`, which have none, or those of `imagenet_labels`."""
    return imagenet_labels(count) if labels is None else (class_names(count, labels), None)
