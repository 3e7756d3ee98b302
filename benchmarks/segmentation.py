"""segmentation_models_pytorch's UPerNet with a ResNet-34 from scratch, beside a run of patchloom.

The same pictures, windows, batches, losses and minutes, judged by the same code; and the speed of both with equal
backbones (`pip install segmentation-models-pytorch` first):

    patchloom train camvid/ --time 9m --out runs/camvid
    python benchmarks/segmentation.py camvid/ --run runs/camvid --minutes 9 --split test
    python benchmarks/segmentation.py --speed

Augmentation, AdamW, schedule and average of the weights are those of the recipe; the rate is --lr.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import segmentation_models_pytorch as smp
import torch
from timing import per_image_ms
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from patchloom.data.annotations.mask_classes import of_masks
from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import LabeledImages
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.data.sources.source import find_source, split_source
from patchloom.machine import cores
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
from patchloom.objectives.segmentation import IGNORED, SegmentationObjective
from patchloom.recipes import Recipe
from patchloom.runs.config import read_recipe
from patchloom.tasks.segmentation.judge import PixelSet, evaluate_pixels
from patchloom.tasks.segmentation.pixel_classes import PixelClassifier, ViewSettings

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Peer(nn.Module):
    """UPerNet of segmentation_models_pytorch, as patchloom's losses and judges call networks."""

    any_resolution, pixel_mean, pixel_std = True, MEAN, STD

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.network = smp.UPerNet("resnet34", encoder_weights=None, classes=classes)
        self.config, self.image_size = SimpleNamespace(num_classes=classes), (side, side)

    def forward(self, images: Tensor, *, auxiliary: bool = False) -> Any:
        """It has no auxiliary head."""
        logits = self.network(images)
        return (logits, None) if auxiliary else logits


def main() -> None:
    """Train for the minutes given and judge once, or time steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--run", type=Path, help="of patchloom, whose recipe is taken")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--split", default="val")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    if given.speed:
        time_both(device)
        return
    torch.manual_seed(given.seed)
    recipe, splits = read_recipe(given.run), masked_splits(given.data)
    assert recipe is not None, f"{given.run} has no recipe"
    peer, steps = trained(recipe, splits.train, given.lr or recipe.optim.lr, 60 * given.minutes, given.seed, device)
    test = getattr(splits, given.split)
    maps = PixelClassifier(peer.eval(), ViewSettings.of(recipe))  # type: ignore[arg-type]
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        report = evaluate_pixels(maps, PixelSet(test), splits.classes.names, ignored=test.layers["mask"].outside)
    print(json.dumps({"model": "smp.UPerNet(resnet34)", "steps": steps, "lr": given.lr, **dict(report)}))


def masked_splits(data: str) -> Any:
    """Train, val and test with their masks."""
    splits: Any = split_source(of_masks(find_source(data)), labeled=False)
    shown = {name: getattr(splits, name) for name in ("train", "val", "test")}
    return replace(splits, **{name: part and part.with_parts("mask") for name, part in shown.items()})


def trained(
    recipe: Recipe, train: LabeledImages, peak: float, budget_s: float, seed: int, device: str
) -> tuple[Any, int]:
    """The average of the weights, after so many seconds of training."""
    side, ignored = recipe.model.image_size, train.layers["mask"].outside
    peer = Peer(len(train.classes), side).to(device)
    decay = recipe.optim.ema_decay or 0.0
    average = AveragedModel(peer, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    objective = SegmentationObjective(
        classes=len(train.classes), ignored=ignored, auxiliary_weight=0.0, pixel_mean=MEAN, pixel_std=STD
    )
    loader = Loader(
        train,
        train_transform(recipe.augment, side),
        batch_size=recipe.optim.batch_size,
        seed=seed,
        workers=cores(),
        pin=device == "cuda",
    )
    optimizer = torch.optim.AdamW(peer.parameters(), peak, weight_decay=recipe.optim.weight_decay)
    begun, step, epoch, done = time.perf_counter(), 0, 0, 0.0
    while done < 1:
        peer.train()
        for batch in loader.epoch(epoch):
            done = min(1.0, (time.perf_counter() - begun) / budget_s)
            for group in optimizer.param_groups:
                group["lr"] = peak * min(1.0, (step + 1) / 500) * (1 - done) ** recipe.schedule.power
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = objective(peer, batch.to(device), epoch=epoch, step=step)["loss"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), recipe.optim.clip_norm or 1.0)
            optimizer.step()
            average.update_parameters(peer)
            step += 1
        epoch += 1
        if epoch % 50 == 0:
            print(f"epoch {epoch}, step {step}, loss {loss.item():.3f}, {done:.0%}", flush=True)
    loader.close()
    return average.module, step


def time_both(device: str, classes: int = 150) -> None:
    """Milliseconds per image of a training step and of telling all pixels' classes: a ResNet-34 under 256 channels."""
    side, batch = (512, 16) if device == "cuda" else (128, 2)
    size = (side, side)
    backbone = {"backbone": "resnet34", "pool": "average", "num_classes": 0, "image_size": size}
    config = SegmentationConfig(
        name="resnet50_attention_pool",
        num_classes=classes,
        image_size=size,
        backbone=backbone,
        channels=256,
        auxiliary_channels=0,
    )
    ours, theirs = SegmentationNetwork(config).to(device), Peer(classes, side).to(device)
    shown = ImageBatch.of_pixels(np.random.default_rng(0).integers(256, size=(batch, side, side, 3), dtype=np.uint8))
    shown = replace(shown, parts={"mask": torch.randint(classes, (batch, side, side), dtype=torch.uint8)}).to(device)
    objective = SegmentationObjective(
        classes=classes, ignored=IGNORED, auxiliary_weight=0.0, pixel_mean=MEAN, pixel_std=STD
    )
    tells = {"patchloom": PixelClassifier(ours), "smp": lambda given: theirs(normalize(given, MEAN, STD)).argmax(dim=1)}
    for name, network in (("patchloom", ours), ("smp", theirs)):
        rounded = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        optimizer = torch.optim.AdamW(network.parameters(), 1e-4)

        def step(network: Any = network, optimizer: Any = optimizer, rounded: Any = rounded) -> None:
            with rounded:
                loss = objective(network, shown, epoch=0, step=0)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def tell(tells: Any = tells[name], rounded: Any = rounded) -> None:
            with rounded, torch.no_grad():
                tells(shown.images)

        training = per_image_ms(step, batch, device)
        network.eval()
        row = {"who": name, "train_ms": training, "tell_ms": per_image_ms(tell, batch, device)}
        print(json.dumps(row | {"parameters": sum(p.numel() for p in network.parameters())}), flush=True)


if __name__ == "__main__":
    main()
