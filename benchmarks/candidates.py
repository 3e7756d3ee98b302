"""Which networks, augmentations and learning rates learn most in a given time?

Every row trains for the same time with a whole schedule, on 80 % of the training images of a dataset, and is judged on
the other 20 %. Val and test are not read. The winners are the candidates of `patchloom train` (recipes/candidates.py).
Rows that are in --out already are not repeated.

    python benchmarks/candidates.py flowers.parquet imagenette/ --seconds 25 --out candidates.jsonl
    python benchmarks/candidates.py --table candidates.jsonl

On a CPU the time is that of one thread, so that other programs do not matter. On a GPU, images per second are measured
on an idle card first; then several processes may share it, each with a share of the rows:

    python benchmarks/candidates.py flowers.parquet --device cuda --measure speeds.json
    python benchmarks/candidates.py flowers.parquet --device cuda --speeds speeds.json --seconds 60 --share 1/4
"""

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from patchloom.engine.distribution import Processes
from patchloom.recipes.choices import Choice
from patchloom.recipes.small_images import fit_to_32_pixels
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import make_run, silent
from patchloom.training.race import HELD_OUT, trial_score
from patchloom.training.run import make_plan
from patchloom.training.timing import measure

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

MILD = {"augment.policy": "three_augment", "augment.mixup": 0.2, "augment.cutmix": 0.0}
STRONG = {"augment.policy": "three_augment", "augment.mixup": 0.8, "augment.cutmix": 1.0}
RAND = {"augment.policy": "randaugment", "augment.mixup": 0.0, "augment.cutmix": 0.0}
GPU_LARGE = {
    "smlpnet": network("smlpnet_t"),
    "smlpnet rand": {**network("smlpnet_t"), **RAND},
    "smlpnet rand mixup": {**network("smlpnet_t"), **RAND, "augment.mixup": 0.2},
    "smlpnet strong": {**network("smlpnet_t"), **STRONG},
    "smlpnet mild": {**network("smlpnet_t"), **MILD},
    "smlpnet lr x3": {**network("smlpnet_t"), "optim.lr": 3e-3},
    "smlpnet lr /3": {**network("smlpnet_t"), "optim.lr": 3e-4},
    "smlpnet batch 32": {**network("smlpnet_t"), "optim.batch_size": 32},
    "smlpnet drop path": {**network("smlpnet_t"), "model.drop_path": 0.2},
    "smlpnet narrow": network("smlpnet_t", dim=48, depths=(2, 4, 8, 2)),
    "smlpnet narrow rand": {**network("smlpnet_t", dim=48, depths=(2, 4, 8, 2)), **RAND},
    "smlpnet shallow": network("smlpnet_t", dim=64, depths=(1, 2, 4, 1)),
    "smlpnet shallow rand": {**network("smlpnet_t", dim=64, depths=(1, 2, 4, 1)), **RAND},
    "smlpnet shallow strong": {**network("smlpnet_t", dim=64, depths=(1, 2, 4, 1)), **STRONG},
    "smlpnet small": {**network("smlpnet_t"), "model.image_size": 96},
    "patchconvnet": network("patchconvnet_s20", scale_init=0.1),
    "patchconvnet patch 8": network("patchconvnet_s20", stem="linear", patch_size=8, scale_init=0.1, depth=12),
    "cait": network("cait_xxs24", patch_size=8, depth=12, scale_init=0.1),
    "resmlp": WEAK,
    "resmlp patch 8": network("resmlp_s12", patch_size=8),
}
SMALL_NETWORK = fit_to_32_pixels("smlpnet_t")
GPU_SMALL = {
    "smlpnet": network("smlpnet_t", **SMALL_NETWORK),
    "smlpnet rand": {**network("smlpnet_t", **SMALL_NETWORK), **RAND},
    "smlpnet rand mixup": {**network("smlpnet_t", **SMALL_NETWORK), **RAND, "augment.mixup": 0.2},
    "smlpnet strong": {**network("smlpnet_t", **SMALL_NETWORK), **RAND, "augment.mixup": 0.8, "augment.cutmix": 1.0},
    "smlpnet lr x3": {**network("smlpnet_t", **SMALL_NETWORK), "optim.lr": 3e-3},
    "smlpnet narrow": network("smlpnet_t", **{**SMALL_NETWORK, "dim": 48}),
    "smlpnet narrow rand": {**network("smlpnet_t", **{**SMALL_NETWORK, "dim": 48}), **RAND},
    "smlpnet narrow strong": {
        **network("smlpnet_t", **{**SMALL_NETWORK, "dim": 48}),
        **RAND,
        "augment.mixup": 0.8,
        "augment.cutmix": 1.0,
    },
    "patchconvnet": network("patchconvnet_s20", stem="linear", patch_size=4, scale_init=0.1, depth=12),
    "resmlp": WEAK,
    "resmlp strong": {**RAND, "augment.mixup": 0.8, "augment.cutmix": 1.0},
}


