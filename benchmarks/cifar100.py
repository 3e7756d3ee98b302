"""CIFAR-100: ResMLP with and without communication and with a teacher, sMLPNet, ResNet-18; one after the other.

Then their table and their curves, for docs/results.md.

    python benchmarks/cifar100.py cifar100/ --out runs/cifar100                  # train/ and val/ of class folders
    python benchmarks/cifar100.py cifar100/ --out runs/cifar100 --only plain plain_none
    python benchmarks/cifar100.py cifar100/ --out runs/cifar100 --table          # of what is there already

Options after `--` go to every `patchloom train`. A run that is there already goes on or is left as it is.
"""

from pathlib import Path

from trainings import options_of, read, train

from patchloom.engine.display import duration
from patchloom.report.charts import Series, line_chart, svg_file
from patchloom.report.run_report import curve, steps_per_unit
from patchloom.runs.metrics import read_metrics
from patchloom.runs.predictions import load_predictions
from patchloom.runs.run_metadata import read_run_metadata

# Pixels are patches; half as much mixing as the recipe's, since so few epochs do not overfit.
SMLPNET = (
    *("--model", "smlpnet_t", "--set", "model.options.patch_size=1", "--set", "model.options.depths=2,4,4"),
    *("--set", "model.options.dim=96", "--set", "model.options.global_stages=1,2,3"),
    *("--set", "model.drop_path_rule=linear", "--set", "optim.weight_decay=0.1"),
    *("--set", "optim.ema_decay=0.9995", "--set", "augment.mixup=0.2", "--set", "augment.mix_probability=0.6"),
    *("--set", "augment.erasing=0.1"),
)
# Crops, flips, colours and mixing alone, for short runs.
PLAIN = (
    *("--epochs", "60", "--set", "augment.policy=none", "--set", "augment.color_jitter=0.4"),
    *("--set", "augment.erasing=0", "--set", "model.drop_path=0", "--set", "optim.weight_decay=0.1"),
)
LARGE_BATCH = ("--batch", "1024", "--set", "optim.lr=0.002", "--set", "optim.weight_decay=0.1")
# A convnet as it is usually trained: on pictures enlarged so that its first map is 32×32, with little augmentation.
TEACHER = (
    *("--model", "timm:resnet18", "--size", "128", "--set", "model.options.small_stem=false"),
    *("--set", "augment.crop_padding=16", "--set", "model.drop_path=0"),
    *("--set", "augment.policy=none", "--set", "augment.erasing=0", "--set", "augment.mixup=0"),
    *("--set", "augment.mix_probability=0.5", "--set", "optim.name=sgd", "--set", "optim.nesterov=true"),
    *("--set", "optim.lr=0.2", "--set", "optim.weight_decay=0.0005", "--set", "optim.clip_norm=none"),
)
# Name → options of `patchloom train`; {out} is the folder of all runs.
RUNS: dict[str, tuple[str, ...]] = {
    "resmlp": (),
    "smlpnet": ("--epochs", "86", *SMLPNET),
    "plain": PLAIN,
    "plain_none": (*PLAIN, "--set", "model.options.communication=none"),
    "resnet18": ("--epochs", "32", *TEACHER),
    "short": ("--epochs", "50", *LARGE_BATCH),
    "distilled": ("--epochs", "50", *LARGE_BATCH, "--teacher", "{out}/resnet18"),
}


def main() -> None:
    """Train what was asked for, then tell."""
    given, further = read(options_of(__doc__, RUNS))
    for name in [] if given.table else given.only or RUNS:
        train(given.data, given.out / name, ["--recipe", "small_images", *RUNS[name], *further])
    tell(given.out)


def tell(out: Path) -> None:
    """A line a run that has ended, and all their curves in one picture."""
    print("| run | epochs | top-1 | 95 % interval | time |\n|---|---|---|---|---|")
    lines = []
    for name in RUNS:
        record = read_run_metadata(out / name)
        if record is None:
            continue
        report = load_predictions(out / name).report
        low, high = report.top_interval()
        time = duration(record.seconds)
        print(f"| {name} | {record.epochs} | {report.top(1):.2f} | {low:.1f} … {high:.1f} | {time} |")
        records = read_metrics(out / name / "metrics.jsonl")
        points = curve(records, steps_per_unit(records)[1], "evaluation", "ema", "top1")
        lines.append(Series(name, points, len(lines)))
    if lines:
        (out / "curves.svg").write_text(
            svg_file(line_chart(lines, x_label="epoch", y_label="top-1 on val, %")), "utf-8"
        )
        print(out / "curves.svg")


if __name__ == "__main__":
    main()
