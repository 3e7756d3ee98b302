"""Confident learning: which labels are likely wrong, from predictions of models that did not train on the image.

C. G. Northcutt, L. Jiang, I. L. Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70 (2021).
Letters: N images, K classes. Labels are (N,) integers, probabilities (N, K) must come from out-of-fold predictions.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """Likely wrong labels, most certain first, and the estimated joint distribution of given and true labels."""

    positions: np.ndarray  # (errors,) of the images
    suggestions: np.ndarray  # (errors,) most likely other class of each
    margins: np.ndarray  # (errors,) probability of the label minus that of the suggestion, ascending
    joint: np.ndarray  # (K, K) share of images with the label [row] and the true class [column]

    @property
    def noise(self) -> float:
        """Estimated share of images whose label is wrong."""
        return float(self.joint.sum() - np.trace(self.joint))


def class_thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the mean probability of each class over the images with that label (K,); infinity without images.

    An image counts as a member of the classes whose probability reaches the threshold (equation 2).
    """
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    sums = np.bincount(labels, own, minlength=classes)
    return np.divide(sums, counts, out=np.full(classes, np.inf), where=counts > 0)


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Count images (K, K) by label [row] and the most likely class that reaches its threshold [column] (equation 1).

    Images that reach no threshold are not counted.
    """
    classes = probabilities.shape[1]
    reached = probabilities >= class_thresholds(labels, probabilities)
    counted = reached.any(axis=1)
    members = np.where(reached, probabilities, -1.0).argmax(axis=1)
    pairs = labels[counted] * classes + members[counted]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def joint_distribution(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the joint distribution (K, K) of given and true labels (equation 3): each row sums to the label's share.

    A label without any confident image counts as right.
    """
    counts = confident_joint(labels, probabilities).astype(np.float64)
    counts[np.diag_indices(len(counts))] += counts.sum(axis=1) == 0
    shares = np.bincount(labels, minlength=len(counts)) / len(labels)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True) * shares[:, None])


def find_label_errors(labels: np.ndarray, probabilities: np.ndarray) -> LabelErrors:
    """Return the likely wrong labels: pruned by noise rate and by class (method 5, C+NR), by normalized margin.

    By noise rate: for each label i and other class j, the N · joint[i, j] images labeled i with the largest
    p(j) − p(i). By class: the images labeled i with the smallest p(i), as many as there are errors in row i. An image
    is listed if both choose it and its label is not the prediction. Counts are rounded so that each row keeps its sum.
    """
    joint = joint_distribution(labels, probabilities)
    rows = np.arange(len(labels))
    own = probabilities[rows, labels]
    by_rate, by_class = np.zeros((2, len(labels)), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        counts = _rounded(np.delete(joint[label], label) * len(labels))
        by_class[members[np.argsort(own[members], kind="stable")[: counts.sum()]]] = True
        margins = np.delete(probabilities[members], label, axis=1) - own[members, None]  # (members, K - 1)
        for count, margin in zip(counts, margins.T, strict=True):
            by_rate[members[np.argsort(-margin, kind="stable")[:count]]] = True
    others = probabilities.copy()
    others[rows, labels] = -1.0
    suggestions = others.argmax(axis=1)
    margins = own - others[rows, suggestions]
    positions = np.flatnonzero(by_rate & by_class & (margins < 0))
    positions = positions[np.argsort(margins[positions], kind="stable")]
    return LabelErrors(positions, suggestions[positions], margins[positions], joint)


def _rounded(counts: np.ndarray) -> np.ndarray:
    """Round counts so that their sum is the rounded sum: up where the remainder is largest.

    With many classes, most counts are below a half, and rounding each by itself would leave nothing.
    """
    whole = np.floor(counts).astype(np.int64)
    remaining = int(np.rint(counts.sum())) - int(whole.sum())
    whole[np.argsort(whole - counts, kind="stable")[: max(0, remaining)]] += 1
    return whole
