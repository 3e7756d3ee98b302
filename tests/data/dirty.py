"""Folders with known faults, as users have them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "cat", "dog")


def make_image(seed: int, size: tuple[int, int] = (48, 48)) -> Image.Image:
    """Coloured blots, different for each seed and sure of their hash."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, quality: int = 90, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, **options)
    return file.getvalue()


def make_clean(root: Path) -> Path:
    seed = 0
    for split, count in (("train", 4), ("val", 2)):
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.jpg").write_bytes(jpeg(make_image(seed)))
                seed += 1
    return root


def make_shift(root: Path) -> Path:
    make_clean(root)
    (root / "val" / "bee").mkdir()
    (root / "val" / "bee" / "0.jpg").write_bytes(jpeg(make_image(900)))
    return root


def make_dirty(root: Path) -> Path:
    make_clean(root)
    ant, cat, dog = (root / "train" / name for name in CLASSES)
    whole = jpeg(make_image(100))
    (ant / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (ant / "empty.jpg").write_bytes(b"")
    (ant / "text.jpg").write_text("this is no picture")
    make_image(101, (3000, 2)).save(ant / "strip.png")
    (ant / ".DS_Store").write_bytes(b"x")
    (ant / "notes.txt").write_text("x")
    make_image(102).convert("CMYK").save(cat / "cmyk.jpg")
    grey = np.linspace(0, 65535, 48 * 48).reshape(48, 48).astype(np.uint16)
    Image.fromarray(grey).save(cat / "deep.png")
    make_image(103).convert("RGBA").save(cat / "alpha.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    (cat / "turned.jpg").write_bytes(jpeg(make_image(104), exif=turned))
    frames = [make_image(105), make_image(106)]
    frames[0].save(cat / "moving.gif", save_all=True, append_images=frames[1:])
    make_image(107, (400, 40)).save(dog / "wide.png")
    make_image(108, (8, 8)).save(dog / "tiny.png")
    (root / "train" / "unicorn").mkdir()
    (root / "val" / "zebra").mkdir()
    (root / "val" / "zebra" / "0.jpg").write_bytes(jpeg(make_image(109)))
    (root / "val" / "dog" / "copy.jpg").write_bytes((dog / "0.jpg").read_bytes())
    (cat / "also.jpg").write_bytes((ant / "1.jpg").read_bytes())
    (dog / "again.jpg").write_bytes(jpeg(Image.open(dog / "2.jpg"), quality=60))
    return root
