"""Feature distillation against DINO and labels in the same time: k-NN, linear probe and fine-tuning.

    python benchmarks/feature_distillation.py --teacher timm:tf_efficientnet_lite0@lite0.safetensors \
        --train imagenette160-train.parquet --test imagenette160-val.parquet --out runs/features-imagenette
    python benchmarks/feature_distillation.py --teacher timm:tf_efficientnet_lite0@lite0.safetensors \
        --train flowers102-136.parquet --out runs/features-flowers

A network is trained for `--time` by each method: without labels by feature distillation and by DINO, and with labels. Its
features are probed with the labels of all training images, and it is fine-tuned for `--finetune`. The same fine-tuning from
random weights is the baseline, and the teacher's own features are probed as the limit of what can be distilled. Without
`--test`, TRAIN has a column `split`, whose train and test images are used. Epochs are selected on images held out of train;
test images are looked at once, at the end. A finished row is not repeated, so `--methods` can do one at a time.
`lite0_weights.py` makes the weights.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

import patchloom

METHODS: dict[str, dict[str, Any]] = {
    "feature distillation": {"recipe": "distill_features"},
    "DINO": {"recipe": "dino_small_images"},
    "labels": {"init": "none"},
    "random weights": {},
    "teacher": {},
}
COLUMNS = {"knn20_top1": "k-NN", "linear_top1": "linear", "finetuned": "fine-tuned"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--teacher", required=True)
parser.add_argument("--train", type=Path, required=True)
parser.add_argument("--test", type=Path)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--time", default="150s")
parser.add_argument("--finetune", default="45s")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))


def splits_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return the files of the training and test images."""
    if options.test:
        return str(options.train), str(options.test)
    table = pq.read_table(options.train)
    for split in ("train", "test"):
        rows = table.filter(pc.field("split") == split).drop_columns(["split"])
        pq.write_table(rows, options.out / f"{split}.parquet")
    return str(options.out / "train.parquet"), str(options.out / "test.parquet")


def train(data: str, out: Path, options: argparse.Namespace, time: str, **settings: Any) -> str:
    """Train a ResMLP of 6 layers, unless it is trained already, and return its folder."""
    network = {"model.options.depth": 6, "model.options.dim": 128, "model.options.patch_size": 8, "seed": options.seed}
    changes = network | settings.pop("set", {})
    patchloom.train(
        data, out=str(out), model="resmlp_s12", size=options.size, batch=64, time=time, race=False, workers=0,
        device="cpu", set=changes, **settings,
    )  # fmt: skip
    return str(out)


def measured(method: str, options: argparse.Namespace, name: str) -> dict[str, float]:
    """Return the test accuracies of a method: of probes on its features, and fine-tuned."""
    data, test = splits_of(options)
    settings, run = dict(METHODS[method]), None
    if method == "feature distillation":
        settings["teacher"] = options.teacher
    if method == "DINO":
        settings["set"] = {"views.local_size": options.size // 2, "dino.outputs": 1024}
    if method == "teacher":
        run = options.teacher
    elif settings:
        run = train(data, options.out / name, options, options.time, **settings)
    probes = {}
    if run:
        result = patchloom.load(run, device="cpu").probe(f"{data} {test}", knn=(20,), linear=True, size=options.size)
        probes = dict(result)
    if method == "teacher":
        return probes
    tuned = train(data, options.out / f"{name}-tuned", options, options.finetune, init=run or "none")
    tested = patchloom.evaluate(tuned, test, split="all", device="cpu")
    return probes | {"finetuned": tested["top1"]}


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
