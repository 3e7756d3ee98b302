"""When Grafit gains over cross-entropy: coarse labels teach, fine ones judge; CIFAR-100, imagenette, tiles of CamVid.

    python benchmarks/grafit_gain.py prepare ../shared/data --to carry        # needs pyarrow; zips of encoded images
    python benchmarks/grafit_gain.py measure carry --set cifar100 --part choose --minutes 9 --out choose.jsonl
    python benchmarks/grafit_gain.py measure carry --set cifar100 --part test --minutes 9 --chosen choose.jsonl \
        --out test.jsonl
    python benchmarks/grafit_gain.py table choose.jsonl test.jsonl

    # A second round: further settings on what is held out, then the best of both rounds once by the test images.
    python benchmarks/grafit_gain.py measure carry --set cifar100 --part choose --settings grafit,2,4,120 \
        cross_entropy,1,0,120 --out choose-2.jsonl
    python benchmarks/grafit_gain.py measure carry --set cifar100 --part test --chosen choose.jsonl choose-2.jsonl \
        --methods cross_entropy grafit --base-only --out test-2.jsonl

Three parts of the training images: most of them teach, a twentieth chooses the epoch whose weights are kept (by coarse
labels), and a tenth is held out. `choose` changes one thing at a time and judges by what is held out. `test` takes each
method as it was best there, trains it with what was held out too, and judges once by the test images, with three seeds.
The runs share the machine; each result is a JSON line as it comes, appended to --out. What stands there, or in --done,
is not run again. Runs that would not end in time are not begun, those that did not are stopped and named.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

METHODS = {"cross_entropy": "classification", "grafit": "grafit", "grafit_fc": "grafit_fc"}
HELD_OUT, CHOOSES_EPOCH = 0.1, 0.05  # of the training images
SEEDS = (0, 1, 2)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t of so many runs, two-sided
TILE = 20  # pixels of CamVid's photos
LEAST_S, SPARE_S = 30.0, 12.0  # a run takes at least so long; and so long before the end the rest is stopped

CIFAR_10 = {
    "in water": ("aquatic_mammals", "fish"),
    "plants": ("flowers", "trees"),
    "kitchen": ("food_containers", "fruit_and_vegetables"),
    "house": ("household_electrical_devices", "household_furniture"),
    "crawling": ("insects", "non-insect_invertebrates"),
    "large animals": ("large_carnivores", "large_omnivores_and_herbivores"),
    "outdoor": ("large_man-made_outdoor_things", "large_natural_outdoor_scenes"),
    "smaller mammals": ("medium_mammals", "small_mammals"),
    "people and reptiles": ("people", "reptiles"),
    "vehicles": ("vehicles_1", "vehicles_2"),
}
CIFAR_4 = {
    "cold-blooded or in water": ("in water", "crawling", "people and reptiles"),
    "mammals": ("large animals", "smaller mammals"),
    "made": ("kitchen", "house", "vehicles"),
    "grown": ("plants", "outdoor"),
}
IMAGENETTE_4 = {
    "animal": ("tench", "English springer"),
    "device": ("cassette player", "chain saw", "French horn"),
    "street": ("church", "garbage truck", "gas pump"),
    "sport": ("golf ball", "parachute"),
}
IMAGENETTE_2 = {
    "open": ("tench", "English springer", "church", "golf ball", "parachute"),
    "machine": ("cassette player", "chain saw", "French horn", "garbage truck", "gas pump"),
}
STREET_4 = {
    "ground": ("road", "pavement"),
    "built": ("building", "fence", "sign_symbol"),
    "grown": ("tree", "sky"),
    "moving": ("car", "pedestrian", "bicyclist"),
}


@dataclass(frozen=True)
class Photos:
    """A set: how its images are shown, and what is tried on it. The first of each list is the base."""

    size: int
    patch: int
    batch: int
    epochs: tuple[int, ...]
    coarse: tuple[int, ...]  # numbers of coarse classes; the last is that of the fine ones
    per_class: tuple[int, ...]  # training images; 0 for all
    weights: tuple[float, ...] = (1.0, 0.5, 2.0, 4.0)  # λ
    views: tuple[int, ...] = (2, 4)
    dim: int = 64
    depths: tuple[int, int, int] = (1, 2, 2)
    groups: Mapping[int, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    in_order: bool = False  # neighbours in the list are alike, as frames of a film: what is held out is one piece of it


SETS = {
    "cifar100": Photos(32, 2, 256, (30, 15, 60), (20, 10, 4, 100), (0, 100, 25)),
    "imagenette": Photos(96, 4, 64, (60, 30, 120), (4, 2, 10), (0, 60, 20), groups={4: IMAGENETTE_4, 2: IMAGENETTE_2}),
    "street": Photos(32, 2, 64, (60, 30, 120), (4, 10), (0, 60, 20), groups={4: STREET_4}, in_order=True),
}


@dataclass(frozen=True)
class Setting:
    """One run."""

    photos: str
    part: str
    method: str
    coarse: int
    per_class: int
    views: int
    weight: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return "-".join(str(value) for value in asdict(self).values())


# What is tried --------------------------------------------------------------------------------------------------------


def to_choose(name: str, seeds: Sequence[int]) -> Iterator[Setting]:
    """The base of every method, then one thing changed at a time; cross-entropy where it differs for it too."""
    photos = SETS[name]
    first = (photos.coarse[0], photos.per_class[0], photos.views[0], photos.weights[0], photos.epochs[0])
    for seed in seeds:
        by_method = []
        for method in METHODS:
            own = Setting(name, "choose", method, *first, seed)
            if method == "cross_entropy":
                own = replace(own, views=1, weight=0.0)
            changed = [own, *(replace(own, epochs=epochs) for epochs in photos.epochs[1:])]
            changed += [replace(own, coarse=coarse) for coarse in photos.coarse[1:]]
            changed += [replace(own, per_class=images) for images in photos.per_class[1:]]
            if method != "cross_entropy":
                changed += [replace(own, weight=weight) for weight in photos.weights[1:]]
                changed += [replace(own, views=views) for views in photos.views[1:]]
            by_method.append(changed)
        for some in zip_longest(*by_method):  # of a measurement that is cut short, all methods have a part
            yield from (setting for setting in some if setting)


def as_given(name: str, seeds: Sequence[int], settings: Sequence[str]) -> Iterator[Setting]:
    """METHOD,VIEWS,λ,EPOCHS each, on the set's own groups and all its images."""
    photos = SETS[name]
    for seed in seeds:
        for method, views, weight, epochs in (setting.split(",") for setting in settings):
            kind = (photos.coarse[0], photos.per_class[0])
            yield Setting(name, "choose", method, *kind, int(views), float(weight), int(epochs), seed)


