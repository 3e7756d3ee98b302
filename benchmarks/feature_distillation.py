"""Feature distillation against DINO and training from scratch: k-NN, linear probe and fine-tuning.

    python benchmarks/feature_distillation.py --teacher timm:tf_efficientnet_lite0@lite0.safetensors \
        --train imagenette160-train.parquet --test imagenette160-val.parquet --out runs/features

Three networks see the training images for the same number of epochs: two without labels, by feature distillation and by
DINO, and one with labels. Epochs are selected on images held out of train. The features of each are then probed with
the labels of all training images, and each network is fine-tuned for `--finetune` epochs. A network that is fine-tuned
from random weights is the baseline. Test images are looked at once, at the end. A finished run is not repeated, so the
command can be interrupted. Prints a table and writes OUT/results.csv. `lite0_weights.py` makes the weights.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import patchloom

METHODS: dict[str, dict[str, Any]] = {
    "feature distillation": {"recipe": "distill_features"},
    "DINO": {"recipe": "dino_small_images"},
    "labels, from scratch": {},
    "random weights": {},
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--teacher", required=True)
parser.add_argument("--train", required=True)
parser.add_argument("--test", required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--size", type=int, default=96)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--finetune", type=int, default=10)
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))


def train(out: Path, options: argparse.Namespace, seed: int, epochs: int, **settings: Any) -> Path:
    """Train a ResMLP of 6 layers, unless it is trained already, and return its folder."""
    network = {"model.options.depth": 6, "model.options.dim": 192, "model.options.patch_size": 8, "seed": seed}
    given = {"model": "resmlp_s12", "size": options.size, "batch": 64, "epochs": epochs, "workers": options.workers}
    changes = {"set": network | settings.pop("set", {})}
    patchloom.train(options.train, out=str(out), device="cpu", **given | changes | settings)
    return out


def pretrained(method: str, options: argparse.Namespace, seed: int) -> Path | None:
    """Return the run of a method, or None for random weights."""
    settings = dict(METHODS[method])
    out = options.out / f"{method.replace(' ', '_').replace(',', '')}-{seed}"
    if method == "random weights":
        return None
    if settings.get("recipe") == "distill_features":
        settings["teacher"] = options.teacher
    if settings.get("recipe") == "dino_small_images":
        settings["set"] = {"views.local_size": options.size // 2, "dino.outputs": 1024}
    if "recipe" not in settings:
        settings["init"] = "none"
    return train(out, options, seed, options.epochs, **settings)


def main() -> None:
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        for method in options.methods:
            run = pretrained(method, options, seed)
            tuned = train(
                options.out / f"tuned-{method.replace(' ', '_').replace(',', '')}-{seed}", options, seed,
                options.finetune, init=str(run) if run else "none",
            )  # fmt: skip
            probes: dict[str, float] = {}
            if run:
                result = patchloom.probe(
                    str(run), f"{options.train} {options.test}", knn=(20,), linear=True, device="cpu"
                )
                probes = dict(next(iter(result.values())))
            tested = patchloom.evaluate(str(tuned), options.test, split="all", device="cpu")
            rows.append(
                {"method": method, "seed": seed, **probes, "finetuned": next(iter(tested.values().values()))["top1"]}
            )
            print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
