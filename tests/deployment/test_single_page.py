"""The page's program and scripts: every family predicts as its network does, images are resized as Pillow does.

The scripts run in Node here; `test_single_page_browser.py` opens the page.
"""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import patchloom.exporters.single_page.page as single_page
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.exporters.single_page.drawing import drawing_style
from patchloom.exporters.single_page.kernels import kernels
from patchloom.exporters.single_page.networks import write_network
from patchloom.exporters.single_page.page import described, export_page
from patchloom.exporters.single_page.program import PageProgram, Weights
from patchloom.inference.classifier import Classifier
from patchloom.layers.attention import record_attention
from patchloom.models.network import Network, absorb
from patchloom.models.registry import build_model
from patchloom.report.pictures.attention import class_attention, class_evidence
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from tests.networks import images, small

SCRIPTS = [Path(single_page.__file__).parent / name for name in ("interpreter.js", "images.js", "serve.js")]
SERVE = """
const fs = require("fs"), vm = require("vm")
const { scripts, job } = JSON.parse(fs.readFileSync(0))
for (const script of scripts) vm.runInThisContext(fs.readFileSync(script, "utf8"))
const plain = typed => typed && [...typed]
const jobs = {
  programs: cases => cases.map(({ program, weights, modules, pixels }) =>
    [modules.map(([name, code]) => [name, bytesOf(code)]), []].map(known => {
      const model = makeModel(program, bytesOf(weights), known)
      const { logits, map } = model.run(Float32Array.from(pixels))
      return { logits: plain(logits), map: plain(map), kernels: model.kernels }
    })),
  views: cases => cases.map(one => {
    const input = networkPixels(bytesOf(one.rgba), one.width, one.height, one)
    return { input: plain(input), normalized: plain(normalized(input, one)) }
  }),
}
console.log(JSON.stringify(jobs[job.name](job.cases)))
"""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "resmlp": ("resmlp_s12", {}),
    "resmlp, a class token": ("resmlp_s12", {"pool": "class_mlp"}),
    "resmlp, convolutions and lengths": ("resmlp_s12", {"norm": "l2", "communication": "conv", "position": True}),
    "resmlp, batch statistics": ("resmlp_s12", {"norm": "batch", "communication": "separable", "head": "mlp"}),
    "mixer": ("mixer_b16", {}),
    "mixer, fewer tokens": ("mixer_b16", {"pyramid": {0: 4}}),
    "smlpnet": ("smlpnet_t", {"fusion": "weighted"}),
    "smlpnet, concatenated": ("smlpnet_t", {"depths": (1, 1), "image_size": 32}),
    "deit": ("deit_s", {}),
    "deit, averaged": ("deit_s", {"pool": "average"}),
    "deit, distilled": ("deit_s_distilled", {"fusion": "softmax"}),
    "deit iii": ("deit3_h26x2", {}),
    "cait": ("cait_xxs24", {}),
    "cait, joined": ("cait_xxs24", {"insert_class_at": 0, "class_depth": 0}),
    "cait, distilled and joined": ("cait_xxs24", {"insert_class_at": 1, "distilled": True}),
    "cait, distilled, by position": (
        "cait_xxs24",
        {"communication": "mlp", "class_communication": "mlp", "distilled": True},
    ),
    "resmlp, norm after the sum": ("resmlp_s12", {"norm": "layer", "norm_place": "post"}),
    "patchconvnet": ("patchconvnet_s60", {}),
    "patchconvnet, a token per class": ("patchconvnet_s60", {"class_tokens": "per_class"}),
}


def in_node(name: str, cases: list[Any]) -> list[Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node is installed: the scripts of the page are not run (Debian: apt install nodejs)")
    sent = json.dumps({"scripts": [str(script) for script in SCRIPTS], "job": {"name": name, "cases": cases}})
    done = subprocess.run([node, "-e", SERVE], input=sent, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    answered: list[Any] = json.loads(done.stdout)
    return answered


def classifier_of(network: Network) -> Classifier:
    size = network.config.image_size
    preprocessing = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), size, 0.9)
    count = network.config.num_classes
    labels = tuple(f"class {number}" for number in range(count))
    return Classifier(network, RunFiles(network.config.name, {"num_classes": count}, preprocessing, None, labels))


def described_case(network: Network, x: Tensor, weights: Weights) -> dict[str, Any]:
    program, image, answer = write_network(absorb(network), network.config.image_size, weights)
    known = described(classifier_of(network), program, image, answer, None)
    pixels = x[0].permute(1, 2, 0).flatten().tolist()
    return {"program": known["program"], "modules": known["modules"], "weights": program.encoded(), "pixels": pixels}


@pytest.fixture(scope="module")
def networks() -> dict[str, Network]:
    return {case: small(name, **options) for case, (name, options) in CASES.items()}


@pytest.fixture(scope="module")
def answers(networks: dict[str, Network]) -> dict[tuple[str, str], Any]:
    """(case, form of the weights) → what the vectors' kernels and plain JavaScript answer."""
    forms: list[Weights] = ["fp16", "int8"]
    requests = [(case, form) for case in networks for form in forms]
    cases = [described_case(networks[case], images(networks[case], 1), form) for case, form in requests]
    return dict(zip(requests, in_node("programs", cases), strict=True))


