"""Which networks, augmentations and learning rates learn most in a given time without a GPU?

Every row trains for the same CPU time (one thread, so that other programs do not matter) with a whole schedule, on 80 %
of the training images of a dataset, and is judged on the other 20 %. Val and test are not read. The winners are the
candidates of `patchloom train` (recipes/candidates.py). Rows that are in --out already are not repeated.

    python benchmarks/candidates.py flowers.parquet imagenette/ --seconds 25 --out candidates.jsonl
    python benchmarks/candidates.py --table candidates.jsonl
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from patchloom.engine.distribution import Processes
from patchloom.recipes.choices import Choice
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import make_run, silent
from patchloom.training.race import HELD_OUT, trial_score
from patchloom.training.run import make_plan

OPTIONS = "model.options."
WEAK = {"augment.policy": "none", "augment.mixup": 0.0, "augment.cutmix": 0.0}
SMALL_PIXELS = 64


def network(name: str, **options: Any) -> dict[str, Any]:
    """Return the recipe fields of a network and weak augmentation."""
    return {"model.name": name, **{OPTIONS + key: value for key, value in options.items()}, **WEAK}


SMLPNET = network("smlpnet_t", dim=32, depths=(1, 2, 2, 1))
LARGE = {
    "resmlp": WEAK,
    "resmlp 96 px": {**WEAK, "model.image_size": 96},
    "smlpnet": SMLPNET,
    "smlpnet wide": network("smlpnet_t", dim=48, depths=(1, 2, 4, 1)),
    "smlpnet 96 px": {**SMLPNET, "model.image_size": 96},
    "patchconvnet": network("patchconvnet_s20", dim=128, depth=6, stem="linear", patch_size=8, scale_init=0.1),
    "cait": network("cait_xxs24", dim=128, depth=6, heads=4, patch_size=8, scale_init=0.1),
    "smlpnet mild": {**SMLPNET, "augment.policy": "three_augment", "augment.mixup": 0.2},
    "smlpnet strong": {**SMLPNET, "augment.policy": "three_augment", "augment.mixup": 0.8, "augment.cutmix": 1.0},
    "smlpnet lr x3": {**SMLPNET, "optim.lr": 9e-3},
    "smlpnet lr /3": {**SMLPNET, "optim.lr": 1e-3},
}
SMALL_SMLPNET = network("smlpnet_t", dim=48, depths=(1, 2, 2), patch_size=2, global_stages=(1, 2, 3))
SMALL = {
    "resmlp": WEAK,
    "smlpnet": SMALL_SMLPNET,
    "smlpnet narrow": {**SMALL_SMLPNET, OPTIONS + "dim": 32},
    "patchconvnet": network("patchconvnet_s20", dim=128, depth=6, stem="linear", patch_size=4, scale_init=0.1),
    "cait": network("cait_xxs24", dim=96, depth=6, heads=4, patch_size=4, scale_init=0.1),
    "smlpnet mild": {**SMALL_SMLPNET, "augment.policy": "trivial", "augment.mixup": 0.2},
    "smlpnet lr x3": {**SMALL_SMLPNET, "optim.lr": 9e-3},
    "smlpnet lr /3": {**SMALL_SMLPNET, "optim.lr": 1e-3},
}


def main() -> None:
    """Run the rows that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*")
    parser.add_argument("--images", type=int, help="use about this many training images")
    parser.add_argument("--seconds", type=float, default=25.0, help="CPU time per row")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("candidates.jsonl"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data in options.data:
        run_rows(data, options)
    print(table(options.table or options.out))


def run_rows(data: str, options: argparse.Namespace) -> None:
    """Run the rows of one dataset."""
    changes = {"train_share": options.images} if options.images else {}
    settings = TrainingSettings(data=(data,), device="cpu", workers=0, init="none", changes=changes)
    if options.images:
        whole = make_plan(TrainingSettings(data=(data,), device="cpu", workers=0, init="none"), "cpu")
        settings = TrainingSettings(
            data=(data,), device="cpu", workers=0, init="none",
            changes={"train_share": min(1.0, options.images / len(whole.splits.train))},
        )  # fmt: skip
    plan = make_plan(settings, "cpu")
    trial_plan = plan.task.training.held_out(plan, HELD_OUT)
    rows: dict[str, dict[str, Any]] = LARGE if plan.opened.median_side >= SMALL_PIXELS else SMALL
    done = read(options.out)
    for name in options.rows or rows:
        key = {"data": Path(data).stem, "row": name, "seconds": options.seconds}
        if name not in rows or any(key.items() <= line.items() for line in done):
            continue
        line = key | trial(trial_plan, rows[name], options.seconds)
        print(line, flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def trial(plan: Any, changes: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Train one row for a CPU time, measured on a few steps, and return its score."""
    training, cpu = plan.task.training, Processes("fp32", device="cpu")
    plan = training.with_choices(plan, [Choice(key, value, "auto: benchmark") for key, value in changes.items()])
    stores: dict[Any, Any] = {}
    run, _, _ = make_run(plan, cpu, silent, stores)
    times = []
    for number, batch in enumerate(run.loader.epoch(0)):
        begun = time.process_time()
        run.objective(run.model, batch, epoch=0, step=0)["loss"].backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        times.append(time.process_time() - begun)
        if number == 5:
            break
    run.loader.close()
    steps = max(1, int(seconds / median(times[1:])))
    images = steps * plan.recipe.optim.batch_size
    epochs = max(1, round(20 * images / len(plan.splits.train)))  # of a run that is twenty times as long
    plan = training.with_epochs(plan, Choice("schedule.epochs", epochs, "auto: benchmark"), "cpu")
    score, _ = trial_score(plan, cpu, stores, steps)
    return {"steps": steps, "images": images, "held_out": len(plan.splits.val), "top1": score}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(path: Path) -> str:
    """Return top-1 by row and dataset."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for line in read(path):
        cells[line["row"]][f"{line['data']}, {line['seconds']:g} s"] = f"{line['top1']:.1f}"
    columns = sorted({column for row in cells.values() for column in row})
    lines = [f"| row | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(row.get(column, '–') for column in columns)} |" for name, row in cells.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
