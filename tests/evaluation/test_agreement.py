import numpy as np
import pytest
import torch

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.evaluation.agreement import disagreement, head_decisions, token_cosines
from patchloom.evaluation.classification import evaluate
from patchloom_runtime.errors import UsageError
from tests.networks import images, small


def test_disagreement_is_the_share_of_different_decisions():
    decisions = {"groundtruth": [0, 1, 2, 3], "convnet": np.array([0, 1, 2, 0]), "deit": torch.tensor([1, 1, 0, 0])}
    table = disagreement(decisions)
    assert table.names == ("groundtruth", "convnet", "deit")
    assert table.shares.tolist() == [[0, 0.25, 0.75], [0.25, 0, 0.5], [0.75, 0.5, 0]]
    assert table.between("deit", "convnet") == 0.5


@pytest.mark.parametrize(
    ("decisions", "facts"), [({"a": [1, 2], "b": [1]}, ("a: 2", "b: 1")), ({}, ()), ({"a": []}, ("a: 0",))]
)
def test_only_the_same_images_are_compared(decisions, facts):
    with pytest.raises(UsageError) as error:
        disagreement(decisions)
    assert [fact for fact in facts if fact not in str(error.value)] == []


def test_decisions_of_each_head():
    network = small("deit_s_distilled").train()
    pixels = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    parts = [ImageBatch(pixels[rows], torch.zeros(len(rows)).long(), rows) for rows in torch.arange(6).split(4)]
    chosen = head_decisions(network, parts)
    assert network.training
    network.eval()
    inputs = normalize(pixels, network.pixel_mean, network.pixel_std)
    of_class, of_teacher = network(inputs, both_heads=True)
    expected = {"class": of_class, "distillation": of_teacher, "class+distillation": (of_class + of_teacher) / 2}
    assert list(chosen) == list(expected)
    for name, logits in expected.items():
        assert torch.equal(chosen[name], logits.argmax(dim=1)), name


def test_heads_decide_about_the_images_a_report_is_about():
    network = small("deit_s_distilled", fusion="class")
    pixels = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    labels = torch.tensor([0, 1, -1, 2, 3, 4])
    parts = [ImageBatch(pixels[rows], labels[rows], rows) for rows in (torch.tensor([4, 5, 0]), torch.arange(5))]
    report = evaluate(network, parts, classes=tuple("abcde"))
    assert report.index.tolist() == [0, 1, 3, 4, 5]
    assert head_decisions(network, parts)["class"].tolist() == report.predictions.tolist()


@torch.no_grad()
def test_token_cosines_are_those_of_the_tokens():
    network = small("deit_s_distilled", depth=3)
    inputs = images(network, batch=4)
    result = token_cosines(network, inputs)
    assert result.shape == (4,)
    tokens = network.stem(inputs).flatten(1, 2)
    tokens = network.position(torch.cat([network.class_tokens(4), tokens], dim=1))

    def mean_cosine(tokens: torch.Tensor) -> float:
        cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(tokens[:, 0], tokens[:, 1], strict=True)]
        return sum(cosines) / len(cosines)

    expected = [mean_cosine(network.class_tokens(1))]
    for block in network.blocks:
        tokens = block(tokens)
        expected.append(mean_cosine(tokens))
    assert result.tolist() == pytest.approx(expected, abs=1e-5)
    assert not any(block._forward_hooks for block in network.blocks)


def test_equal_tokens_have_cosine_one_at_every_layer():
    network = small("deit_s_distilled")
    with torch.no_grad():
        network.class_tokens.weight[:, 1] = network.class_tokens.weight[:, 0]
        network.position.weight[:, 1] = network.position.weight[:, 0]
    assert token_cosines(network, images(network)).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert len(token_cosines(small("cait_xxs24", distilled=True), images(network))) == 1 + 2  # class blocks alone


def test_a_network_without_a_distillation_token_is_refused():
    network = small("deit_s")
    with pytest.raises(UsageError) as error:
        token_cosines(network, images(network))
    assert "deit_s" in str(error.value)
    assert "distilled=True" in str(error.value)
