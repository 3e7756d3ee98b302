"""A user's own module, transforms, loss, metrics, callbacks and optimizer."""

import json
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn

import patchloom
from patchloom.data.augmentation.own_transform import OwnTransform, seeded, transform_batch
from patchloom.engine.signals import Stopped
from patchloom.plugins import identity
from patchloom.tasks.provenance import OtherRunError
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.images.samples import Sample
from tests.forked import forked_ranks
from tests.messages import missing, refused
from tests.reliability.commands import Done, command

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
LABELS = np.arange(40) % 2
DATA = {"train": (PIXELS, LABELS), "val": (PIXELS[:12], LABELS[:12])}
PLAIN: dict[str, Any] = {"size": 16, "epochs": 2, "batch": 8, "device": "cpu", "workers": 0}
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4}


class Net(nn.Module):
    """A convnet with batch statistics and dropout, whose features are the input of `fc`."""

    def __init__(self, num_classes: int = 2, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images).mean((2, 3)))


def penalized(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean()


def mirrored(image: Image.Image) -> Image.Image:
    turned = ImageOps.mirror(image) if random.random() < 0.5 else image
    return turned.rotate(float(torch.rand(()) * 20))


def noisy(images: Tensor) -> Tensor:
    return (images + 0.1 * torch.rand_like(images)).clamp(0, 1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9)


class Interrupt(patchloom.Callback):
    """Sends Ctrl-C once, after a step."""

    after = 0

    def on_step(self, state) -> None:
        if state.step == Interrupt.after:
            Interrupt.after = 0
            signal.raise_signal(signal.SIGINT)


PARTS = {
    "loss": {"loss": penalized, "model": "resmlp_s12", "set": TINY},
    "transform": {"transform": mirrored, "model": "resmlp_s12", "set": TINY},
    "batch transform": {"batch_transform": noisy, "model": "resmlp_s12", "set": TINY},
    "module": {"model": Net},
    "optimizer": {"optimizer": momentum, "model": "resmlp_s12", "set": TINY},
}


@pytest.mark.parametrize("part", PARTS)
def test_a_stopped_run_resumes_to_the_same_weights(part: str, tmp_path: Path) -> None:
    """Two steps into the second of two epochs of five steps."""
    options = PLAIN | PARTS[part]
    whole = patchloom.train(DATA, out=str(tmp_path / "whole"), callbacks=[Interrupt()], **options)
    Interrupt.after = 7
    with pytest.raises(Stopped):
        patchloom.train(DATA, out=str(tmp_path / "stopped"), callbacks=[Interrupt()], **options)
    resumed = patchloom.train(DATA, out=str(tmp_path / "stopped"), callbacks=[Interrupt()], **options)
    assert resumed.metrics == whole.metrics
    expected, weights = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "stopped"))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_workers_do_not_change_a_transform(tmp_path: Path) -> None:
    options = PLAIN | PARTS["transform"] | {"epochs": 1}
    alone = patchloom.train(DATA, out=str(tmp_path / "alone"), **options)
    shared = patchloom.train(DATA, out=str(tmp_path / "shared"), **options | {"workers": 2})
    assert alone.metrics == shared.metrics


