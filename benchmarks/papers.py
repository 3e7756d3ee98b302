"""Test claims of the papers at small scale: every variant of a table, with several seeds, on CIFAR-100.

    python benchmarks/papers.py resmlp distillation --data FOLDER --out benchmarks/results/papers --seeds 3
    python benchmarks/papers.py --table-only --charts docs/papers

FOLDER has CIFAR-100 as parquet files, cifar100-train-*.parquet and cifar100-test.parquet, at any depth. The variants
of a table (`paper_tables.py`) share width, epochs and learning rate. The learning rate is chosen once per table, on a
tenth of the training images that no run trains on; test is evaluated once, with the last weights of each run. A run
that is in the CSV file of its table is not repeated. Several processes (--workers) may share a GPU.

Each table gives a CSV file of runs, a chart beside the paper's numbers, and verdicts by the rule of
docs/papers/index.md, with the paired 95 % interval over seeds.
"""

import argparse
import csv
import dataclasses
import gc
import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from paper_tables import HALVES, OPTIONS, QUARTERS, TABLES, TEACHER, TEACHER_EPOCHS, Claim, Table
from PIL import Image

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.images.image_batch import IMAGENET_MEAN, IMAGENET_STD, normalize
from patchloom.data.sources.python_objects import PythonData
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import train as run_loop
from patchloom.evaluation.agreement import token_cosines
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.intervals import student
from patchloom.machine import cores
from patchloom.report.charts import Point, Series, line_chart, scatter_chart, svg_file
from patchloom.report.pictures.weights import has_patch_matrices, sparsity
from patchloom.runs.weights import save_weights
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import make_run, release, silent
from patchloom.training.run import make_plan
from patchloom_runtime.errors import NumericalError, PatchloomError, UsageError
from patchloom_runtime.printable import plural

CLASSES = 100
HELD_OUT = 0.1  # of the training images
RATES = (1e-3, 2e-3, 4e-3)  # learning rates to choose from
CHOICES = "choices.csv"
COLUMNS = (
    "variant",
    "seed",
    "top1",
    "loss",
    "ended",
    "seconds",
    "images_per_s",
    "parameters",
    "lr",
    "epochs",
    "images",
)
CHOICE_COLUMNS = ("choice", "lr", "held_out_top1", "epochs", "images")
HEADS = {"class": "class head", "distillation": "distillation head"}  # of networks with a distillation token


@dataclass(frozen=True)
class Task:
    """One run: a variant with a seed, a learning rate to choose from, or the teacher."""

    table: str
    variant: str
    seed: int
    lr: float
    epochs: int
    kind: str = "run"  # or "choice" or "teacher"


# Training, in a worker ------------------------------------------------------------------------------------------------


