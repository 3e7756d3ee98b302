"""Confident learning equals a slow reference, written from the equations of Northcutt et al. (2021)."""

import numpy as np
import pytest

from patchloom.evaluation.feature_distances import entropies, neighbor_distances, uncertain_and_diverse
from patchloom.evaluation.label_errors import confident_joint, find_label_errors, joint_distribution


def slow_confident_joint(labels, p):
    """Equations 1 and 2, one image at a time."""
    n, k = p.shape
    t = []
    for j in range(k):
        own = [float(p[x, j]) for x in range(n) if labels[x] == j]
        t.append(sum(own) / len(own) if own else float("inf"))
    c = [[0] * k for _ in range(k)]
    for x in range(n):
        reached = [j for j in range(k) if p[x, j] >= t[j]]
        if reached:
            best = max(reached, key=lambda j: p[x, j])
            c[labels[x]][best] += 1
    return c


def slow_joint(labels, p):
    """Equation 3."""
    n, k = p.shape
    c = slow_confident_joint(labels, p)
    q = np.zeros((k, k))
    for i in range(k):
        total, members = sum(c[i]), sum(1 for label in labels if label == i)
        for j in range(k):
            share = c[i][j] / total if total else float(i == j)
            q[i, j] = share * members / n
    return q


def slow_errors(labels, p):
    """Chosen by noise rate and by class, without images whose label is predicted."""
    n, k = p.shape
    q, by_rate, by_class = slow_joint(labels, p), set(), set()
    for i in range(k):
        members = [x for x in range(n) if labels[x] == i]
        counts = {j: q[i, j] * n for j in range(k) if j != i}
        whole, total = {j: int(count) for j, count in counts.items()}, round(sum(counts.values()))
        for j in sorted(counts, key=lambda j: whole[j] - counts[j])[: total - sum(whole.values())]:
            whole[j] += 1
        by_class |= set(sorted(members, key=lambda x: p[x, i])[:total])
        for j, count in whole.items():
            by_rate |= set(sorted(members, key=lambda x: -(p[x, j] - p[x, i]))[:count])
    chosen = by_rate & by_class
    return {x for x in chosen if max(p[x, j] for j in range(k) if j != labels[x]) > p[x, labels[x]]}


def noisy(seed, images=200, classes=5, wrong=0.1, sharpness=2.0):
    """Probabilities of a good model and labels of which a share is wrong."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, images)
    labels = np.where(rng.random(images) < wrong, rng.integers(0, classes, images), truth)
    logits = rng.normal(0, 1, (images, classes))
    logits[np.arange(images), truth] += sharpness
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return labels, p.astype(np.float32), truth


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("classes", [2, 5, 9])
def test_confident_learning_equals_its_equations(seed, classes):
    labels, p, _ = noisy(seed, classes=classes)
    if seed % 2:  # a class without images
        labels[labels == classes - 1] = 0
    assert confident_joint(labels, p).tolist() == slow_confident_joint(labels, p)
    assert joint_distribution(labels, p) == pytest.approx(slow_joint(labels, p))
    errors = find_label_errors(labels, p)
    assert set(errors.positions.tolist()) == slow_errors(labels, p)
    own = p[errors.positions, labels[errors.positions]]
    assert errors.margins == pytest.approx(own - p[errors.positions, errors.suggestions])
    assert (np.diff(errors.margins) >= 0).all()
    assert (errors.suggestions != labels[errors.positions]).all()
    assert errors.joint.sum() == pytest.approx(1)


def test_planted_errors_are_found_and_counted():
    labels, p, truth = noisy(0, images=2000, wrong=0.1, sharpness=6.0)
    errors = find_label_errors(labels, p)
    wrong = set(np.flatnonzero(labels != truth).tolist())
    found = set(errors.positions.tolist())
    assert len(found & wrong) > 0.9 * max(len(found), len(wrong))
    assert errors.noise == pytest.approx(len(wrong) / 2000, abs=0.02)
    right = [truth[x] for x in errors.positions] == errors.suggestions
    assert right.mean() > 0.9


def test_few_errors_of_many_classes_are_found():
    """The expected number of each pair of classes is far below one."""
    labels, p, truth = noisy(1, images=1500, classes=60, wrong=0.05, sharpness=9.0)
    wrong = set(np.flatnonzero(labels != truth).tolist())
    assert len(set(find_label_errors(labels, p).positions.tolist()) & wrong) > 0.7 * len(wrong)


def test_right_labels_are_left_alone():
    labels = np.arange(30) % 3
    p = np.full((30, 3), 0.05, np.float32)
    p[np.arange(30), labels] = 0.9
    errors = find_label_errors(labels, p)
    assert len(errors.positions) == 0
    assert errors.noise == 0


def test_an_image_unlike_all_others_is_far_from_them():
    rng = np.random.default_rng(0)
    vectors = rng.normal(0, 0.1, (50, 8)) + np.eye(8)[0]
    vectors[7] = -5 * np.eye(8)[0]
    distances = neighbor_distances(vectors)
    assert distances.argmax() == 7
    assert np.median(distances) == pytest.approx(1)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    slow = [np.sort([1 - a @ b for j, b in enumerate(unit) if j != i])[:10].mean() for i, a in enumerate(unit)]
    assert distances == pytest.approx(slow / np.median(slow), rel=1e-3)
    assert neighbor_distances(vectors[:1]).tolist() == [1.0]
    assert np.isfinite(neighbor_distances(np.ones((4, 3)))).all()


def test_images_worth_labeling_are_uncertain_and_differ():
    uncertainty = np.array([0.9, 0.89, 0.5, 0.1])
    vectors = np.array([[1, 0, 0], [1, 0.01, 0], [0, 1, 0], [0, 0, 1]], float)
    assert uncertain_and_diverse(uncertainty, vectors, 3) == [0, 2, 3]
    assert sorted(uncertain_and_diverse(uncertainty, vectors, 9)) == [0, 1, 2, 3]
    assert entropies(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx([1, 0], abs=1e-9)