def to_test(
    name: str, seeds: Sequence[int], results: Sequence[Mapping[str, Any]], methods: Sequence[str]
) -> Iterator[Setting]:
    """Each method as it was best on what was held out; the base first, then other classes and numbers of images."""
    photos = SETS[name]
    chosen = {method: best(name, method, results) for method in methods}
    kinds = [(photos.coarse[0], photos.per_class[0])]
    kinds += [(coarse, photos.per_class[0]) for coarse in photos.coarse[1:]]
    kinds += [(photos.coarse[0], images) for images in photos.per_class[1:]]
    for coarse, images in kinds:
        for seed in seeds:
            for setting in chosen.values():
                yield replace(setting, part="test", coarse=coarse, per_class=images, seed=seed)


def best(name: str, method: str, results: Sequence[Mapping[str, Any]]) -> Setting:
    """Among views, λ and epochs at the base: the best mean of kNN and mAP over its seeds, on what was held out."""
    photos, found = SETS[name], dict[Setting, list[float]]()
    for row in results:
        setting = Setting(**row["setting"])
        at_base = (setting.coarse, setting.per_class) == (photos.coarse[0], photos.per_class[0])
        if (setting.photos, setting.part, setting.method) == (name, "choose", method) and at_base:
            found.setdefault(replace(setting, seed=0), []).append((row["knn"] + row["map"]) / 2)
    if not found:
        raise SystemExit(f"--chosen has no held-out result of {method} on {name}; run --part choose first")
    return max(found, key=lambda setting: statistics.mean(found[setting]))


# Data -----------------------------------------------------------------------------------------------------------------


