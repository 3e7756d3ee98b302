"""Every family, kind of answer and format at small size: the graph answers as the network does."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from patchloom.data.images.image_batch import normalize
from patchloom.exporters.formats import format_named
from patchloom.exporters.graph import (
    EMBEDDING,
    LOGITS,
    MAPS,
    ClassifierGraph,
    EmbeddingGraph,
    FromPixels,
    GraphPart,
    SegmenterGraph,
)
from patchloom.exporters.parity import TOLERANCE
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
from patchloom.models.network import Network
from patchloom_runtime.engines.engine import ENGINES
from tests.networks import ONE_OF_EACH, small

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Made = tuple[FromPixels, Callable[[Tensor], dict[str, Tensor]], tuple[int, int]]


def classes(name: str) -> Made:
    network = small(name)

    def expected(images: Tensor) -> dict[str, Tensor]:
        features = network.features(images)
        return {LOGITS: network.head(features), EMBEDDING: network.vectors(features)}

    return ClassifierGraph(network, MEAN, STD), expected, network.config.image_size


def vectors(name: str) -> Made:
    network = small(name, num_classes=0)
    made = EmbeddingGraph(network, MEAN, STD)
    return made, lambda images: {EMBEDDING: network.vectors(network.features(images))}, network.config.image_size


def maps(name: str) -> Made:
    network = segmentation(small(name, num_classes=0))
    return SegmenterGraph(network, MEAN, STD), lambda images: {MAPS: network(images)}, network.image_size


def segmentation(backbone: Network) -> SegmentationNetwork:
    """UperNet of few channels on a backbone, with statistics that hide nothing."""
    options = asdict(backbone.config)
    name, size = options.pop("name"), backbone.config.image_size
    config = SegmentationConfig(
        name=name, num_classes=4, image_size=size, backbone=options, channels=8, auxiliary_channels=0
    )
    network = SegmentationNetwork(config).eval()
    network.backbone.load_state_dict(backbone.state_dict())
    torch.manual_seed(0)
    for module in network.head.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2.0)
    torch.nn.init.normal_(network.head.classifier.weight)  # type: ignore[union-attr, arg-type]
    return network


KINDS = {"classify": classes, "embed": vectors, "segment": maps}
QUICK = [("ResMLP", "embed", "torch"), ("ResMLP", "segment", "onnx")]
CASES = [
    pytest.param(family, kind, to, id=f"{family}-{kind}-{to}", marks=[] if case in QUICK else [pytest.mark.slow])
    for case in [(family, kind, to) for family in ONE_OF_EACH for kind in KINDS for to in ENGINES]
    for family, kind, to in [case]
]


@pytest.mark.parametrize(("family", "kind", "to"), CASES)
def test_the_graph_answers_as_the_network_does(family: str, kind: str, to: str, tmp_path: Path) -> None:
    form = format_named(to)
    for package in form.packages:
        pytest.importorskip(package, reason=f"{package} is not installed: {form.install}")
    module, expected, size = KINDS[kind](ONE_OF_EACH[family])
    pixels = np.random.default_rng(0).integers(0, 256, (7, *size, 3), dtype=np.uint8)
    module.eval()
    form.write(GraphPart(module, {"pixels": torch.from_numpy(pixels[:2])}, module.outputs), tmp_path)
    assert not any(b".py" in file.read_bytes() for file in tmp_path.iterdir()), "paths of this machine"
    outputs = form.open(tmp_path, 1)(pixels)
    with torch.inference_mode():
        wanted = expected(normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), MEAN, STD))
    assert set(outputs) == set(wanted)
    for output, tensor in wanted.items():
        array = tensor.numpy()
        assert np.abs(outputs[output] - array).max() <= TOLERANCE["float32"] * max(1.0, np.abs(array).max())
        if output != EMBEDDING:
            assert (outputs[output].argmax(1) == array.argmax(1)).all()