@pytest.mark.parametrize(("form", "tolerance"), [("fp16", 2e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("case", CASES)
def test_the_page_answers_as_the_network(
    case: str, form: str, tolerance: float, networks: dict[str, Network], answers: dict[tuple[str, str], Any]
) -> None:
    with torch.no_grad():
        expected = networks[case](images(networks[case], 1))[0]
    fast, plain = answers[case, form]
    assert fast["kernels"].startswith("WebAssembly")
    assert plain["kernels"] == "JavaScript"
    for answer in (fast, plain):
        worst = (torch.tensor(answer["logits"]) - expected).abs().max().item()
        assert worst <= tolerance * max(1.0, expected.abs().max().item())


def convnet(backbone: str, **options: Any) -> Network:
    """A small one whose statistics fit its random weights."""
    torch.manual_seed(0)
    network = build_model("resnet50_attention_pool", backbone=backbone, image_size=64, num_classes=5, **options).train()
    with torch.no_grad():
        network(torch.randn(8, 3, 64, 64))
        torch.nn.init.normal_(network.classifier.weight, std=0.1)
    return network.eval()


@torch.no_grad()
def stored_as_fp16(network: Network) -> Network:
    """Absorbed, with matrices as the page keeps them: random weights of many layers make much of the rounding."""
    absorbed = absorb(network)
    for layer in absorbed.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            by_tap = isinstance(layer, torch.nn.Conv2d) and layer.groups == layer.in_channels > 1
            rows = layer.weight.flatten(1).T if by_tap else layer.weight.flatten(1)
            largest = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
            rounded = (rows / largest).half().float() * largest
            layer.weight.copy_((rounded.T if by_tap else rounded).reshape(layer.weight.shape))
    return absorbed


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("torchvision:mobilenet_v2", {"pool": "average"}),  # depthwise, ReLU6
        ("torchvision:resnet18", {"pool": "average"}),  # 7×7, largest of 3×3, sums
        ("torchvision:efficientnet_b0", {"pool": "average"}),  # gates, 5×5, SiLU
        ("resnet10t", {"pool": "average"}),  # of timm: means of 2×2
    ],
)
def test_the_page_runs_convnets(backbone: str, options: dict[str, Any]) -> None:
    network = convnet(backbone, **options)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = stored_as_fp16(network)(x)[0]
    ((fast, _),) = in_node("programs", [described_case(network, x, "fp16")])
    assert (torch.tensor(fast["logits"]) - expected).abs().max() < 1e-3 * max(1.0, float(expected.abs().max()))
    assert len(fast["map"]) == 5 * 4  # a map of 2×2 positions for each of the five classes


def test_a_convnet_with_a_head_of_its_own_is_refused_by_name() -> None:
    network = convnet("torchvision:mobilenet_v3_small", pool="average")
    with pytest.raises(UsageError, match=r"torchvision:mobilenet_v3_small.*onnx"):
        write_network(absorb(network), (64, 64), "fp16")


def test_the_maps_of_averages_are_the_patches_logits(
    networks: dict[str, Network], answers: dict[tuple[str, str], Any]
) -> None:
    for case in ("resmlp", "mixer", "smlpnet, concatenated", "deit, averaged"):
        evidence = class_evidence(networks[case], images(networks[case], 1))[0]  # (classes, h, w)
        result = torch.tensor(answers[case, "fp16"][0]["map"]).view(-1, 5).T.reshape(evidence.shape)
        assert (result - evidence).abs().max() < 5e-3 * max(1.0, float(evidence.abs().max())), case


def test_a_token_per_class_shows_what_it_reads(
    networks: dict[str, Network], answers: dict[tuple[str, str], Any]
) -> None:
    case = "patchconvnet, a token per class"
    read = class_attention(networks[case], images(networks[case], 1))[0].weights[0].mean(dim=0)  # (T, h, w)
    result = torch.tensor(answers[case, "fp16"][0]["map"]).view(-1, 5).T.reshape(read.shape)
    assert (result - read).abs().max() < 2e-3


def test_a_class_token_shows_what_each_patch_gave_it(
    networks: dict[str, Network], answers: dict[tuple[str, str], Any]
) -> None:
    network: Any = networks["deit"]
    x, inputs = images(network, 1), []
    branch = network.blocks[-1].tokens
    hook = branch.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad(), record_attention(network) as maps:
        token = network.run_blocks(x)[0, 0]
        hook.remove()
        layer = branch.mix
        weights = maps["blocks.1.tokens.mix"][0][0, :, 0, 1:]  # (heads, N), from the class token to the patches
        values = layer.qkv(branch.norm(inputs[0]))[0, 1:, 2 * 16 :].view(-1, 2, 8)  # (N, heads, d)
        added = (weights.T[..., None] * values).flatten(1) @ layer.proj.weight.T
        spread = (token.var(unbiased=False) + network.norm.eps).sqrt()
        held = (added - added.mean(dim=1, keepdim=True)) / spread * network.norm.weight
        expected = held @ network.classifier.weight.T  # (N, classes)
    result = torch.tensor(answers["deit", "fp16"][0]["map"]).view(expected.shape)
    assert (result - expected).abs().max() < 5e-3 * expected.abs().max()


def test_networks_without_places_have_no_map(answers: dict[tuple[str, str], Any]) -> None:
    for case in ("mixer, fewer tokens", "resmlp, batch statistics"):
        assert answers[case, "fp16"][0]["map"] is None


def test_values_that_live_together_lie_apart(networks: dict[str, Network]) -> None:
    program, *_ = write_network(absorb(networks["deit"]), (32, 32), "int8")
    total = program.described()["floats"]
    buffers = program._buffers
    for number, one in enumerate(buffers):
        assert 0 <= one.at <= one.at + one.floats <= total
        for other in buffers[:number]:
            together = one.first <= other.last and other.first <= one.last
            assert not together or one.at + one.floats <= other.at or other.at + other.floats <= one.at
    assert total < sum(buffer.floats for buffer in buffers) / 2


class RowsFirst(EvaluationTransform):
    """Pillow's resize in the order of all versions before 13, which begins with the columns of some tall images."""

    def resized(self, image: Image.Image, size: tuple[int, int]) -> np.ndarray:
        kind = Image.Resampling[self.interpolation.upper()]
        return np.asarray(image.resize((size[1], image.height), kind).resize((size[1], size[0]), kind))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "box"])
