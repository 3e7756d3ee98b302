"""torchvision's own Mask R-CNN (or Faster R-CNN) with a ResNet-50 from scratch, beside a run of patchloom.

The same pictures, canvases, batches and minutes, judged by the same code:

    patchloom train pennfudan-half.parquet --time 9m --out runs/penn
    python benchmarks/detection.py pennfudan-half.parquet --minutes 9 --size 384
    python benchmarks/detection.py bccd.parquet --minutes 9 --size 640 --split test
    python benchmarks/detection.py --speed      # of both with a ResNet-50, on the same pictures

As torchvision's references train it: SGD 0.02 per 16 images, momentum 0.9, weight decay 1e-4, warm-up, ÷10 at 2/3 and
8/9 of the run. It is its `_v2`, whose pyramid and heads have BatchNorm, as training from scratch needs; all layers
learn, in TF32, since in bfloat16 torchvision rounds boxes. With `--adamw` the optimiser is that of patchloom's recipe.
"""

import argparse
import json
import time
from typing import Any

import torch
from timing import per_image_ms
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2, maskrcnn_resnet50_fpn_v2

from patchloom.data.augmentation.canvas import CanvasView, JitteredCanvas
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import LabeledImages
from patchloom.data.sources.source import open_data
from patchloom.evaluation.detection import DetectionReport, in_image_pixels, truth_of
from patchloom.machine import cores
from patchloom.models.dense.detector import make_detector
from patchloom.models.registry import build_model
from patchloom.objectives.detection import targets_of
from patchloom.recipes import get_recipe
from patchloom_runtime.images.samples import EXTENT


class AsGiven(nn.Module):
    """In place of torchvision's transform: normalised canvases as they are."""

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        """One tensor of all."""
        from torchvision.models.detection.image_list import ImageList

        shown = torch.stack(images)
        mean, std = (
            torch.tensor(v, device=shown.device)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )
        return ImageList((shown / 255 - mean) / std, [tuple(shown.shape[2:])] * len(images)), targets

    def postprocess(self, result: Any, sizes: Any, originals: Any) -> Any:
        """On the canvas."""
        del sizes, originals
        return result


def judged(model: nn.Module, images: LabeledImages, size: int, device: str) -> dict[str, float]:
    """Average precision, as patchloom counts it."""
    loader = Loader(
        images.with_parts(), CanvasView((size, size)), batch_size=8, shuffle=False, drop_last=False, workers=cores()
    )
    truths, found = {}, {}
    model.eval()
    with torch.no_grad():
        for batch in loader.epoch(0):
            outputs = model(list(batch.images.to(device).float()))
            for index, extent, output in zip(batch.index.tolist(), batch.parts[EXTENT].tolist(), outputs, strict=True):
                found[index] = in_image_pixels(output, extent)
                truths[index] = truth_of(images.objects(index), tuple(extent[2:]))
    loader.close()
    order = sorted(found)
    return dict(DetectionReport(images.images.object_names, [truths[i] for i in order], [found[i] for i in order]))


def main() -> None:
    """Train for the minutes given, then judge once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--split", default="val")
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.speed:
        time_both(device)
        return
    splits, recipe = open_data(given.data, labeled=False), get_recipe("detection_small")
    train, test = splits.train, getattr(splits, given.split)
    assert isinstance(train, LabeledImages)
    masks = train.images.tells_objects_apart
    make = maskrcnn_resnet50_fpn_v2 if masks else fasterrcnn_resnet50_fpn_v2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = make(weights=None, weights_backbone=None, num_classes=len(train.images.object_names) + 1)
    model.transform = AsGiven()
    model.to(device)
    transform = JitteredCanvas(recipe.augment, (given.size, given.size), recipe.detect)
    parts = ("instances", "boxes") if masks else ("boxes",)
    loader = Loader(train.with_parts(*parts), transform, batch_size=given.batch, workers=cores(), pin=device == "cuda")
    peak = recipe.optim.lr if given.adamw else 0.02 * given.batch / 16
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), peak, weight_decay=0.05)
        if given.adamw
        else torch.optim.SGD(model.parameters(), peak, momentum=0.9, weight_decay=1e-4)
    )
    begun, budget_s, step, epoch = time.perf_counter(), 60 * given.minutes, 0, 0
    while (done := (time.perf_counter() - begun) / budget_s) < 1:
        model.train()
        for batch in loader.epoch(epoch):
            done = min(1.0, (time.perf_counter() - begun) / budget_s)
            drop = 1 - done if given.adamw else 0.1 ** ((done > 2 / 3) + (done > 8 / 9))
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1, (step + 1) / 200) * drop
            moved = batch.to(device)
            losses = model(list(moved.images.float()), targets_of(moved, masks, (given.size, given.size)))
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            step += 1
        epoch += 1
        if epoch % 20 == 0:
            print(f"epoch {epoch}, step {step}, loss {loss.item():.3f}, {done:.0%}", flush=True)
    loader.close()
    print(
        json.dumps({"model": make.__name__, "steps": step, "epochs": epoch, **judged(model, test, given.size, device)})
    )


def time_both(device: str, objects: int = 10) -> None:
    """Milliseconds per picture of training and of finding: a ResNet-50 under Mask R-CNN with BatchNorm in its heads."""
    side, count = (512, 8) if device == "cuda" else (128, 2)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    images = torch.rand(count, 3, side, side, device=device)
    corners = side * torch.rand(count, objects, 2, 2, device=device).sort(dim=2).values
    boxes = (corners + torch.tensor([[0.0, 0.0], [8.0, 8.0]], device=device)).clamp(max=side).flatten(2)
    targets = []
    for own in boxes:
        masks = torch.zeros(objects, side, side, dtype=torch.uint8, device=device)
        for mask, (x0, y0, x1, y1) in zip(masks, own.round().int().tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        labels = torch.randint(1, 81, (objects,), device=device)
        targets.append({"boxes": own, "labels": labels, "masks": masks})
    theirs = maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=81)
    theirs.transform = AsGiven()
    backbone = build_model("resnet50_attention_pool", pool="average", num_classes=0, image_size=(side, side))
    ours = make_detector(backbone, 80, masks=True, norm="batch", proposals=1000, regions=512, box_head="convolutions")
    sizes = [(side, side)] * count
    calls: dict[str, tuple[nn.Module, Any]] = {
        "torchvision, TF32": (theirs, lambda learning: theirs(list(images), targets if learning else None)),
        "patchloom, TF32": (ours, lambda learning: ours(images, sizes, targets if learning else None)),
        "patchloom, bfloat16": (ours, lambda learning: ours(images, sizes, targets if learning else None)),
    }
    for name, (network, call) in calls.items():
        network.to(device)
        optimizer = torch.optim.AdamW(network.parameters(), 1e-5)
        rounded = torch.autocast(device, torch.bfloat16, enabled=name.endswith("bfloat16"))

        def step(call: Any = call, optimizer: Any = optimizer, rounded: Any = rounded) -> None:
            with rounded:
                losses = call(True)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()

        def find(call: Any = call, rounded: Any = rounded) -> None:
            with rounded, torch.no_grad():
                call(False)

        training = per_image_ms(step, count, device)
        network.eval()
        row = {"who": name, "train_ms": training, "find_ms": per_image_ms(find, count, device)}
        print(json.dumps(row | {"parameters": sum(p.numel() for p in network.parameters())}), flush=True)
        network.train()


if __name__ == "__main__":
    main()
