"""`patchloom train` beside plain scripts, for the same wall-clock time, one after the other.

The plain scripts are what one would write with timm: RandAugment, AdamW, and a cosine that ends when the time does.
From scratch they train ResNet-18, ResNet-50 and ViT-S; with --init, the same pretrained weights. All are judged once,
on the test images of a dataset (on val images if it has none). Results in --out are not repeated.

    python benchmarks/auto.py flowers/ imagenette/ --time 4m --out results
    python benchmarks/auto.py flowers/ --time 2m --init resmlp_s12:in1k --out results
"""

import argparse
import csv
import json
import math
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

import patchloom
from patchloom.data.datasets import ImageSet
from patchloom.machine import cores, resolve_device
from patchloom.tasks.plan import seconds_of

AUTO = "auto"
SCRATCH = {"resnet18": "resnet18", "resnet50": "resnet50", "vit_s": "vit_small_patch16_224"}
FINE_TUNED = "plain script"
SIZES = {"cpu": 96, "cuda": 224}
BATCHES = {"cpu": 32, "cuda": 128}
RATES = {"resnet18": 1e-3, "resnet50": 1e-3, "vit_s": 5e-4, FINE_TUNED: 1e-4}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
COLUMNS = ("data", "start", "time", "contender", "split", "images", "top1", "low", "high", "seconds", "device")


class Plain(Dataset[tuple[torch.Tensor, int]]):
    """A split as a torch dataset."""

    def __init__(self, images: ImageSet, transform: Any) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images.read(index).convert("RGB")), int(self._images.labels[index])


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+")
    parser.add_argument("--time", default="4m")
    parser.add_argument("--init", default="none", help="pretrained weights for auto and the plain script")
    parser.add_argument("--contenders", nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.device = resolve_device(options.device)
    for data in options.data:
        for contender in options.contenders or contenders(options.init):
            measure(data, contender, options)
    write_tables(options.out)


def contenders(init: str) -> list[str]:
    """Return who competes: from scratch, or from pretrained weights."""
    return [AUTO, *(SCRATCH if init == "none" else [FINE_TUNED])]


def measure(data: str, contender: str, options: argparse.Namespace) -> None:
    """Run one contender, unless it has a result, and append the result."""
    key = {"data": Path(data).stem, "start": options.init, "time": options.time, "contender": contender}
    file = options.out / "results.jsonl"
    if any(key.items() <= line.items() for line in read(file)):
        return
    begun = time.perf_counter()
    result = run_auto(data, key, options) if contender == AUTO else run_plain(data, contender, options)
    low, high = wilson(result["right"], result["images"])
    line = key | {
        "split": result["split"],
        "images": result["images"],
        "top1": round(100 * result["right"] / result["images"], 2),
        "low": round(low, 2),
        "high": round(high, 2),
        "seconds": round(result.get("seconds", time.perf_counter() - begun), 1),
        "device": options.device,
    }
    print(line, flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def run_auto(data: str, key: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Train by the command line and evaluate the run."""
    folder = options.out / "-".join(key.values()).replace("/", "_").replace(":", "_")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "patchloom.cli", "train", data, "--time", options.time, "--out", str(folder)]
    begun = time.perf_counter()
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run([*command, "--init", options.init, "--device", options.device], check=True, stdout=log)
    seconds = time.perf_counter() - begun
    splits = patchloom.open_data(data)
    split = "test" if splits.test is not None else "val"
    top1 = patchloom.load(folder, device=options.device).evaluate(data, split=split).values()["top1"]
    images = len(splits.test if splits.test is not None else splits.val)
    return {"split": split, "images": images, "right": round(top1 * images / 100), "seconds": seconds}


def run_plain(data: str, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a network of timm, or pretrained weights, with a plain loop until the time is over, and test it."""
    begun, limit_s = time.perf_counter(), seconds_of(options.time) or 0.0
    device, splits = torch.device(options.device), patchloom.open_data(data)
    network, size, mean, std = make_network(contender, len(splits.classes), options)
    network.to(device)
    ends = [transforms.ToTensor(), transforms.Normalize(mean, std)]
    augmented = [transforms.RandomResizedCrop(size, (0.35, 1.0)), transforms.RandomHorizontalFlip()]
    train = Plain(splits.train, transforms.Compose([*augmented, transforms.RandAugment(), *ends]))
    batch = min(BATCHES[device.type], len(train))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATES[contender], weight_decay=0.05)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    test = splits.test if splits.test is not None else splits.val
    for images, labels in endless(DataLoader(train, batch, shuffle=True, drop_last=True, num_workers=workers())):
        done = (time.perf_counter() - begun) / limit_s
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = RATES[contender] * min(1.0, done / 0.05) * 0.5 * (1 + math.cos(math.pi * done))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(network(images.to(device, non_blocking=True)), labels.to(device))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    seconds = time.perf_counter() - begun
    middle = [transforms.Resize(round(size / 0.9)), transforms.CenterCrop(size)]
    loader = DataLoader(Plain(test, transforms.Compose([*middle, *ends])), batch, num_workers=workers())
    network.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((network(images.to(device)).argmax(1).cpu() == labels).sum())
    split = "test" if splits.test is not None else "val"
    return {"split": split, "images": len(test), "right": right, "seconds": seconds}


def make_network(contender: str, classes: int, options: argparse.Namespace) -> tuple[nn.Module, int, Any, Any]:
    """Return a network in training mode, its image size, and the mean and std of its pixels."""
    if contender == FINE_TUNED:
        model = patchloom.load(options.init, device="cpu")
        network, used = model.model.reset_head(classes), model.preprocessing
        return network.train(), used.image_size[0], used.mean, used.std
    size = SIZES[torch.device(options.device).type]
    sized = {"img_size": size} if contender == "vit_s" else {}
    return timm.create_model(SCRATCH[contender], num_classes=classes, **sized).train(), size, *IMAGENET


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def workers() -> int:
    """Return the number of loader processes."""
    return min(8, cores())


def wilson(right: int, images: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share, in percent."""
    share, spread = right / images, z * z / images
    middle, width = share + spread / 2, z * math.sqrt(share * (1 - share) / images + spread / images / 4)
    return 100 * (middle - width) / (1 + spread), 100 * (middle + width) / (1 + spread)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def write_tables(out: Path) -> None:
    """Write results.csv and results.md, and print the latter."""
    lines = read(out / "results.jsonl")
    with (out / "results.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(lines)
    rows: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for line in lines:
        cell = f"{line['top1']:.1f} ({line['low']:.1f} … {line['high']:.1f})"
        rows[line["data"], line["start"], line["time"], line["device"]][line["contender"]] = cell
    names = list(dict.fromkeys(line["contender"] for line in lines))
    text = [f"| data | start | time | device | {' | '.join(names)} |", f"|---|---|---|---|{'---|' * len(names)}"]
    text += [f"| {' | '.join(key)} | {' | '.join(row.get(name, '–') for name in names)} |" for key, row in rows.items()]
    (out / "results.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