def test_pictures_are_seen_as_pillow_resizes_them(interpolation: str) -> None:
    rng = np.random.default_rng(0)
    cases, expected = [], []
    for (width, height), size, crop, resize in (
        ((53, 37), (16, 16), 0.875, "short_side"),
        ((53, 37), (16, 16), 0.875, "square"),
        ((37, 53), (16, 24), 1.0, "square"),
        ((37, 80), (24, 16), 1.0, "short_side"),
        ((9, 7), (16, 16), 1.0, "short_side"),
        ((16, 16), (16, 16), 1.0, "short_side"),
        ((8, 31), (8, 8), 0.9, "short_side"),
    ):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        rgba = base64.b64encode(image.convert("RGBA").tobytes()).decode()
        settings = {"size": size, "crop": crop, "interpolation": interpolation, "resize": resize}
        normal = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
        cases.append({"rgba": rgba, "width": width, "height": height, **settings, **normal})
        expected.append(RowsFirst(size, crop, interpolation, resize=resize)(image))
    for answer, pixels in zip(in_node("views", cases), expected, strict=True):
        assert answer["input"] == pixels.ravel().tolist()
        batch = normalize(ImageBatch.of_pixels([pixels]).images)[0].permute(1, 2, 0).flatten()
        assert (torch.tensor(answer["normalized"]) - batch).abs().max() < 1e-6


def test_tiny_weights_survive_fp16() -> None:
    """LayerScale of 1e-6 is absorbed by weights that fp16 alone would make 0."""
    program = PageProgram("fp16")
    program.matrix(torch.full((2, 8), 2e-8))
    tensor = program.tensors[0]
    scales = np.frombuffer(program.blob, np.float32, 2, tensor["scales"])
    stored = np.frombuffer(program.blob, np.float16, 16, tensor["at"])
    assert np.allclose(stored.astype(np.float64).reshape(2, 8) * scales[:, None], 2e-8)


def test_modules_are_whole() -> None:
    for fused in (False, True):
        code = kernels(fused=fused)
        assert code.startswith(b"\0asm\1\0\0\0")
        assert len(code) < 4096  # what Chromium compiles at once outside a worker


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mixer_b16", {"untied": True}, "UntiedTokenMLP"),
        ("mixer_b16", {"groups": 2}, r"\bTokenMLP\b"),
    ],
)
def test_what_a_page_cannot_run_is_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    network = small(name, **options)
    with pytest.raises(UsageError, match=words):
        write_network(absorb(network), network.config.image_size, "int8")


def test_wrong_options_are_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        export_page("nowhere", tmp_path / "page.html", weights="int4")
    assert "int4" in str(error.value)
    assert "int8" in str(error.value)
    assert "fp16" in str(error.value)
    with pytest.raises(UsageError, match=str(tmp_path)):
        export_page("nowhere", tmp_path)
    with pytest.raises(UsageError, match="nowhere"):
        export_page("nowhere", tmp_path / "page.html")


def test_drawings_are_grey_and_say_their_ink() -> None:
    stroke = np.zeros((8, 8), np.uint8)
    stroke[1:7, 3:5] = 255
    white = drawing_style([Image.fromarray(stroke)])
    black = drawing_style([Image.fromarray(255 - stroke)])
    assert white is not None
    assert black is not None
    assert (white.ink, white.fills) == ("white", 0.75)
    assert (black.ink, black.fills) == ("black", 0.75)
    assert drawing_style([Image.new("RGB", (8, 8), (10, 200, 30))]) is None
    assert drawing_style([Image.new("L", (8, 8), 0)]) is None