def prepare(source: Path, to: Path) -> None:
    """Write the zips: encoded images as they are, test and train apart, CIFAR-100's train in three balanced parts."""
    to.mkdir(parents=True, exist_ok=True)
    rows = [row for part in range(3) for row in _rows(source / f"cifar100-train-{part}of3.parquet")]
    parts: list[list[tuple[str, bytes]]] = [[], [], []]
    seen: dict[str, int] = {}
    for name, image in rows:
        seen[name] = seen.get(name, 0) + 1
        parts[seen[name] % 3].append((name, image))
    for number, some in enumerate(parts):
        _write(to / f"cifar100-train-{number}.zip", "train", some, f"{number}-")
    _write(to / "cifar100-test.zip", "test", _rows(source / "cifar100-test.parquet"))
    _write(to / "imagenette-train.zip", "train", _rows(source / "imagenette160-train.parquet"))
    _write(to / "imagenette-test.zip", "test", _rows(source / "imagenette160-val.parquet"))
    for split, most in (("train", 250), ("val", 60)):
        tiles = _tiles(source / "camvid-240x180-trainval.parquet", split, most)
        place = "train" if split == "train" else "test"
        _write(to / f"street-{place}.zip", place, tiles)
    coarse = _coarse_of(source / "cifar100-test.parquet")
    (to / "cifar100.json").write_text(json.dumps(coarse, indent=1))
    for path in sorted(to.iterdir()):
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


def _rows(path: Path) -> Iterator[tuple[str, bytes]]:
    table, info = _table(path)
    for label, image in zip(table["label"].to_pylist(), table["image"].to_pylist(), strict=True):
        yield info["label_names"][label], image


