"""Embeddings, neighbours and probes, each against a slow version of its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.evaluation import knn as knn_module
from patchloom.evaluation import probe as probe_module
from patchloom.evaluation.embeddings import Embeddings, embed
from patchloom.evaluation.knn import knn, nearest
from patchloom.evaluation.probe import few_shot_probe, fit_least_squares, fit_logistic, held_out_split, linear_probe
from patchloom.evaluation.sgd_probe import sgd_probe
from patchloom_runtime.errors import DataError, UsageError
from tests.networks import ONE_OF_EACH, small

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


def blobs(images: int, classes: int = 7, dim: int = 12, seed: int = 0, noise: float = 1.0) -> Embeddings:
    """Clouds around one point a class, with channels of very different scale."""
    centers = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    vectors = centers[labels] + noise * torch.randn(images, dim, generator=generator)
    return Embeddings(vectors * torch.logspace(-2, 2, dim) + 5, labels, torch.arange(images))


# Embeddings ---------------------------------------------------------------------------------------------------------


def batches(pixels: torch.Tensor, size: int):
    for rows in torch.arange(len(pixels)).split(size):
        yield ImageBatch(pixels[rows], rows % 5, rows)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_embeddings_are_what_the_classifier_reads(name):
    network = small(name).train()
    side = network.config.image_size[0]
    pixels = torch.randint(256, (5, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result = embed(network, batches(pixels, 2))
    assert network.training
    assert result.vectors.dtype == torch.float32
    assert result.labels.tolist() == [0, 1, 2, 3, 4]
    network.eval()
    inputs = normalize(pixels, network.pixel_mean, network.pixel_std)
    with torch.no_grad():
        expected = network.pool(network.features(inputs))
    torch.testing.assert_close(result.vectors, expected, atol=1e-4, rtol=1e-4)


def test_a_network_with_a_token_a_class_gives_one_vector_an_image():
    network = small("patchconvnet_s60", class_tokens="per_class")
    pixels = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        tokens = network.pool(network.features(normalize(pixels, network.pixel_mean, network.pixel_std)))
    assert tokens.shape == (3, 5, 16)
    torch.testing.assert_close(embed(network, batches(pixels, 3)).vectors, tokens.mean(dim=1))


def test_images_are_embedded_once_and_in_the_order_of_the_set():
    network = small("resmlp_s12")
    pixels = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    parts = [*reversed([*batches(pixels, 4)]), *batches(pixels, 3)]
    result = embed(network, parts)
    assert result.index.tolist() == list(range(6))
    torch.testing.assert_close(result.vectors, embed(network, batches(pixels, 6)).vectors)
    with pytest.raises(DataError):
        embed(network, [])


# Neighbours ---------------------------------------------------------------------------------------------------------


def slow_knn(train: Embeddings, test: Embeddings, classes: int, k: int, temperature: float, top: int) -> float:
    """Image by image: sort by cosine, sum exp(cosine/τ) by class, look for the label among the `top` highest."""
    right = 0
    for vector, label in zip(test.vectors.double(), test.labels.tolist(), strict=True):
        cosines = [float(vector @ v / (vector.norm() * v.norm())) for v in train.vectors.double()]
        order = sorted(range(len(cosines)), key=lambda i: -cosines[i])[:k]
        votes = [0.0] * classes
        for i in order:
            votes[int(train.labels[i])] += math.exp(cosines[i] / temperature)
        ranked = sorted((c for c in range(classes) if votes[c] > 0), key=lambda c: (-votes[c], c))
        right += label in ranked[:top]
    return 100 * right / len(test)


@settings(max_examples=15, deadline=None)
@given(
    train_images=st.integers(7, 40), test_images=st.integers(1, 20), k=st.integers(1, 7), seed=st.integers(0, 99),
    temperature=st.sampled_from((0.07, 1.0)),
)  # fmt: skip
def test_knn_is_its_definition(train_images, test_images, k, seed, temperature):
    train, test = blobs(train_images, seed=seed, noise=2), blobs(test_images, seed=seed + 1, noise=2)
    result = dict(knn(train, test, classes=7, k=(k, 1), temperature=temperature))
    assert list(result) == list(dict.fromkeys([f"knn{k}_top1", f"knn{k}_top5", "knn1_top1", "knn1_top5"]))
    for number in (k, 1):
        for top in (1, 5):
            expected = slow_knn(train, test, 7, number, temperature, top)
            assert result[f"knn{number}_top{top}"] == pytest.approx(expected)


def test_neighbours_are_the_same_in_parts(monkeypatch):
    train, test = blobs(50).vectors, blobs(23, seed=1).vectors
    (whole,) = nearest(train, test, 4)
    monkeypatch.setattr(knn_module, "PART_BYTES", 5 * 50 * 4)
    parts = list(nearest(train, test, 4))
    assert [len(cosines) for cosines, _ in parts] == [5, 5, 5, 5, 3]
    torch.testing.assert_close(torch.cat([cosines for cosines, _ in parts]), whole[0])
    assert torch.equal(torch.cat([positions for _, positions in parts]), whole[1])
    one, many = blobs(50), blobs(23, seed=1)
    in_parts = dict(knn(one, many, classes=7))
    monkeypatch.undo()
    assert dict(knn(one, many, classes=7)) == in_parts


def test_images_without_a_label_neither_vote_nor_count():
    train, test = blobs(30, noise=2), blobs(10, seed=1, noise=2)
    known = dict(knn(train.rows(np.arange(20)), test.rows(np.arange(6)), classes=7, k=(5,)))
    train.labels[20:] = -1
    test.labels[6:] = -1
    assert dict(knn(train, test, classes=7, k=(5,))) == known


@pytest.mark.parametrize("k", [(), (0,), (5, 31)])
def test_k_must_be_a_number_of_images(k):
    with pytest.raises(UsageError, match="30"):
        knn(blobs(30), blobs(5), classes=7, k=k)


@pytest.mark.parametrize(("probe", "classes"), [(knn, 7), (linear_probe, 7), (few_shot_probe, NAMES)])
def test_a_set_without_labels_is_told(probe, classes):
    with pytest.raises(DataError) as error:
        probe(blobs(40), Embeddings(torch.randn(5, 12), torch.full((5,), -1), torch.arange(5)), classes=classes)
    assert "5" in str(error.value)
    assert "val" in str(error.value)


# Probes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_logistic_regression_is_scikit_learns(l2):
    train, test = blobs(140, noise=1.5), blobs(60, seed=1, noise=1.5)
    result = fit_logistic(train.vectors, train.labels, 7, l2)
    scaled = [((part.vectors - train.vectors.mean(0)) / train.vectors.std(0, correction=0)) for part in (train, test)]
    # Theirs is the sum over images + ‖W‖²/2C, ours their mean + l2/2 · ‖W‖².
    theirs = LogisticRegression(C=1 / (l2 * 140), tol=1e-10, max_iter=10_000).fit(scaled[0], train.labels)
    shares = result(test.vectors).softmax(dim=1)
    np.testing.assert_allclose(shares.numpy(), theirs.predict_proba(scaled[1]), atol=2e-3)


def test_the_gradient_of_the_probe_in_parts_is_autograds(monkeypatch):
    train = blobs(50)
    mean, std = train.vectors.mean(0), train.vectors.std(0)
    at = torch.nn.Parameter(torch.randn(13, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(probe_module, "PART_ROWS", 16)
    with torch.no_grad():
        loss = probe_module._objective(at, train.vectors, train.labels, mean, std, 0.1)()
    result, at.grad = at.grad, None
    logits = ((train.vectors - mean) / std).double() @ at[:-1] + at[-1]
    expected = torch.nn.functional.cross_entropy(logits, train.labels) + 0.05 * at[:-1].square().sum()
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(result, at.grad, atol=1e-6, rtol=1e-5)


def test_the_linear_probe_chooses_its_strength_and_repeats_itself():
    train, test = blobs(210, noise=2), blobs(140, seed=1, noise=2)
    result = linear_probe(train, test, classes=7)
    assert result.held_out_top1[result.l2] == max(result.held_out_top1.values())
    tried = list(result.held_out_top1)
    assert tried == list(probe_module.STRENGTHS[: len(tried)])
    assert len(tried) == min(len(probe_module.STRENGTHS), tried.index(result.l2) + 3)
    numbers = dict(result)
    assert list(numbers) == ["linear_top1", "linear_top5", "linear_held_out_top1", "linear_l2"]
    predictions = result.classifier(test.vectors).argmax(dim=1)
    assert numbers["linear_top1"] == pytest.approx(100 * (predictions == test.labels).float().mean().item())
    assert dict(linear_probe(train, test, classes=7)) == numbers
    # The strength that held-out images choose is judged on others, and fitted to all of train.
    again = fit_logistic(train.vectors, train.labels, 7, result.l2)
    torch.testing.assert_close(again(test.vectors), result.classifier(test.vectors), atol=2e-2, rtol=1e-2)


def test_a_linear_probe_needs_two_images_of_a_class():
    with pytest.raises(UsageError):
        linear_probe(blobs(7), blobs(7), classes=7)


@pytest.mark.parametrize("dim", [6, 60])
def test_the_few_shot_probe_is_ridge_regression(dim):
    """Both sides of the closed form: more images than channels, and fewer."""
    train, test = blobs(35, dim=dim), blobs(50, dim=dim, seed=1)
    result = fit_least_squares(train.vectors, train.labels, 7, 50.0)
    x = train.vectors.double().numpy()
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    targets = np.where(np.eye(7)[train.labels.numpy()] > 0, 1.0, -1.0)
    theirs = Ridge(alpha=50.0, solver="cholesky").fit((x - mean) / std, targets)
    expected = theirs.predict((test.vectors.double().numpy() - mean) / std)
    np.testing.assert_allclose(result(test.vectors).numpy(), expected, atol=1e-4)


def test_few_shots_are_drawn_by_class_and_repeat_themselves(monkeypatch):
    train, test = blobs(70, noise=3), blobs(140, seed=1, noise=3)
    drawn = []
    fit = probe_module.fit_least_squares
    monkeypatch.setattr(probe_module, "fit_least_squares", lambda x, y, *rest: drawn.append((x, y)) or fit(x, y, *rest))
    result = few_shot_probe(train, test, classes=NAMES, shots=3, draws=4)
    assert [np.bincount(y, minlength=7).tolist() for _, y in drawn] == [[3] * 7] * 4
    assert not torch.equal(drawn[0][0], drawn[1][0])
    for (x, y), top1 in zip(drawn, result.top1, strict=True):
        right = fit(x, y, 7)(test.vectors).argmax(dim=1) == test.labels
        assert top1 == pytest.approx(100 * right.float().mean().item())
    assert dict(result) == {
        "few_shot3_top1": pytest.approx(np.mean(result.top1)),
        "few_shot3_std": pytest.approx(np.std(result.top1, ddof=1)),
    }
    assert few_shot_probe(train, test, classes=NAMES, shots=3, draws=4).top1 == result.top1
    assert few_shot_probe(train, test, classes=NAMES, shots=3, draws=4, seed=1).top1 != result.top1


def test_too_few_images_for_the_shots():
    with pytest.raises(UsageError) as error:
        few_shot_probe(blobs(33), blobs(7), classes=NAMES)
    assert "5" in str(error.value)
    assert "fox" in str(error.value)
    assert "gnu" in str(error.value)
    assert "4" in str(error.value)
    with pytest.raises(UsageError, match="0"):
        few_shot_probe(blobs(33), blobs(7), classes=NAMES, shots=0)
    with pytest.raises(UsageError, match="0"):
        few_shot_probe(blobs(70), blobs(7), classes=NAMES, draws=0)


# DINO's linear evaluation ---------------------------------------------------------------------------------------------


def scaled_blobs(images: int, seed: int, noise: float = 1.0) -> Embeddings:
    result = blobs(images, seed=seed, noise=noise)
    return Embeddings((result.vectors - 5) / torch.logspace(-2, 2, 12), result.labels, result.index)


def in_batches(images: Embeddings, size: int = 20):
    """The same batches every epoch, in another order each."""

    def epoch(number: int):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(number))
        return [images.rows(part) for part in rows.split(size)]

    return epoch


def test_the_sgd_probe_is_torchs_sgd_on_all_of_train_at_the_rate_that_held_out_images_choose():
    train, test = scaled_blobs(140, 1, noise=2.0), scaled_blobs(70, 2, noise=2.0)
    rates, epochs, batches_of = (1e-4, 1.0, 1e6), 3, in_batches(train)
    result = sgd_probe(batches_of, train, test, classes=7, steps_per_epoch=7, epochs=epochs, rates=rates)
    _, held_out = held_out_split(train.labels.numpy(), 0.2, np.random.default_rng(0))

    def reference(rate: float, left_out: set[int]) -> torch.nn.Linear:
        layer = torch.nn.Linear(12, 7)
        start = torch.randn(12, 7, generator=torch.Generator().manual_seed(0)) * 0.01
        layer.weight.data, layer.bias.data = start.T.clone(), torch.zeros(7)
        solver = torch.optim.SGD(layer.parameters(), lr=rate * 20 / 256, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, epochs * 7)
        for number in range(epochs):
            for batch in batches_of(number):
                remaining = [i for i, place in enumerate(batch.index.tolist()) if place not in left_out]
                solver.zero_grad()
                torch.nn.functional.cross_entropy(layer(batch.vectors[remaining]), batch.labels[remaining]).backward()
                solver.step()
                schedule.step()
        return layer

    choosing = train.rows(held_out)
    for rate in rates[:2]:
        decided = reference(rate, set(held_out.tolist()))(choosing.vectors).argmax(dim=1)
        assert result.held_out_top1[rate] == pytest.approx(100 * (decided == choosing.labels).float().mean().item())
    assert result.rate == 1.0  # one learns nothing in so few steps, one goes astray
    judged = reference(1.0, set())
    assert torch.allclose(result.classifier.weight, judged.weight.T, atol=1e-5)
    numbers = dict(result)
    assert numbers["linear_sgd_top1"] == pytest.approx(
        100 * (judged(test.vectors).argmax(dim=1) == test.labels).float().mean().item()
    )
    assert list(numbers) == ["linear_sgd_top1", "linear_sgd_top5", "linear_sgd_held_out_top1", "linear_sgd_rate"]


def test_the_sgd_probe_survives_rates_that_diverge_and_images_without_labels():
    train, test = scaled_blobs(70, 1), scaled_blobs(35, 2)
    train.labels[3] = -1
    rates = (1e38, 1.0)
    result = sgd_probe(in_batches(train), train, test, classes=7, steps_per_epoch=4, epochs=2, rates=rates)
    assert result.rate == 1.0
    with pytest.raises(UsageError, match="0"):
        sgd_probe(in_batches(train), train, test, classes=7, steps_per_epoch=4, epochs=0)