class Plain(nn.Module):
    """A network without dropout and batch statistics, so that the division into processes changes nothing."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 4, 4)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.body(images).relu().mean((2, 3)))


def sharpness(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.std()) + len(targets)


def train_with_own_parts(folder: Path) -> None:
    patchloom.train(
        DATA, model=Plain, loss=penalized, transform=mirrored, metrics=[sharpness], optimizer=momentum, out=str(folder),
        **PLAIN,
    )  # fmt: skip


def test_two_processes_learn_with_own_parts_what_one_does(tmp_path: Path) -> None:
    for world in (1, 2):
        running = forked_ranks(partial(train_with_own_parts, tmp_path / str(world)), world)
        output = [process.communicate(timeout=120) for process in running]
        assert [process.returncode for process in running] == [0] * world, output
    lines = ((tmp_path / world / "metrics.jsonl").read_text().splitlines() for world in ("1", "2"))
    one, two = ([json.loads(line) for line in of_run] for of_run in lines)
    evaluations = [[row["values"] for row in rows if row["kind"] == "evaluation"] for rows in (one, two)]
    assert len(evaluations[0]) == len(evaluations[1]) == 2
    for alone, together in zip(*evaluations, strict=True):
        assert together == pytest.approx(alone, rel=1e-4)
        assert together["sharpness"] > 12  # of all val images
    expected, weights = (load_file(tmp_path / world / "weights.safetensors") for world in ("1", "2"))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_changed_part_is_refused(tmp_path: Path) -> None:
    def make(weight: float):
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return weight * F.cross_entropy(outputs, targets)

        return loss

    options = PLAIN | {"model": Net, "out": str(tmp_path / "run"), "epochs": 1}
    patchloom.train(DATA, loss=make(1.0), **options)
    patchloom.train(DATA, loss=make(1.0), **options)
    for other in (make(2.0), penalized, None):
        with refused(OtherRunError, "loss", tmp_path / "run"):
            patchloom.train(DATA, loss=other, **options)
    with refused(OtherRunError, "optimizer", "momentum"):
        patchloom.train(DATA, loss=make(1.0), optimizer=momentum, **options)


# Modules --------------------------------------------------------------------------------------------------------------


def test_a_module_is_trained_loaded_embedded_and_exported(tmp_path: Path) -> None:
    run = patchloom.train(DATA, model=Net(), out=str(tmp_path / "run"), **PLAIN)
    classifier = run.model
    assert classifier.embed(PIXELS[:3]).shape == (3, 4)
    network = classifier.model
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(network.head(network.features(images)), network(images))
    assert network.any_resolution
    with refused(UsageError, "features"):
        flat = patchloom.train(DATA, model=Scaled(), out=str(tmp_path / "flat"), **PLAIN | {"epochs": 1})
        flat.model.embed(PIXELS[0])
    with refused(UsageError, "html"):
        patchloom.export(str(run.folder), str(tmp_path / "page"), to="html")
    pytest.importorskip("onnxscript", reason="exporting needs patchloom[export]")
    exported = patchloom.export(str(run.folder), str(tmp_path / "onnx"), data=DATA)
    assert patchloom.load(exported.folder).predict(PIXELS[0])[0][0] == classifier.predict(PIXELS[0])[0][0]


class Scaled(Net):
    """A network whose logits are not the output of a layer."""

    def forward(self, images: Tensor) -> Tensor:
        return 2 * super().forward(images)


def test_loading_needs_the_module_again(tmp_path: Path, monkeypatch) -> None:
    run = patchloom.train(DATA, model=Net, out=str(tmp_path / "run"), **PLAIN | {"epochs": 1})
    before = run.model.predict(PIXELS[:4])
    monkeypatch.setattr("patchloom.plugins._modules", {})  # another process
    with refused((UsageError, CheckpointError), "Net", "--plugin"):
        patchloom.load(run.folder)
    assert patchloom.load(run.folder, model=Net).predict(PIXELS[:4]) == before
    assert patchloom.load(run.folder, model=Net, kind=patchloom.Classifier).labels == ("0", "1")
    with refused(UsageError, "Classifier", "Segmenter"):
        patchloom.load(run.folder, kind=patchloom.Segmenter)
    with refused(CheckpointError, "body.0.weight", "(5, 3, 3, 3)"):
        patchloom.load(run.folder, model=Net(width=5))


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (Net(num_classes=7), ("Net", "(2, 7)", "(2, 2)")),
        (nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), ("Sequential", "(2, 3, 16, 16)", "size")),
        (nn.Flatten(), ("Flatten", "parameters")),
        (lambda num_classes: num_classes, ("int", "nn.Module")),
    ],
)
def test_a_module_that_does_not_fit_is_refused(model: Any, facts: tuple[str, ...], tmp_path: Path) -> None:
    with refused(UsageError, *facts):
        patchloom.train(DATA, model=model, out=str(tmp_path / "run"), **PLAIN)
    assert not (tmp_path / "run").exists()


# Transforms -----------------------------------------------------------------------------------------------------------


class Albumentation:
    """The protocol of albumentations: called with image=, returns a dict, has its own generator."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def set_random_seed(self, seed: int) -> None:
        self.random.seed(seed)

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        assert not args
        assert not force_apply
        return {"image": data["image"][:, :: self.random.choice((1, -1))]}


