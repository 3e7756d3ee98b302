"""Images a second: patchloom's loader against others from a folder of JPEGs, and augmentation on a GPU.

    python benchmarks/loader.py --pictures imagenette160-train.parquet --workers 2 --batch 64 --rounds 5
    python benchmarks/loader.py --pictures imagenette160-train.parquet --side 768 --count 500   # larger photographs
    python benchmarks/loader.py --pictures imagenette160-train.parquet --shrinking   # decoding large JPEGs smaller
    python benchmarks/loader.py --device cuda --batch 1024

The first two compare the same augmentation with the same number of workers: timm's loader, torchvision's v2 transforms
on tensors, and litdata's chunks of the same JPEGs where it is installed (ffcv needs OpenCV and a compiler to install).
All sides end with normalised float32 batches in the main process. Rounds alternate; the median of each side stands
with its least and its most, which is the best round: whatever else runs on the machine only makes one slower.
"""

import argparse
import importlib.util
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.augmentation.mixing import draw_blend
from patchloom.data.batches.decoded_dataset import DeviceLoader, Store
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.sampler import step_seed
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, normalize
from patchloom.data.trees.tree import ImageFiles
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images.decode import decode_shrunk
from patchloom_runtime.images.samples import Sample

IMAGE_SIZE = 224
POLICIES = {
    "crop + flip": (AugmentPart(), {}),
    "crop + flip + RandAugment + erasing": (
        AugmentPart(policy="randaugment", policy_magnitude=9, policy_magnitude_std=0.5, erasing=0.25),
        {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
    ),
}
DEVICE_POLICIES = {
    "pad + flip": AugmentPart(crop="pad"),
    "crop + flip": AugmentPart(),
    "crop + flip + RandAugment + erasing": POLICIES["crop + flip + RandAugment + erasing"][0],
    "SRC + flip + 3-Augment + jitter": AugmentPart(crop="simple_random", policy="three_augment", color_jitter=0.3),
    "DINO's first view": AugmentPart(
        crop_min_scale=0.4, color_jitter=0.4, saturation=0.2, hue=0.1, jitter_probability=0.8, grey=0.2, blur=1.0
    ),
}


def write_jpegs(folder: Path, parquet: Path | None, count: int, side: int) -> None:
    for number, picture in enumerate(pictures(parquet, count)):
        target = folder / f"{number % 10:02d}" / f"{number:05d}.jpg"
        target.parent.mkdir(exist_ok=True)
        picture.resize((side, side), Image.Resampling.BICUBIC).save(target, quality=90)


def pictures(parquet: Path | None, count: int) -> Iterable[Image.Image]:
    if parquet is None:
        noise = np.random.default_rng(0)
        for _ in range(count):
            yield Image.fromarray(noise.integers(0, 256, (40, 40, 3), np.uint8))
        return
    import pyarrow.parquet

    for encoded in pyarrow.parquet.read_table(parquet)["image"][:count]:
        yield Image.open(io.BytesIO(encoded.as_py())).convert("RGB")


def timm_loader(folder: Path, options: dict, workers: int, batch: int) -> Callable[[], Iterable[torch.Tensor]]:
    import timm.data
    import timm.data.auto_augment as timm_augment

    from patchloom.data.augmentation.policies import posterize

    # Pillow 13 refuses the 0 bits timm sometimes asks for: without this its RandAugment soon stops.
    names = timm_augment.NAME_TO_OP
    names.update({name: posterize for name in names if name.startswith("Posterize")})
    loader = timm.data.create_loader(
        timm.data.create_dataset("", str(folder)),
        (3, IMAGE_SIZE, IMAGE_SIZE),
        batch,
        is_training=True,
        color_jitter=0.0,
        interpolation="bicubic",
        num_workers=workers,
        device=torch.device("cpu"),
        **options,
    )
    return lambda: (images for images, _ in loader)


def torchvision_transform(options: dict) -> Callable[[Image.Image], torch.Tensor]:
    """timm's options as torchvision's v2 transforms, on uint8 tensors, as its documentation advises."""
    from torchvision.transforms import v2

    policy = [v2.RandAugment(num_ops=2, magnitude=9)] if "auto_augment" in options else []
    erasing = [v2.RandomErasing(options["re_prob"])] if "re_prob" in options else []
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(IMAGE_SIZE, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.RandomHorizontalFlip(),
            *policy,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            *erasing,
        ]
    )


