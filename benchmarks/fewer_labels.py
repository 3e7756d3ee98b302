"""CIFAR-100 with fewer labels: Grafit from 20 coarse classes, DINO from none; runs, then the tables of docs/results.md.

    python benchmarks/fewer_labels.py cifar100/ --part grafit --out runs       # train/ and val/ of coarse/fine/ folders
    python benchmarks/fewer_labels.py cifar100/ --part dino --out runs
    python benchmarks/fewer_labels.py cifar100/ --part small_views --out runs
    python benchmarks/fewer_labels.py cifar100/ --part grafit --out runs --table        # of what is there already

Options after `--` go to every `patchloom train`. A run that is there already goes on or is left as it is.
"""

import os
from pathlib import Path

import torch
from trainings import options_of, read, train

import patchloom
from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.evaluation.embeddings import embed
from patchloom.evaluation.knn import knn
from patchloom.report.charts import Series, line_chart, svg_file
from patchloom.report.run_report import curve, steps_per_unit
from patchloom.runs.config import read_run_files
from patchloom.runs.metrics import read_metrics
from patchloom.tasks.images.networks import make_network

COARSE = ("--recipe", "grafit_small_images", "--level", "coarse")
VIT = ("--model", "deit_ti", "--set", "model.options.depth=9")
DINO = ("--recipe", "dino_small_images", "--epochs", "56")
TENTH = (
    *("--recipe", "small_images", "--epochs", "150", "--batch", "256"),
    *("--set", "optim.lr=0.002", "--set", "optim.weight_decay=0.1"),
)

# Name → options of `patchloom train`; {out} is the folder of all runs, {tenth} the data with a tenth of the labels.
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "grafit": {
        "cross_entropy": (*COARSE, "--set", "objective.method=classification"),
        "clusterfit": (
            *(*COARSE, "--set", "objective.method=clusterfit"),
            *("--set", "grafit.clusters_of={out}/cross_entropy"),
        ),
        "snca_plus": (*COARSE, "--set", "objective.method=snca_plus", "--set", "views.number=1"),
        "grafit": (*COARSE, "--set", "objective.method=grafit", "--set", "grafit.instance_weight=1"),
        "grafit_fc": (*COARSE, "--set", "grafit.instance_weight=1"),
        "grafit_fc_2": COARSE,  # λ = 2
    },
    "dino": {
        "dino_resmlp": DINO,
        "dino_vit": (*DINO, *VIT),
        "scratch": ("{tenth}", *TENTH),
        "from_dino": ("{tenth}", *TENTH, "--init", "{out}/dino_resmlp"),
    },
    "small_views": {
        f"views_{kind}": (*DINO[:2], "--epochs", "10", "--set", f"dino.small_views={kind}")
        for kind in ("resample", "resize", "none")
    },
}
# Thesis table 2.7, CIFAR-100: ResNet-50, 600 epochs; kNN and mAP.
PAPER = {
    "cross_entropy": "71.8 / 42.5, conditioned 43.1",
    "snca_plus": "72.2 / 35.9",
    "grafit": "77.7 / 52.9, conditioned 55.7, oracle 59.3",
    "grafit_fc": "75.6 / 53.6, conditioned 55.0",
}


def main() -> None:
    """Train what was asked for, then tell."""
    parser = options_of(__doc__, [name for part in RUNS.values() for name in part])
    parser.add_argument("--part", choices=RUNS, required=True)
    given, further = read(parser)
    runs = {name: RUNS[given.part][name] for name in given.only or RUNS[given.part]}
    for name, options in {} if given.table else runs.items():
        data, options = (tenth(given.data), options[1:]) if options[0] == "{tenth}" else (given.data, options)
        train(data, given.out / name, [*options, *further])
    folders = {name: given.out / name for name in runs if (given.out / name / "run.json").exists()}
    if given.part == "grafit":
        tell_levels(folders, given.data)
    else:
        tell_neighbours(folders, given.data)
        draw_neighbours(folders, given.out / f"{given.part}_curves.svg")


def tenth(data: Path) -> Path:
    """The same val, and every tenth picture of each class of train, as links."""
    made = data.with_name(f"{data.name}_tenth")
    if not made.exists():
        for path in sorted(data.glob("train/*/*/")):
            folder = made / "train" / path.name
            folder.mkdir(parents=True)
            for picture in sorted(path.iterdir())[::10]:
                os.link(picture, folder / picture.name)
        for path in data.glob("val/*/*/"):
            (made / "val").mkdir(exist_ok=True)
            os.symlink(path.resolve(), made / "val" / path.name)
    return made


def tell_levels(folders: dict[str, Path], data: Path) -> None:
    """kNN and mAP at the fine level, of networks that saw coarse labels alone, beside the thesis's."""
    found = patchloom.evaluate_levels([str(folder) for folder in folders.values()], str(data), batch=1024)
    print(
        "| method | kNN | mAP | conditioned | oracle | coarse kNN | thesis (ResNet-50) |\n|---|---|---|---|---|---|---|"
    )
    for name, folder in folders.items():
        run = found.runs[folder.name]
        values = run.values
        conditioned = values.get("map_conditioned_softmax", values.get("map_conditioned", float("nan")))
        numbers = [
            *(values[f"knn{run.neighbours}_top1"], values["map"], conditioned),
            *(values.get("map_oracle", float("nan")), values[f"knn{run.neighbours}_top1_coarse"]),
        ]
        print(f"| {name} | " + " | ".join(f"{number:.2f}" for number in numbers) + f" | {PAPER.get(name, '')} |")


def tell_neighbours(folders: dict[str, Path], data: Path) -> None:
    """The best of each run, and for DINO the neighbours of the same network untrained and their course."""
    for name, folder in folders.items():
        rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "evaluation"]
        key = next(iter(rows[0]["values"]))
        course = [round(row["values"][key], 1) for row in rows if row["weights"] == rows[-1]["weights"]]
        best = max(row["values"][key] for row in rows)
        before = f", untrained {untrained(folder, data):.2f}" if key.startswith("knn") else ""
        print(f"{name}: {key} {best:.2f}{before}; {course}")


def draw_neighbours(folders: dict[str, Path], picture: Path) -> None:
    """The student's neighbours over the epochs, of every run that is judged by them."""
    lines = []
    for name, folder in folders.items():
        records = read_metrics(folder / "metrics.jsonl")
        points = curve(records, steps_per_unit(records)[1], "evaluation", "model", "knn20_top1")
        if points:
            lines.append(Series(name, points, len(lines)))
    picture.write_text(svg_file(line_chart(lines, x_label="epoch", y_label="top-1 of the 20 nearest, %")), "utf-8")
    print(picture)


@torch.no_grad()
def untrained(folder: Path, data: Path) -> float:
    """Top-1 of 20 neighbours by the run's network as it started."""
    files, splits = read_run_files(folder), patchloom.open_data(str(data))
    assert files.recipe is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(files.recipe.seed)
    network, shown = make_network(files.recipe, 0).to(device), files.preprocessing
    given = {"batch_size": 1024, "device": device, "workers": 4}
    sets = [
        make_evaluation_loader(part, shown.image_size, shown.crop_ratio, **given) for part in (splits.train, splits.val)
    ]
    vectors = [embed(network, each.epoch(0)) for each in sets]
    return dict(knn(*vectors, classes=len(splits.classes)))["knn20_top1"]


if __name__ == "__main__":
    main()