@pytest.fixture
def albumentations(monkeypatch) -> Any:
    """The package itself, without its update check and usage data."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    monkeypatch.setenv("ALBUMENTATIONS_NO_TELEMETRY", "1")
    return pytest.importorskip("albumentations")


def test_albumentations(albumentations: Any, tmp_path: Path) -> None:
    def make(share: float = 0.5) -> Any:
        steps = [albumentations.RandomResizedCrop(size=(16, 16)), albumentations.HorizontalFlip(p=share)]
        return albumentations.Compose([*steps, albumentations.ColorJitter(p=0.8)])

    image = Image.fromarray(PIXELS[0])
    for transform in (make(), albumentations.HorizontalFlip(p=0.5)):
        results = [
            OwnTransform(transform, (16, 16)).arrays(Sample(image), random.Random(seed))["image"] for seed in range(6)
        ]
        again = OwnTransform(transform, (16, 16)).arrays(Sample(image), random.Random(0))["image"]
        assert np.array_equal(results[0], again)
        assert len({result.tobytes() for result in results}) > 1
    assert identity(make()) == identity(make()) != identity(make(0.7))
    options = PLAIN | {"model": "resmlp_s12", "set": TINY, "transform": make()}
    runs = [patchloom.train(DATA, out=str(tmp_path / f"{n}"), **options | {"workers": n}) for n in (0, 2)]
    assert runs[0].metrics == runs[1].metrics


def v2_transform():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    return v2.Compose([v2.ToImage(), v2.RandomResizedCrop(16), v2.ToDtype(torch.float32, scale=True)])


@pytest.mark.parametrize("make", [Albumentation, v2_transform, lambda: mirrored, lambda: np.asarray])
def test_transforms_of_one_image(make) -> None:
    transform = OwnTransform(make(), (16, 16))
    image = Image.fromarray(PIXELS[0])
    first, again, other = (transform.arrays(Sample(image), random.Random(seed))["image"] for seed in (1, 1, 2))
    assert (first.shape, first.dtype) == ((16, 16, 3), np.uint8)
    assert np.array_equal(first, again)
    assert make() is np.asarray or not np.array_equal(first, other)


def test_a_result_of_another_size_is_resized() -> None:
    transform = OwnTransform(lambda image: image.resize((64, 32)), (16, 16))
    assert transform.arrays(Sample(Image.fromarray(PIXELS[0])), random.Random(0))["image"].shape == (16, 16, 3)


def test_generators_are_restored() -> None:
    expected = random.Random(3).random()
    random.seed(3)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with seeded(7):
        torch.rand(2)
        random.random()
    assert random.random() == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_transforms_of_a_batch() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    images, labels = torch.from_numpy(PIXELS[:8]).permute(0, 3, 1, 2), torch.arange(8) % 2
    same, kept = transform_batch(lambda images: images, images, labels, 0)
    assert torch.allclose(same, images.float())
    assert torch.equal(kept, labels)
    _, shares = transform_batch(v2.MixUp(num_classes=2), images, labels, 0)
    assert shares.shape == (8, 2)
    with refused(UsageError, "batch_transform", "(8, 3, 16, 16)"):
        transform_batch(lambda images: images[:, :1], images, labels, 0)


@pytest.mark.parametrize(
    ("parts", "facts"),
    [
        ({"transform": lambda image: image.no_such_thing}, ("transform", "AttributeError")),
        ({"transform": "flip"}, ("transform", "str")),
        ({"loss": lambda outputs, targets: outputs + targets}, ("loss", "(2, 2)")),
        ({"loss": lambda outputs: outputs.mean()}, ("loss", "TypeError")),
        ({"loss": nn.NLLLoss(), "set": {"augment.mixup": 0.5}}, ("NLLLoss", "augment.mixup")),
        ({"optimizer": len}, ("optimizer", "int")),
        ({"metrics": [1]}, ("metric", "int")),
        ({"callbacks": [object()]}, ("object", "on_epoch")),
        ({"model": 3}, ("model", "int", "nn.Module")),
        ({"select": "f1"}, ("f1", "top1")),
        ({"loss": penalized, "recipe": "dino_small_images", "set": TINY, "model": "resmlp_s12"}, ("loss", "embedding")),
    ],
)
def test_parts_that_do_not_work_are_refused(parts: dict[str, Any], facts: tuple[str, ...], tmp_path: Path) -> None:
    with refused(UsageError, *facts):
        patchloom.train(DATA, out=str(tmp_path / "run"), **PLAIN | {"model": Net} | parts)


def test_parts_for_several_labels(tmp_path: Path) -> None:
    hot = np.stack([LABELS, 1 - LABELS, LABELS], axis=1)
    data = {"train": (PIXELS, hot), "val": (PIXELS[:12], hot[:12])}
    seen = []

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(tuple(targets.shape))
        return (outputs.sigmoid() - targets).square().mean()

    run = patchloom.train(data, model=Net, loss=squared, transform=mirrored, out=str(tmp_path / "run"), **PLAIN)
    assert run.metrics
    assert {(2, 3), (8, 3)} <= set(seen)
    with refused(UsageError, "metrics", "multilabel"):
        patchloom.train(data, model=Net, metrics=[squared], out=str(tmp_path / "other"), **PLAIN)


# Metrics and callbacks ------------------------------------------------------------------------------------------------


def test_metrics_are_of_all_val_images_and_select_the_weights(tmp_path: Path) -> None:
    seen = []

    def mistakes(outputs: Tensor, targets: Tensor) -> float:
        seen.append((len(outputs), targets.tolist()))
        return float((outputs.argmax(1) != targets).sum()) - 100 * len(seen)  # later is lower

    mistakes.lower_is_better = True
    run = patchloom.train(
        DATA, model=Net, out=str(tmp_path / "run"), metrics=[mistakes], select="mistakes", **PLAIN | {"epochs": 3}
    )
    assert seen[0] == (12, LABELS[:12].tolist())
    assert run.outcome.progress.best_step == 15
    assert run.metrics["mistakes"] + 300 == round(12 * (1 - run.metrics["top1"] / 100))


def test_callbacks_see_the_run_and_can_end_it(tmp_path: Path) -> None:
    events: list[Any] = []

    class Follow:  # any object with some of the methods
        def on_step(self, state) -> None:
            torch.rand(3)
            events.append((state.step, "loss" in state.values()))

        def on_evaluation(self, state) -> None:
            events.append(state.metrics["top1"])

        def on_epoch(self, state) -> None:
            events.append("epoch")
            if state.epoch == 1:
                state.stop()

        def on_end(self, state) -> None:
            events.append((state.epoch, state.epochs, "end"))

    options = PLAIN | {"model": Net, "epochs": 3, "out": str(tmp_path / "run")}
    run = patchloom.train(DATA, callbacks=[Follow()], **options)
    assert events == [*((step, True) for step in range(1, 6)), run.metrics["top1"], "epoch", (1, 3, "end")]
    assert run.outcome.ended == "stopped by a callback"
    patchloom.train(DATA, callbacks=[Follow()], **options)  # does not go on
    assert len(events) == 8


def test_a_callback_can_end_a_run_within_an_epoch(tmp_path: Path) -> None:
    class Stop(patchloom.Callback):
        def on_step(self, state) -> None:
            if state.step == 2:
                state.stop()

    run = patchloom.train(DATA, model=Net, callbacks=[Stop()], out=str(tmp_path / "run"), **PLAIN)
    assert run.outcome.progress.step == 2
    assert run.metrics


# Names and digests ----------------------------------------------------------------------------------------------------


def test_identities_follow_code_and_settings() -> None:
    assert identity(penalized) == identity(penalized)
    assert identity(penalized).startswith(f"{__name__}.penalized ")
    same, other = identity(Net(width=4)), identity(Net(width=5))
    assert identity(Net(width=4)) == same != other
    losses = [nn.CrossEntropyLoss(label_smoothing=smoothing) for smoothing in (0.1, 0.1, 0.2)]
    assert identity(losses[0]) == identity(losses[1])
    typed: dict[str, Any] = {}
    exec("def a(x): return x + 1\ndef b(x): return x + 2\n", typed)  # without a source
    assert identity(typed["a"]).partition(" ")[2] != identity(typed["b"]).partition(" ")[2]
    assert identity(max).startswith("builtins.max ")


# The command line -----------------------------------------------------------------------------------------------------

PLUGIN = """
import torch
from torch import nn
import patchloom