def _table(path: Path) -> tuple[Any, dict[str, Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return table, json.loads(table.schema.metadata[b"dataset_info"])


def _coarse_of(path: Path) -> dict[str, str]:
    table, info = _table(path)
    pairs = set(zip(table["label"].to_pylist(), table["coarse_label"].to_pylist(), strict=True))
    return {info["label_names"][fine]: info["coarse_label_names"][coarse] for fine, coarse in sorted(pairs)}


def _tiles(path: Path, split: str, most: int) -> Iterator[tuple[str, bytes]]:
    """Tiles of 20 pixels of CamVid's photos, by the class that fills a third of one and more than any other.

    Those of poles are left out: there are twelve.
    """
    import io

    import numpy as np
    from PIL import Image

    table, info = _table(path)
    found: dict[str, list[bytes]] = {}
    for row in table.to_pylist():
        if row["split"] != split:
            continue
        picture = Image.open(io.BytesIO(row["image"])).convert("RGB")
        mask = np.asarray(Image.open(io.BytesIO(row["mask"])))
        for top in range(0, mask.shape[0] - TILE + 1, TILE):
            for left in range(0, mask.shape[1] - TILE + 1, TILE):
                counts = np.bincount(mask[top : top + TILE, left : left + TILE].ravel(), minlength=12)
                name = info["label_names"][int(counts.argmax())]
                if name not in ("unlabelled", "pole") and counts.max() >= 0.35 * TILE * TILE:
                    packed = io.BytesIO()
                    picture.crop((left, top, left + TILE, top + TILE)).save(packed, "PNG")
                    found.setdefault(name, []).append(packed.getvalue())
    for name, tiles in sorted(found.items()):
        yield from ((name, tile) for tile in _evenly(tiles, most))


def _evenly(items: list[Any], most: int) -> list[Any]:
    """So many of them, from first to last."""
    return items if len(items) <= most else [items[place * len(items) // most] for place in range(most)]


def _write(
    path: Path, split: str, images: Iterator[tuple[str, bytes]] | list[tuple[str, bytes]], start: str = ""
) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for number, (name, image) in enumerate(images):
            suffix = "jpg" if image[:2] == b"\xff\xd8" else "png" if image[:4] == b"\x89PNG" else "webp"
            packed.writestr(f"{split}/{name}/{start}{number:05d}.{suffix}", image)


def unpack(carried: Path, name: str, to: Path) -> Path:
    """All images of a set: train/CLASS and test/CLASS, of the zips that are there."""
    zips = sorted(carried.glob(f"{name}-*.zip"))
    if not zips:
        raise SystemExit(f"{carried} has no {name}-*.zip; make them with prepare")
    whole = to / name / "whole"
    for path in zips:
        if not (done := to / name / f".{path.stem}").exists():
            with zipfile.ZipFile(path) as packed:
                packed.extractall(whole)
            done.touch()
    return whole


def folders(setting: Setting, whole: Path) -> tuple[Path, Path]:
    """The data to train on and those to judge by, as links: train and val each; made once for each kind."""
    there = sum(len(os.listdir(folder)) for folder in (whole / "train").iterdir())  # another zip makes other folders
    of = whole.parent / f"{setting.part}-{setting.per_class}-of-{there}"
    if not (of / ".done").exists():
        for folder in sorted((whole / "train").iterdir()):
            files = sorted(folder.iterdir())
            if not SETS[setting.photos].in_order:
                random.Random(f"{folder.name} {len(files)}").shuffle(files)
            files = _evenly(files, setting.per_class or len(files))
            held, epoch = (max(1, round(share * len(files))) for share in (HELD_OUT, CHOOSES_EPOCH))
            chooses, held_out, teach = files[:epoch], files[epoch : epoch + held], files[epoch + held :]
            queries = held_out
            if setting.part == "test":
                teach, queries = teach + held_out, sorted((whole / "test" / folder.name).iterdir())
            collection = teach + (chooses if setting.part == "test" else [])
            for place, some in (
                ("fit/train", teach), ("fit/val", chooses), ("judge/train", collection), ("judge/val", queries)
            ):  # fmt: skip
                (of / place / folder.name).mkdir(parents=True, exist_ok=True)
                for file in some:
                    os.link(file, of / place / folder.name / file.name)
        (of / ".done").touch()
    return of / "fit", of / "judge"


def taxonomy(setting: Setting, carried: Path, whole: Path) -> Path:
    """A file of class → coarse class; of the set's own first groups where the fine classes are trained."""
    photos = SETS[setting.photos]
    classes = sorted(folder.name for folder in (whole / "train").iterdir())
    number = setting.coarse if setting.coarse < len(classes) else photos.coarse[0]
    if setting.photos == "cifar100":
        own = json.loads((carried / "cifar100.json").read_text())
        for size, groups in ((10, CIFAR_10), (4, CIFAR_4)):
            if number <= size:
                above = {name: group for group, names in groups.items() for name in names}
                own = {name: above[coarse] for name, coarse in own.items()}
    else:
        own = {name: group for group, names in photos.groups[number].items() for name in names}
    path = whole.parent / f"taxonomy-{number}.json"
    path.write_text(json.dumps({name: own[name] for name in classes}))
    return path


# Runs -----------------------------------------------------------------------------------------------------------------


def one(given: Mapping[str, Any]) -> dict[str, Any]:
    """Train and judge one setting, in a process of its own."""
    import torch

    import patchloom

    torch.set_num_threads(1)
    setting, options = Setting(**given["setting"]), given["options"]
    photos, whole, carried = SETS[setting.photos], Path(given["whole"]), Path(given["carried"])
    tree = str(taxonomy(setting, carried, whole))
    begun = time.monotonic()
    changes = {
        "objective.method": METHODS[setting.method],
        "seed": setting.seed,
        "model.options.dim": options["dim"] or photos.dim,
        "model.options.depths": photos.depths,
        "model.options.patch_size": photos.patch,
    }
    if setting.method != "cross_entropy":
        changes |= {"views.number": setting.views, "grafit.instance_weight": setting.weight}
    fine = len(list((whole / "train").iterdir())) == setting.coarse
    images = sum(len(files) for _, _, files in os.walk(Path(given["fit"]) / "train"))
    patchloom.train(
        given["fit"],
        recipe="grafit_small_images",
        out=given["out"],
        level=None if fine else "coarse",
        taxonomy=tree,
        size=photos.size,
        epochs=setting.epochs,
        batch=min(photos.batch, images // 4),  # see recipes/fit.py
        set=changes,
        device=options["device"],
        workers=0,
        compile=False,
    )
    trained = time.monotonic()
    numbers = {}
    for end, trunk in (("", False), *([("_trunk", True)] if setting.method != "cross_entropy" else [])):
        reading = patchloom.Reading(taxonomy=tree)
        found = patchloom.evaluate_levels(
            [given["out"]], given["judge"], device=options["device"], trunk=trunk, batch=512, reading=reading
        )
        (run,) = found.runs.values()
        numbers[f"knn{end}"] = run.values[f"knn{run.neighbours}_top1"]
        numbers[f"coarse_knn{end}"] = run.values[f"knn{run.neighbours}_top1_coarse"]
        numbers |= {
            f"{key}{end}": run.values[key] for key in ("map", "map_conditioned", "map_oracle") if key in run.values
        }
    ended = time.monotonic()
    return numbers | {"train_s": round(trained - begun, 1), "judge_s": round(ended - trained, 1)}


def longer_for(setting: Setting, whole: Path) -> Setting:
    """With fewer images up to four times as many epochs, so that updates do not become too few."""
    if not setting.per_class:
        return setting
    full = statistics.median(len(list(folder.iterdir())) for folder in (whole / "train").iterdir())
    return replace(setting, epochs=round(setting.epochs * min(4.0, max(1.0, full / setting.per_class))))


class Pool:
    """Several runs at once until the time is over."""

    def __init__(self, asked: argparse.Namespace, whole: Path) -> None:
        self._asked, self._whole = asked, whole
        self._deadline = time.monotonic() + 60 * asked.minutes - SPARE_S
        self._going: dict[str, tuple[subprocess.Popen[bytes], Setting, float]] = {}
        self._took: list[float] = []

    def run(self, settings: Sequence[Setting]) -> None:
        """All of them, or as many as there is time for."""
        waiting = list(settings)
        while waiting or self._going:
            left = self._deadline - time.monotonic()
            expected = statistics.median(self._took) if self._took else LEAST_S
            while waiting and len(self._going) < self._asked.at_once and left > expected:
                self._begin(waiting.pop(0))
            if waiting and left <= expected and not self._going:
                break
            self._collect()
            if left <= 0:
                for process, _, _ in self._going.values():
                    process.kill()
                break
            time.sleep(0.2)
        for process, setting, _ in self._going.values():
            process.wait()
            self._say({"cut": asdict(setting)})
        for setting in waiting:
            self._say({"not_begun": asdict(setting)})

    def _begin(self, setting: Setting) -> None:
        fit, judge = folders(setting, self._whole)
        out = self._asked.work / "runs" / setting.name
        options = {"device": self._asked.device, "dim": self._asked.dim}
        given = {"setting": asdict(longer_for(setting, self._whole)), "options": options, "out": str(out)}
        given |= {"fit": str(fit), "judge": str(judge), "whole": str(self._whole), "carried": str(self._asked.carried)}
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{out}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "one", json.dumps(given), f"{out}.json"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._going[str(out)] = (process, setting, time.monotonic())

    def _collect(self) -> None:
        for out, (process, setting, begun) in list(self._going.items()):
            if process.poll() is None:
                continue
            del self._going[out]
            self._took.append(time.monotonic() - begun)
            result = Path(f"{out}.json")
            if process.returncode or not result.is_file():
                last = Path(f"{out}.log").read_text(errors="replace").strip().splitlines()[-3:]
                self._say({"failed": asdict(setting), "said": last})
            else:
                self._say({"setting": asdict(setting)} | json.loads(result.read_text()))

    def _say(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        with self._asked.out.open("a") as file:
            file.write(line + "\n")


def results_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of results in files that are there."""
    lines = [line for path in paths if path.is_file() for line in path.read_text().splitlines() if line]
    return [row for line in lines if "setting" in (row := json.loads(line))]


def measure(asked: argparse.Namespace) -> None:
    """Run what is not there yet."""
    asked.work.mkdir(parents=True, exist_ok=True)
    whole = unpack(asked.carried, asked.set, asked.work)
    seeds = asked.seeds or (SEEDS if asked.part == "test" else SEEDS[:1])
    if asked.settings:
        settings = list(as_given(asked.set, seeds, asked.settings))
    elif asked.part == "choose":
        settings = list(to_choose(asked.set, seeds))
    else:
        settings = list(to_test(asked.set, seeds, results_of(asked.chosen), asked.methods))
    if asked.base_only:
        photos = SETS[asked.set]
        settings = [s for s in settings if (s.coarse, s.per_class) == (photos.coarse[0], photos.per_class[0])]
    if asked.toy:
        settings = [replace(s, epochs=1, per_class=s.per_class and 20) for s in settings]
    there = {Setting(**row["setting"]) for row in results_of([asked.out, *asked.done])}
    Pool(asked, whole).run(list(dict.fromkeys(s for s in settings if s not in there)))


def table(paths: Sequence[Path]) -> None:
    """Means over seeds with 95 % intervals (Student's t), and the gain over cross-entropy of the same seeds."""
    groups: dict[Setting, dict[int, dict[str, Any]]] = {}
    for row in results_of(paths):
        setting = Setting(**row["setting"])
        groups.setdefault(replace(setting, seed=0), {})[setting.seed] = row
    print(
        "| set | part | coarse | per class | method | views | λ | epochs | seeds "
        "| kNN | mAP | kNN, trunk | mAP, trunk |"
    )
    print("|---" * 13 + "|")
    for setting, rows in sorted(groups.items(), key=lambda pair: (pair[0].part, pair[0].name)):
        base = next((of for s, of in groups.items() if _is_base_of(s, setting)), {})
        cells = [_cell(rows, base, key) for key in ("knn", "map", "knn_trunk", "map_trunk")]
        told = [setting.photos, setting.part, setting.coarse, setting.per_class or "all", setting.method]
        told += [setting.views, setting.weight, setting.epochs, len(rows)]
        print("| " + " | ".join(map(str, [*told, *cells])) + " |")


def _is_base_of(base: Setting, setting: Setting) -> bool:
    """Cross-entropy on the same data; while choosing with the same epochs too."""
    same = ("photos", "part", "coarse", "per_class", *(["epochs"] if setting.part == "choose" else []))
    return base.method == "cross_entropy" and all(getattr(base, key) == getattr(setting, key) for key in same)


def _cell(rows: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], key: str) -> str:
    values = [row[key] for row in rows.values() if key in row]
    if not values:
        return ""
    own = key.removesuffix("_trunk")  # cross-entropy has no projector: its vectors are the trunk's
    gains = [row[key] - base[seed][own] for seed, row in rows.items() if seed in base and row is not base[seed]]
    return _spread(values, ".2f") + (f" ({_spread(gains, '+.2f')})" if gains else "")


def _spread(values: Sequence[float], form: str) -> str:
    mean = f"{statistics.mean(values):{form}}"
    if len(values) not in T_95:
        return mean
    return f"{mean} ± {T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("prepare")
    making.add_argument("source", type=Path)
    making.add_argument("--to", type=Path, default=Path("carry"))
    measuring = verbs.add_parser("measure")
    measuring.add_argument("carried", type=Path)
    measuring.add_argument("--set", choices=list(SETS), required=True)
    measuring.add_argument("--part", choices=("choose", "test"), required=True)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--chosen", type=Path, nargs="*", default=[], help="held-out results, for --part test")
    measuring.add_argument("--settings", nargs="*", default=[], help="to choose among, in place of the whole list")
    measuring.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), help="to test")
    measuring.add_argument("--done", type=Path, nargs="*", default=[], help="further results that are not run again")
    measuring.add_argument("--minutes", type=float, default=9.0)
    measuring.add_argument("--at-once", type=int, default=12)
    measuring.add_argument("--seeds", type=int, nargs="*")
    measuring.add_argument("--base-only", action="store_true", help="only the set's own groups and all its images")
    measuring.add_argument("--work", type=Path, default=Path("/tmp/grafit_gain"))
    measuring.add_argument("--device", default="auto")
    measuring.add_argument("--dim", type=int, default=0, help="width of the network, where not the set's own")
    measuring.add_argument("--toy", action="store_true", help="one epoch each, to try the script")
    showing = verbs.add_parser("table")
    showing.add_argument("results", type=Path, nargs="+")
    single = verbs.add_parser("one")
    single.add_argument("given")
    single.add_argument("result", type=Path)
    asked = parser.parse_args()
    if asked.verb == "prepare":
        prepare(asked.source, asked.to)
    elif asked.verb == "measure":
        measure(asked)
    elif asked.verb == "table":
        table(asked.results)
    else:
        asked.result.write_text(json.dumps(one(json.loads(asked.given))))


if __name__ == "__main__":
    main()
