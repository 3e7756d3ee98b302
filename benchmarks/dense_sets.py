"""CamVid, Penn-Fudan and BCCD from parquet as folders, with a part of train to choose by and a test to look at once.

    python benchmarks/dense_sets.py camvid-240x180-trainval.parquet pennfudan-half.parquet bccd.parquet --out sets

CamVid: its val is test; the last fifth of each sequence of train is val, since neighbouring frames are alike.
Penn-Fudan: by the digest of the name a fifth is test and a tenth is val. BCCD: as it is split.
"""

import argparse
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

Rows = Sequence[Mapping[str, Any]]
IGNORED = 255


def main() -> None:
    """One folder per file, by what its columns are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for file in given.files:
        table = pq.read_table(file)
        info, rows = json.loads(table.schema.metadata[b"dataset_info"]), table.to_pylist()
        columns, folder = set(table.schema.names), given.out / file.stem.split("-")[0]
        if {"mask", "boxes"} <= columns:
            write_objects(rows, info["label_names"][1:], folder)
        elif "mask" in columns:
            write_masks(rows, info, folder)
        else:
            write_boxes(rows, info["label_names"], folder)
        print(folder, {path.name: len(list(path.iterdir())) for path in sorted(folder.glob("*/*")) if path.is_dir()})


def write_masks(rows: Rows, info: Mapping[str, Any], folder: Path) -> None:
    """`images/SPLIT`, `masks/SPLIT`."""
    sequences = defaultdict(list)
    for row in rows:
        if row["split"] == "train":
            sequences[row["name"].partition("_")[0]].append(row["name"])
    held_out = {name for names in sequences.values() for name in sorted(names)[len(names) - len(names) // 5 :]}
    for row in rows:
        split = "test" if row["split"] == "val" else "val" if row["name"] in held_out else "train"
        numbers = np.array(Image.open(io.BytesIO(row["mask"])))
        numbers[numbers == info["ignore_index"]] = IGNORED
        kept = io.BytesIO()
        Image.fromarray(numbers).save(kept, "PNG")
        write(folder / "images" / split / f"{row['name']}.webp", row["image"])
        write(folder / "masks" / split / f"{row['name']}.png", kept.getvalue())
    names = [name for number, name in enumerate(info["label_names"]) if number != info["ignore_index"]]
    write(folder / "classes.txt", "\n".join(names).encode())


def write_objects(rows: Rows, names: Sequence[str], folder: Path) -> None:
    """`images/SPLIT`, `instances/SPLIT`."""
    for row in rows:
        digit = int(hashlib.sha256(row["name"].encode()).hexdigest(), 16) % 10
        split = {0: "test", 5: "test", 1: "val"}.get(digit, "train")
        write(folder / "images" / split / f"{row['name']}.webp", row["image"])
        write(folder / "instances" / split / f"{row['name']}.png", row["mask"])
    write(folder / "classes.txt", "\n".join(names).encode())


def write_boxes(rows: Rows, names: Sequence[str], folder: Path) -> None:
    """COCO's: `SPLIT/`, `annotations/instances_SPLIT.json`."""
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    kept: dict[str, dict[str, Any]] = defaultdict(lambda: {"images": [], "annotations": [], "categories": categories})
    for index, row in enumerate(rows):
        split = kept[row["split"]]
        width, height = Image.open(io.BytesIO(row["image"])).size
        split["images"].append({"id": index, "file_name": f"{row['name']}.jpg", "width": width, "height": height})
        for (x0, y0, x1, y1), label in zip(row["boxes"], row["labels"], strict=True):
            box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
            number = len(split["annotations"]) + 1
            split["annotations"].append({"id": number, "image_id": index, "category_id": label + 1, **box})
        write(folder / row["split"] / f"{row['name']}.jpg", row["image"])
    for name, split in kept.items():
        write(folder / "annotations" / f"instances_{name}.json", json.dumps(split).encode())


def write(path: Path, content: bytes) -> None:
    """With its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    main()