@patchloom.register("model")
def tiny(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size ** 2, num_classes))

@patchloom.register("loss")
def squared(outputs, targets):
    return (outputs.softmax(1)[torch.arange(len(targets)), targets] - 1).square().mean()

@patchloom.register("metric", lower_is_better=True)
def spread(outputs, targets):
    return outputs.std()

@patchloom.register("callback")
class Talk(patchloom.Callback):
    def on_end(self, state):
        print("the end of", state.step, "steps")
"""


def test_a_plugin_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patchloom.plugins._registered", {kind: {} for kind in patchloom.plugins.KINDS})
    monkeypatch.setattr("patchloom.plugins._modules", {})
    Path("parts.py").write_text(PLUGIN)
    common = ["shapes:count=48,size=16", "--out", "run", "--epochs", "1", "--batch", "8", "--device", "cpu"]
    common += ["--workers", "0", "--set", "augment.mixup=0", "--size", "16"]

    def run(*words: str) -> Done:
        """Run a command as another process would."""
        for kind in patchloom.plugins._registered.values():
            kind.clear()
        patchloom.plugins._modules.clear()
        return command(words, monkeypatch, capsys)

    done = run("train", *common, "--plugin", "parts.py", "--select", "spread")
    assert done.code == 0, done.errors
    assert missing(done.output, "the end of", "spread", "squared", "tiny") == []
    done = run("train", *common)
    assert done.code == 2  # its parts are missing
    Image.fromarray(PIXELS[0]).save("a.png")
    done = run("predict", "run", "a.png")
    assert done.code != 0
    assert missing(done.errors, "tiny", "--plugin") == []
    assert run("predict", "run", "a.png", "--plugin", "parts.py").code == 0
    Path("empty.py").write_text("")
    done = run("predict", "run", "a.png", "--plugin", "empty.py")
    assert done.code == 2
    assert missing(done.errors, "empty.py", "register") == []
    done = run("export", "run", "--out", "artifact", "--to", "torch", "--plugin", "parts.py")
    assert done.code == 0, done.errors
    Path("wrong.py").write_text("1 / 0")
    assert "ZeroDivisionError" in run("predict", "run", "a.png", "--plugin", "wrong.py").errors
