"""Feature distillation against DINO and labels at equal cost: k-NN, linear probe and fine-tuning.

    python benchmarks/feature_distillation.py --teacher timm:tf_efficientnet_lite0@lite0.safetensors \
        --train imagenette160-train.parquet --test imagenette160-val.parquet --out runs/features-imagenette
    python benchmarks/feature_distillation.py --teacher timm:tf_efficientnet_lite0@lite0.safetensors \
        --train flowers102-136.parquet --out runs/features-flowers

One small network is trained on the same images by each method: without labels by feature distillation and by DINO,
and with labels. The numbers of `EPOCHS` cost about the same CPU time; `--times` multiplies them all. The features are
probed with the labels of all training images, and the networks without labels are fine-tuned for `TUNED` epochs, as
is one with random weights. The network trained with labels has these epochs in addition. The teacher's own features
are probed as well. Without `--test`, TRAIN has a column `split`, whose train and test images are used. Epochs are
selected on images held out of train; test images are looked at once, at the end. A finished row is not repeated, so
`--methods` can do one at a time. `lite0_weights.py` makes the weights.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

import patchloom

EPOCHS = {"feature distillation": 3, "DINO": 6, "labels": 14}
TUNED = 4
METHODS = (*EPOCHS, "random weights", "teacher")
COLUMNS = {"knn20_top1": "k-NN", "linear_top1": "linear", "finetuned": "fine-tuned"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--teacher", required=True)
parser.add_argument("--train", type=Path, required=True)
parser.add_argument("--test", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--images", type=int, default=2000, help="training images, drawn at random")
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--times", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)


def splits_of(options: argparse.Namespace) -> tuple[str, str]:
    """Write the files of the training and test images into OUT, and return their paths."""
    train, test = pq.read_table(options.train), pq.read_table(options.test or options.train)
    if options.test is None:
        train, test = (
            table.filter(pc.field("split") == split).drop_columns(["split"])
            for table, split in ((train, "train"), (test, "test"))
        )
    paths = options.out / "train.parquet", options.out / "test.parquet"
    order = pc.sort_indices(pc.random(len(train), initializer=0))
    for table, path in zip((train.take(order[: options.images]), test), paths, strict=True):
        if not path.exists():
            pq.write_table(table, path)
    return str(paths[0]), str(paths[1])


def train(data: str, out: Path, options: argparse.Namespace, epochs: int, **settings: Any) -> str:
    """Train a ResMLP of 6 layers, unless it is trained already, and return its folder."""
    network = {"model.options.depth": 6, "model.options.dim": 128, "model.options.patch_size": 8, "seed": options.seed}
    changes = network | settings.pop("set", {})
    patchloom.train(
        data, out=str(out), model="resmlp_s12", size=options.size, batch=64, epochs=epochs * options.times, race=False,
        workers=0, device="cpu", set=changes, **settings,
    )  # fmt: skip
    return str(out)


def measured(method: str, options: argparse.Namespace, name: str) -> dict[str, float]:
    """Return the test accuracies of a method: of probes on its features, and fine-tuned."""
    data, test = splits_of(options)
    run, folder, row = None, options.out / name, {}
    if method == "feature distillation":
        run = train(data, folder, options, EPOCHS[method], recipe="distill_features", teacher=options.teacher)
    elif method == "DINO":
        views = {"views.local_size": options.size // 2, "dino.outputs": 1024}
        run = train(data, folder, options, EPOCHS[method], recipe="dino_small_images", set=views)
    elif method == "labels":
        run = train(data, folder, options, EPOCHS[method] + TUNED, init="none")
    elif method == "teacher":
        run = options.teacher
    if run:
        own = {} if method != "teacher" else {"size": options.size}
        row = dict(patchloom.load(run, device="cpu").probe(f"{data} {test}", knn=(20,), linear=True, **own))
    if method == "teacher":
        return row
    tuned = (
        run
        if method == "labels"
        else train(data, folder.with_name(f"{name}-tuned"), options, TUNED, init=run or "none")
    )
    tested = patchloom.evaluate(tuned, test, split="all", device="cpu")
    return row | {"finetuned": next(iter(tested.values().values()))["top1"]}


def main() -> None:
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for method in options.methods:
        name = f"{method.replace(' ', '_')}-{options.seed}"
        record = options.out / f"{name}.json"
        if not record.exists():
            record.write_text(json.dumps(measured(method, options, name)))
        row = json.loads(record.read_text())
        print("|", method, "|", " | ".join(f"{row[key]:.1f}" if key in row else "" for key in COLUMNS), "|", flush=True)


if __name__ == "__main__":
    main()