def main() -> None:
    """Run the rows that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*")
    parser.add_argument("--images", type=int, help="use about this many training images")
    parser.add_argument("--seconds", type=float, default=25.0, help="time per row")
    parser.add_argument("--epochs", type=int, help="train for so many epochs instead of a time")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--measure", type=Path, help="measure images per second, write them to this file, and end")
    parser.add_argument("--speeds", type=Path, help="the file that --measure wrote")
    parser.add_argument("--share", default="1/1", help="which of so many shares of the rows to run")
    parser.add_argument("--out", type=Path, default=Path("candidates.jsonl"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data in options.data:
        run_rows(data, options)
    print(table(options.table or options.out))


def run_rows(data: str, options: argparse.Namespace) -> None:
    """Run the rows of one dataset, or measure their speeds."""
    settings = TrainingSettings(data=(data,), device=options.device, workers=workers(options), init="none")
    if options.images:
        share = min(1.0, options.images / len(make_plan(settings, options.device).splits.train))
        settings = dataclasses.replace(settings, changes={"train_share": share})
    plan = make_plan(settings, options.device)
    trial_plan = plan.task.training.held_out(plan, HELD_OUT)
    kinds = {"cpu": (SMALL, LARGE), "cuda": (GPU_SMALL, GPU_LARGE)}[options.device]
    rows: dict[str, dict[str, Any]] = kinds[plan.opened.median_side >= SMALL_PIXELS]
    names = [name for name in options.rows or rows if name in rows]
    first, shares = map(int, options.share.split("/"))
    speeds = json.loads(options.speeds.read_text()) if options.speeds else {}
    stores: dict[Any, Any] = {}
    for name in names[first - 1 :: shares]:
        length = {"epochs": options.epochs} if options.epochs else {"seconds": options.seconds}
        key = {"data": Path(data).stem, "row": name} | length
        if options.measure:
            speeds = json.loads(options.measure.read_text()) if options.measure.is_file() else {}
            speeds.setdefault(key["data"], {})[name] = speed_of(trial_plan, rows[name], options.device, stores)
            options.measure.write_text(json.dumps(speeds, indent=1))
            print(key["data"], name, speeds[key["data"]][name], flush=True)
            continue
        if any(key.items() <= line.items() for line in read(options.out)):
            continue
        speed = speeds.get(key["data"], {}).get(name)
        line = key | trial(trial_plan, rows[name], options, speed, stores)
        print(line, flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def workers(options: argparse.Namespace) -> int:
    """Return the number of processes that decode images."""
    return 0 if options.device == "cpu" else 4


def speed_of(plan: Any, changes: dict[str, Any], device: str, stores: dict[Any, Any]) -> float:
    """Return images per second of a row's training step."""
    plan = plan.task.training.with_choices(plan, choices(changes))
    run, _, _ = make_run(plan, Processes("auto", device=device), silent, stores)
    try:
        return round(measure(run, most_s=3.0).images_per_s, 1)
    finally:
        run.loader.close()


def choices(changes: dict[str, Any]) -> list[Choice]:
    """Return a row's recipe fields as choices."""
    return [Choice(key, value, "auto: benchmark") for key, value in changes.items()]


def trial(
    plan: Any, changes: dict[str, Any], options: argparse.Namespace, speed: float | None, stores: dict[Any, Any]
) -> dict[str, Any]:
    """Train one row for a time, and return its score."""
    training = plan.task.training
    processes = Processes("fp32" if options.device == "cpu" else "auto", device=options.device)
    plan = training.with_choices(plan, choices(changes))
    batch, count = plan.recipe.optim.batch_size, len(plan.splits.train)
    if options.epochs:
        steps, epochs = options.epochs * (count // batch), options.epochs
    else:
        steps = max(1, int(options.seconds * (speed or cpu_speed(plan, processes, stores)) / batch))
        # On a CPU as if the run was twenty times as long: there, trials are those of a race.
        epochs = max(1, round((1 if speed else 20) * steps * batch / count))
    plan = training.with_epochs(plan, Choice("schedule.epochs", epochs, "auto: benchmark"), options.device)
    begun = time.perf_counter()
    score, _ = trial_score(plan, processes, stores, steps)
    taken = round(time.perf_counter() - begun, 1)
    facts = {"steps": steps, "images": steps * batch, "held_out": len(plan.splits.val), "taken_s": taken}
    return facts | {"top1": score}


def cpu_speed(plan: Any, processes: Processes, stores: dict[Any, Any]) -> float:
    """Return images per second of CPU time."""
    run, _, _ = make_run(plan, processes, silent, stores)
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
    return plan.recipe.optim.batch_size / median(times[1:])


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of earlier calls."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(path: Path) -> str:
    """Return top-1 by row and dataset."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for line in read(path):
        length = f"{line['epochs']} epochs" if "epochs" in line else f"{line['seconds']:g} s"
        cells[line["row"]][f"{line['data']}, {length}"] = f"{line['top1']:.1f}"
    columns = sorted({column for row in cells.values() for column in row})
    lines = [f"| row | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(row.get(column, '–') for column in columns)} |" for name, row in cells.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