class Worker:
    """What the runs of one process share: the images, decoded once, and the device."""

    def __init__(self, arrays: Path, device: str, readers: int, teacher: Path, changes: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        parts = {name: np.load(arrays / f"{name}.npy", mmap_mode="r") for name in ("train", "val", "test")}
        labels = {name: np.load(arrays / f"{name}_labels.npy") for name in parts}
        self.data = PythonData({name: (np.asarray(images), labels[name]) for name, images in parts.items()})
        self.device, self.readers, self.teacher, self.changes = device, readers, teacher, changes
        self.processes = Processes(device=device)
        self.stores: dict[float, dict[Any, Any]] = {}  # by share of the training images
        self.batches: dict[str, Any] = {}

    def run(self, task: Task) -> list[dict[str, Any]]:
        """Train and evaluate; return the lines of the CSV file."""
        gc.collect()  # frees what the run before left on the device
        plan = make_plan(self.settings(task), self.device)
        share = plan.recipe.train_share
        begun = time.perf_counter()
        run, network, _ = make_run(plan, self.processes, silent, self.stores.setdefault(share, {}), begins=True)
        early: dict[str, float] = {}
        epochs = plan.recipe.schedule.epochs
        quarters = {round((i + 1) * epochs / 4) - 1: name for i, name in enumerate(QUARTERS)}

        def after_epoch(_: torch.nn.Module, epoch: int) -> None:
            if epoch in quarters:
                early[quarters[epoch]] = round(self.report(plan, network, "test").top(1), 2)

        watched = task.kind == "run" and QUARTERS[0] in TABLES[task.table].extras
        run = dataclasses.replace(
            run, saver=None, evaluators=[], metric=None, after_epoch=after_epoch if watched else None
        )
        self.processes.synchronize()
        started, ended = time.perf_counter(), "finished"
        try:
            run_loop(run)
            self.processes.synchronize()
        except NumericalError:
            ended = "diverged"
        now = time.perf_counter()
        images = run.schedule.total_steps * plan.recipe.optim.batch_size
        line = {
            "variant": task.variant,
            "seed": task.seed,
            "ended": ended,
            "lr": task.lr,
            "epochs": task.epochs,
            "images": len(plan.splits.train),
            "parameters": sum(each.numel() for each in network.parameters()),
            "seconds": round(now - begun, 1),
            "images_per_s": round(images / (now - started)),
        }
        lines = self.evaluated(task, plan, network, line | early)
        if task.kind == "teacher":
            self.save(plan, network)
        release(run)
        run.loader.close()
        return lines

    def settings(self, task: Task) -> TrainingSettings:
        """Return the settings of a run."""
        if task.kind == "teacher":
            changes = TEACHER | {key: value for key, value in self.changes.items() if not key.startswith(OPTIONS)}
        else:
            table = TABLES[task.table]
            variant = table.variants[task.variant].changes
            changes = {"optim.lr": task.lr, **table.base, **self.changes, **variant}
            if changes["model.name"].startswith("timm:"):  # options of patch networks do not fit it
                changes = {key: changes[key] for key in changes if key in variant or not key.startswith(OPTIONS)}
            if changes.get("objective.distillation", "none") in ("soft", "hard"):
                changes["objective.teacher"] = str(self.teacher)
        share = changes.get("train_share", 1.0)
        changes |= {"seed": task.seed, "schedule.epochs": round(task.epochs / share)}
        return TrainingSettings(
            data=(self.data,),
            recipe="small_images",
            model=changes.pop("model.name"),
            changes=changes,
            init="none",
            device=self.device,
            workers=self.readers,
            out=str(self.teacher if task.kind == "teacher" else self.teacher.parent / "unused"),
        )

    def evaluated(self, task: Task, plan: Any, network: Any, line: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the lines of a run: one, and one per head of a network with a distillation token."""
        if line["ended"] == "diverged":
            return [line | {"top1": 100 / CLASSES, "loss": ""}]
        report = self.report(plan, network, "val" if task.kind == "choice" else "test")
        line |= {"top1": round(report.top(1), 2), "loss": round(report.loss, 4)}
        if task.kind == "choice":
            return [line]
        if task.kind == "teacher":
            self.teacher.mkdir(parents=True, exist_ok=True)
            np.save(self.teacher / "predictions.npy", report.predictions)
            return [line]
        table = TABLES[task.table]
        if table.teacher:
            line["teacher_agreement"] = self.agreement(report)
        if "sparse_A" in table.extras and has_patch_matrices(network):
            points = sparsity(network)
            for name in sorted({point.matrix for point in points}):
                shares = [100 * point.share for point in points if point.matrix == name]
                line[f"sparse_{name}"] = round(fmean(shares), 2)
        if HALVES[0] in table.extras:
            for name, rows in zip(HALVES, np.array_split(report.ranks == 0, len(HALVES)), strict=True):
                line[name] = round(100 * float(np.mean(rows)), 2)
        if not getattr(network, "has_distillation_token", False):
            return [line]
        cosines = self.cosines(network)
        lines = [line | {"cosine_first": round(cosines[0], 3), "cosine_last": round(cosines[-1], 3)}]
        for head, name in HEADS.items():
            network.config = dataclasses.replace(network.config, fusion=head)
            report = self.report(plan, network, "test")
            values = {"variant": f"{task.variant}, {name}", "teacher_agreement": self.agreement(report)}
            lines.append(line | values | {"top1": round(report.top(1), 2), "loss": round(report.loss, 4)})
        return lines

    def report(self, plan: Any, network: Any, split: str) -> ClassificationReport:
        """Evaluate a network on a split, which is decoded once per process."""
        if split not in self.batches:
            recipe = plan.recipe
            self.batches[split] = make_evaluation_loader(
                getattr(plan.splits, split),
                recipe.model.image_size,
                recipe.test.crop_ratio,
                batch_size=1000,
                device=self.processes.device,
                workers=self.readers,
            )
        with self.processes.autocast():
            return evaluate(network, self.batches[split].epoch(0), classes=plan.class_names)

    def agreement(self, report: ClassificationReport) -> float:
        """Return the percentage of test images on which the teacher decides alike."""
        decisions = np.load(self.teacher / "predictions.npy")
        return round(100 * float(np.mean(decisions == report.predictions)), 2)

    def cosines(self, network: Any) -> list[float]:
        """Return the cosine of the two tokens at the start and after every block, on a batch of test images."""
        batch = next(iter(self.batches["test"].epoch(0)))
        images = normalize(batch.images.to(self.processes.device), IMAGENET_MEAN, IMAGENET_STD)
        with torch.no_grad(), self.processes.autocast():
            return [float(value) for value in token_cosines(network.eval(), images)]

    def save(self, plan: Any, network: Any) -> None:
        """Write the teacher as a run folder."""
        plan.task.training.write_files(plan, network)
        weights = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
        save_weights(plan.folder, weights, {})


_workers: list[Worker] = []  # one, in a process that trains


def _start(*arguments: Any) -> None:
    _workers.append(Worker(*arguments))


def _run(task: Task) -> list[dict[str, Any]]:
    return _workers[0].run(task)


# The runs -------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run what is missing, then write charts and verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="default: all", metavar="TABLE")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-100's parquet files")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/papers"))
    parser.add_argument("--charts", type=Path, help="folder of the charts (default: that of --out)")
    parser.add_argument("--teacher", type=Path, default=Path("runs/papers_teacher"), help="run folder of the convnet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, help="learning rate instead of choosing one")
    parser.add_argument("--images", type=int, help="use about this many images, as a trial")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe of all runs")
    parser.add_argument("--workers", type=int, default=1, help="processes that train at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after so many seconds")
    parser.add_argument("--table-only", action="store_true", help="render the CSV files without training")
    given = parser.parse_args()
    names = given.tables or [name for name in TABLES if not given.table_only or csv_of(given.out, name).is_file()]
    if not given.table_only:
        if given.data is None:
            parser.error("--data is missing: the folder with CIFAR-100's parquet files")
        train_missing(names, given)
    for name in names:
        print(render(name, given.out, given.charts or given.out), end="\n\n")


def train_missing(names: Sequence[str], given: argparse.Namespace) -> None:
    """Choose learning rates, train the teacher and every missing run, a few at the same time."""
    begun = time.perf_counter()
    given.out.mkdir(parents=True, exist_ok=True)
    changes = dict(item.split("=", 1) for item in given.set)
    with tempfile.TemporaryDirectory() as folder:
        unpack(given.data, Path(folder), given.images)
        print(f"data: {time.perf_counter() - begun:.1f} s", flush=True)
        arguments = (Path(folder), given.device, min(8, cores() // given.workers), given.teacher.resolve(), changes)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.workers, context, _start, arguments) as pool:
            running: dict[Future[list[dict[str, Any]]], Task] = {}
            failed: list[Task] = []
            seconds: list[float] = []
            while True:
                late = time.perf_counter() - begun > given.seconds
                ready, waiting = missing(names, given)
                print(cost_text(len(ready) + waiting, seconds, given.workers), flush=True)
                ready = [task for task in ready if task not in (*running.values(), *failed)]
                for task in ready[: 0 if late else given.workers - len(running)]:
                    running[pool.submit(_run, task)] = task
                if not running:
                    break
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    task = running.pop(future)
                    try:
                        lines = future.result()
                        seconds.append(lines[0]["seconds"])
                        store(given.out, task, lines)
                    except (PatchloomError, RuntimeError) as error:  # the other runs go on
                        failed.append(task)
                        print(
                            f"{task.table}, {task.kind}: {task.variant}, seed {task.seed} failed: {error}", flush=True
                        )
    if left := len(ready) + waiting + len(failed):
        print(f"{left} runs are left, of which {len(failed)} failed; the same command repeats them", flush=True)


def cost_text(runs: int, seconds: Sequence[float], workers: int) -> str:
    """Return how many runs are missing and, once one is finished, about how long they take."""
    text = f"missing: {plural(runs, 'run')}"
    return f"{text}, about {duration(runs * median(seconds) / workers)}" if runs and seconds else text


def missing(names: Sequence[str], given: argparse.Namespace) -> tuple[list[Task], int]:
    """Return the missing runs that can start, in order, and the number of those that wait for others."""
    ready: list[Task] = []
    waiting, epochs = 0, given.epochs
    rates = read(given.out / CHOICES)
    teacher = Task("distillation", "convnet", 0, TEACHER["optim.lr"], max(1, round(TEACHER_EPOCHS * epochs)), "teacher")
    for name in names:
        table = TABLES[name]
        tried = {float(line["lr"]): float(line["held_out_top1"]) for line in rates if line["choice"] == table.choice}
        first = next(other for other, each in TABLES.items() if each.choice == table.choice)
        baseline = next(iter(TABLES[first].variants))
        choices = (
            [] if given.lr else [Task(first, baseline, 0, lr, epochs, "choice") for lr in RATES if lr not in tried]
        )
        ready += [task for task in choices if task not in ready]
        finished = read(csv_of(given.out, name))
        done = {(line["variant"], int(line["seed"])) for line in finished}
        if other := {line["epochs"] for line in finished if line["variant"] in table.variants} - {str(epochs)}:
            raise UsageError(
                f"{csv_of(given.out, name)} has runs of {other.pop()} epochs, not {epochs}: use another --out"
            )
        if table.teacher and (teacher.variant, 0) not in done:
            ready.append(teacher)
        lr = given.lr or max(tried, key=lambda rate: tried[rate], default=0.0)
        left = [(variant, seed) for seed in range(given.seeds) for variant in table.variants]
        tasks = [Task(name, variant, seed, lr, epochs) for variant, seed in left if (variant, seed) not in done]
        if choices or (table.teacher and (teacher.variant, 0) not in done):
            waiting += len(tasks)
        else:
            ready += tasks
    return ready, waiting


def unpack(data: Path, folder: Path, limit: int | None) -> None:
    """Write the images and labels of train, val (held out of train) and test as arrays."""
    import pyarrow.parquet as pq

    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for split in ("train", "test"):
        files = sorted(data.rglob(f"cifar100-{split}*.parquet"))
        if not files:
            raise UsageError(f"{data} has no cifar100-{split}*.parquet")
        tables = [pq.read_table(file, columns=["image", "label"]) for file in files]
        encoded = [row for table in tables for row in table["image"].to_pylist()][:limit]
        numbers = [row for table in tables for row in table["label"].to_pylist()][:limit]
        with multiprocessing.get_context("fork").Pool(cores()) as pool:
            arrays[split] = np.stack(pool.map(_decoded, encoded, chunksize=500)), np.array(numbers)
    images, labels = arrays["train"]
    order = np.random.default_rng(0).permutation(len(images))
    held_out = round(HELD_OUT * len(images))
    for split, rows in (("val", order[:held_out]), ("train", order[held_out:])):
        arrays[split] = images[rows], labels[rows]
    for split, (images, labels) in arrays.items():
        np.save(folder / f"{split}.npy", images)
        np.save(folder / f"{split}_labels.npy", labels)


def _decoded(image: Any) -> np.ndarray:
    data = image["bytes"] if isinstance(image, dict) else image
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# CSV files ------------------------------------------------------------------------------------------------------------


def csv_of(out: Path, table: str) -> Path:
    """Return the CSV file of a table's runs."""
    return out / f"{table}.csv"


def store(out: Path, task: Task, lines: Iterable[dict[str, Any]]) -> None:
    """Append the lines of a finished run to the CSV file of its table, or to the choices."""
    path, columns = csv_of(out, task.table), (*COLUMNS, *TABLES[task.table].extras)
    if task.kind == "choice":
        path, columns = out / CHOICES, CHOICE_COLUMNS
        lines = [line | {"choice": TABLES[task.table].choice, "held_out_top1": line["top1"]} for line in lines]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if not path.is_file():
        writer.writeheader()
    for line in lines:
        print(f"{task.table}, {task.kind}: {line['variant']}, seed {task.seed}, lr {task.lr:g}: {line['top1']:.2f} %, "
              f"{line['seconds']:.1f} s, {line['images_per_s']:,} images/s", flush=True)  # fmt: skip
        writer.writerow(line)
    with path.open("a", encoding="utf-8") as file:
        file.write(text.getvalue())


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file; none if there is no file. A line that a killed run left incomplete is dropped."""
    if not path.is_file():
        return []
    whole, newline, _ = path.read_text("utf-8").rpartition("\n")
    if not newline:
        whole = ""
    if whole + newline != path.read_text("utf-8"):
        path.write_text(whole + newline, "utf-8")
    return list(csv.DictReader(io.StringIO(whole)))


# Verdicts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds, with its 95 % interval, and the verdict on it alone."""

    name: str
    mean: float
    low: float
    high: float
    seeds: int
    verdict: str


def by_seed(lines: Iterable[dict[str, str]], variant: str, measure: str) -> dict[int, float]:
    """Return a measure of a variant by seed."""
    return {int(line["seed"]): float(line[measure]) for line in lines if line["variant"] == variant and line[measure]}


def difference(lines: Sequence[dict[str, str]], claim: Claim, better: str, worse: str) -> Difference | None:
    """Return the difference of two variants, or of their gains; None without two common seeds."""
    names = (better, worse, *(claim.gains_over or ()))
    values = [by_seed(lines, name, claim.measure) for name in names]
    seeds = sorted(set.intersection(*map(set, values)))
    if len(seeds) < 2:
        return None
    differences = [values[0][seed] - values[1][seed] for seed in seeds]
    name = f"{better} − {worse}"
    if claim.gains_over:
        differences = [each - values[2][seed] + values[3][seed] for each, seed in zip(differences, seeds, strict=True)]
        name = f"({better} − {names[2]}) − ({worse} − {names[3]})"
    low, high = student(differences)
    return Difference(name, fmean(differences), low, high, len(seeds), verdict_of(low, high, claim.within))


def verdict_of(low: float, high: float, within: float | None = None) -> str:
    """Return the verdict on a difference that should be positive, or with `within` small, from its interval."""
    if within is not None:
        if -within <= low and high <= within:
            return "confirmed"
        return "contradicted" if low > within or high < -within else "undecided"
    if low > 0:
        return "confirmed"
    return "contradicted" if high < 0 else "undecided"


def together(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim of several differences: all must be confirmed, and one contradicts it."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "confirmed" if verdicts and all(each == "confirmed" for each in verdicts) else "undecided"


def judge(lines: Sequence[dict[str, str]], claim: Claim) -> tuple[str, list[Difference]]:
    """Return the verdict on a claim and the differences behind it; "not tested" if a variant has too few runs."""
    pairs = [(better, worse) for better in claim.better for worse in claim.worse]
    found = [difference(lines, claim, better, worse) for better, worse in pairs]
    differences = [each for each in found if each is not None]
    if len(differences) < len(found):
        return "not tested", differences
    return together([each.verdict for each in differences]), differences


def in_order(table: Table, variants: Iterable[str]) -> list[str]:
    """Return variants in the order of the table, after the teacher; heads of a network follow it."""
    order = list(table.variants)

    def place(variant: str) -> tuple[int, str]:
        network = variant if variant in order else variant.rpartition(", ")[0]
        return (order.index(network) if network in order else -1, variant)

    return sorted(variants, key=place)


def by_share(table: Table, lines: Sequence[dict[str, str]]) -> list[Series]:
    """Return a curve per network: mean top-1 over the share of the training images; none for other tables."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, variant in table.variants.items():
        values = by_seed(lines, name, "top1")
        if values and "train_share" in variant.changes:
            curves.setdefault(name.split(", ")[0], []).append(
                (100 * variant.changes["train_share"], fmean(values.values()))
            )
    return [Series(name, sorted(points), color) for color, (name, points) in enumerate(curves.items())]


def render(name: str, out: Path, charts: Path) -> str:
    """Write the chart of a table; return the table and its verdicts as Markdown."""
    table, lines = TABLES[name], read(csv_of(out, name))
    rows = ["| variant | published | top-1 by seed | mean |", "|---|---|---|---|"]
    points = []
    for variant in in_order(table, {line["variant"] for line in lines}):
        values = by_seed(lines, variant, "top1")
        published = table.variants[variant].published if variant in table.variants else None
        texts = ", ".join(f"{values[seed]:.2f}" for seed in sorted(values))
        rows.append(f"| {variant} | {published or '–'} | {texts} | {fmean(values.values()):.2f} |")
        if published:
            points.append(Point(published, fmean(values.values()), variant))
    if points:
        chart = scatter_chart(
            points, x_label="published, ImageNet top-1, %", y_label="here, CIFAR-100 top-1, %", named=True
        )
        (charts / f"measured_{name}.svg").write_text(svg_file(chart), "utf-8")
    elif curves := by_share(table, lines):
        chart = line_chart(curves, x_label="share of the training images, %", y_label="CIFAR-100 top-1, %")
        (charts / f"measured_{name}.svg").write_text(svg_file(chart), "utf-8")
    claims = ["| claim | verdict | differences, with the paired 95 % interval |", "|---|---|---|"]
    for claim in table.claims:
        verdict, differences = judge(lines, claim)
        texts = "; ".join(
            f"{each.name}: {each.mean:+.2f} ({each.low:+.2f} … {each.high:+.2f}), {each.seeds} seeds"
            for each in differences
        )
        claims.append(f"| {claim.text} | *{verdict}* | {texts or '–'} |")
    return "\n".join([f"## {name}: {table.place}", "", *rows, "", *claims])


if __name__ == "__main__":
    main()
