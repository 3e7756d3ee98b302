"""Images a second from a folder of JPEGs: patchloom's loader against timm's, same augmentation, same workers.

    python benchmarks/loader.py [--pictures imagenette160-train.parquet] [--workers 2] [--batch 64] [--rounds 5]

Both sides end with normalised float32 batches in the main process. Rounds alternate, and the best round of each side
counts: whatever else runs on the machine only makes a round slower.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from patchloom.data.augment import train_transform
from patchloom.data.folder import FilePictures
from patchloom.data.loader import Loader, normalise
from patchloom.data.sets import ClassTable, PictureSet
from patchloom.recipes.schema import AugmentPart

SIDE_PIXELS, IMAGE_SIZE = 256, 224
POLICIES = {
    "crop + flip": (AugmentPart(), {}),
    "crop + flip + RandAugment + erasing": (
        AugmentPart(policy="randaugment", policy_magnitude=9, policy_magnitude_std=0.5, erasing=0.25),
        {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
    ),
}


def write_jpegs(folder: Path, parquet: Path | None, count: int) -> None:
    for number, picture in enumerate(pictures(parquet, count)):
        target = folder / f"{number % 10:02d}" / f"{number:05d}.jpg"
        target.parent.mkdir(exist_ok=True)
        picture.resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BICUBIC).save(target, quality=90)


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

    from patchloom.data.augment import posterize

    # Pillow 13 refuses the 0 bits timm asks for; without this its RandAugment stops after some hundred pictures.
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


def our_loader(folder: Path, augment: AugmentPart, workers: int, batch: int) -> Callable[[], Iterable[torch.Tensor]]:
    paths = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.jpg"))
    labels = np.array([int(path[:2]) for path in paths])
    classes = ClassTable(tuple(sorted({path[:2] for path in paths})))
    dataset = PictureSet(FilePictures(folder, paths), np.arange(len(paths)), labels, classes)
    loader = Loader(dataset, train_transform(augment, IMAGE_SIZE), batch_size=batch, workers=workers)
    epochs = iter(range(1_000))
    return lambda: (normalise(b.images) for b in loader.epoch(next(epochs)))


def images_per_second(epoch: Iterable[torch.Tensor]) -> float:
    begin, seen = time.perf_counter(), 0
    for images in epoch:
        seen += len(images)
    return seen / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=Path, help="parquet with encoded images; random pictures without it")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jpegs(folder, args.pictures, args.count)
        for title, (augment, options) in POLICIES.items():
            ours = our_loader(folder, augment, args.workers, args.batch)
            theirs = timm_loader(folder, options, args.workers, args.batch)
            rounds = [(images_per_second(ours()), images_per_second(theirs())) for _ in range(args.rounds + 1)]
            best = [max(side[1:]) for side in zip(*rounds, strict=True)]  # the first round starts the workers
            print(f"{title}: patchloom {best[0]:.0f}, timm {best[1]:.0f} images/s, {best[0] / best[1]:.2f}×", flush=True)


if __name__ == "__main__":
    main()
