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
    """Return the likely wrong labels: prune by noise rate (section 3.2, method 4), ranked by normalized margin.

    For each pair of a label i and another class j, the N · joint[i, j] images labeled i with the largest
    p(j) − p(i) are chosen. Images whose label is also the prediction are left out.
    """
    joint = joint_distribution(labels, probabilities)
    rows = np.arange(len(labels))
    own = probabilities[rows, labels]
    chosen = np.zeros(len(labels), dtype=bool)
    for label, other in zip(*np.nonzero(np.rint(joint * len(labels)).astype(np.int64)), strict=True):
        if label != other:
            members = np.flatnonzero(labels == label)
            margins = probabilities[members, other] - own[members]
            most = int(np.rint(joint[label, other] * len(labels)))
            chosen[members[np.argsort(-margins, kind="stable")[:most]]] = True
    others = probabilities.copy()
    others[rows, labels] = -1.0
    suggestions = others.argmax(axis=1)
    margins = own - others[rows, suggestions]
    positions = np.flatnonzero(chosen & (margins < 0))
    positions = positions[np.argsort(margins[positions], kind="stable")]
    return LabelErrors(positions, suggestions[positions], margins[positions], joint)