def torchvision_loader(folder: Path, options: dict, workers: int, batch: int) -> Callable[[], Iterable[torch.Tensor]]:
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(folder), torchvision_transform(options))
    loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(
        dataset, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    return lambda: (images for images, _ in loader)


def litdata_loader(folder: Path, options: dict, workers: int, batch: int) -> Callable[[], Iterable[torch.Tensor]]:
    import litdata

    chunks = folder.parent / "chunks"
    if not chunks.exists():
        paths = [str(path) for path in sorted(folder.glob("*/*.jpg"))]
        litdata.optimize(_as_bytes, paths, str(chunks), chunk_bytes="64MB", num_workers=1, start_method="fork")
    transform = torchvision_transform(options)

    class Pictures(litdata.StreamingDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(Image.open(io.BytesIO(super().__getitem__(index)["image"])).convert("RGB"))

    dataset = Pictures(str(chunks), shuffle=True, drop_last=True)
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, persistent_workers=True)
    return lambda: iter(loader)


def _as_bytes(path: str) -> dict[str, bytes]:
    return {"image": Path(path).read_bytes()}


def our_loader(folder: Path, augment: AugmentPart, workers: int, batch: int) -> Callable[[], Iterable[torch.Tensor]]:
    paths = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.jpg"))
    labels = np.array([int(path[:2]) for path in paths])
    classes = ClassTable(tuple(sorted({path[:2] for path in paths})))
    dataset = LabeledImages(ImageFiles(folder, paths), np.arange(len(paths)), labels, classes)
    loader = Loader(dataset, train_transform(augment, IMAGE_SIZE), batch_size=batch, workers=workers)
    epochs = iter(range(1_000))
    return lambda: (normalize(b.images) for b in loader.epoch(next(epochs)))


def images_per_second(epoch: Iterable[torch.Tensor], finish: Callable[[], None] = lambda: None) -> float:
    begin, seen = time.perf_counter(), 0
    for images in epoch:
        seen += len(images)
    finish()
    return seen / (time.perf_counter() - begin)


def shrinking(parquet: Path | None, count: int) -> None:
    """Random resized crops of JPEGs decoded whole and as small as the crop allows: processor time, change in pixels."""
    torch.set_num_threads(1)
    transform = train_transform(AugmentPart(), IMAGE_SIZE)
    for side in (512, 1024, 1536, 2048, 3072, 4096):
        taken, changes, smaller = {"whole": 0.0, "smaller": 0.0}, [], 0
        for seed, picture in enumerate(pictures(parquet, count)):
            file = io.BytesIO()
            picture.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            seen = {}
            for how, reduction in (
                ("whole", lambda size: 1),  # noqa: ARG005
                ("smaller", transform.reduction),
            ):
                begun = time.process_time()
                decoded, whole = decode_shrunk(file.getvalue(), "", reduction)
                sample = Sample(decoded, whole=whole if whole != decoded.size else None)
                seen[how] = transform.arrays(sample, random.Random(seed))["image"].astype(int)
                taken[how] += time.process_time() - begun
            if sample.whole:
                smaller += 1
                changes.append(np.abs(seen["whole"] - seen["smaller"]))
        change = np.stack(changes) if changes else np.zeros(1)
        print(
            f"{side} px: {1000 * taken['whole'] / count:.1f} ms whole, {1000 * taken['smaller'] / count:.1f} ms as "
            f"small as the crop allows ({smaller} of {count} smaller; they change by {change.mean():.2f} of 255 on "
            f"average, {np.percentile(change, 99):.0f} at the 99th percentile)",
            flush=True,
        )


def on_device(device: str, batch: int) -> None:
    """CIFAR-sized pictures augmented on the device: alone, and in front of a compiled ResMLP-S12/4 step."""
    import torch.nn.functional as F

    from patchloom.models.resmlp import ResMLP, ResMLPConfig

    pixels = torch.randint(0, 256, (50_000, 32, 32, 3), dtype=torch.uint8, device=device)
    store = Store(pixels, torch.randint(0, 100, (50_000,), device=device))
    model = ResMLP(ResMLPConfig(image_size=(32, 32), patch_size=4, num_classes=100)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    @torch.compile
    def loss_of(images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return F.cross_entropy(model(images).float(), targets)

    def train(epoch: int, loader: DeviceLoader) -> Iterable[torch.Tensor]:
        for step, batch in enumerate(loader.epoch(epoch)):
            blend = draw_blend(32, 32, mixup=0.8, cutmix=1.0, seed=step_seed(0, epoch, step))
            images = blend.images(normalize(batch.images))
            targets = blend.targets(batch.labels, 100, 0.0, torch.float32)
            loss_of(images, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield images

    for title, augment in DEVICE_POLICIES.items():
        loader = DeviceLoader(store, augment, 32, batch_size=batch)
        images_per_second(train(0, loader))  # compiles
        torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
        rates = [
            max(images_per_second(run(epoch), finish=torch.cuda.synchronize) for epoch in (1, 2, 3))
            for run in (
                lambda epoch, loader=loader: (normalize(b.images) for b in loader.epoch(epoch)),
                lambda epoch, loader=loader: train(epoch, loader),
            )
        ]
        torch.cuda.set_sync_debug_mode("default")
        print(f"{title}: {rates[0]:,.0f} images/s alone, {rates[1]:,.0f} with the training step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=Path, help="parquet with encoded images; random pictures without it")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--side", type=int, default=256, help="pixels of the JPEGs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help="measure augmentation on this device instead, e.g. cuda")
    parser.add_argument("--shrinking", action="store_true", help="measure decoding as small as crops allow instead")
    args = parser.parse_args()
    if args.shrinking:
        shrinking(args.pictures, min(args.count, 40))
        return
    if args.device:
        on_device(args.device, args.batch)
        return
    others = {"timm": timm_loader, "torchvision v2": torchvision_loader}
    if importlib.util.find_spec("litdata"):
        others["litdata"] = litdata_loader
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "photos")
        folder.mkdir()
        write_jpegs(folder, args.pictures, args.count, args.side)
        for title, (augment, options) in POLICIES.items():
            sides = {"patchloom": our_loader(folder, augment, args.workers, args.batch)}
            sides |= {who: make(folder, options, args.workers, args.batch) for who, make in others.items()}
            rates: dict[str, list[float]] = {who: [] for who in sides}
            for number in range(args.rounds + 1):
                for who, epoch in sides.items():
                    rate = images_per_second(epoch())
                    if number:  # the first round starts the workers
                        rates[who].append(rate)
            print(f"{title}, JPEGs of {args.side} pixels, {args.workers} workers, images/s", flush=True)
            for who, found in rates.items():
                ratio = statistics.median(rates["patchloom"]) / statistics.median(found)
                spread = f"{statistics.median(found):.0f} ({min(found):.0f} … {max(found):.0f})"
                print(f"  {who}: {spread}; patchloom / {who} {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
