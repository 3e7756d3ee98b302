"""Every page that patchloom writes, with made-up results for any number of classes: nothing is trained."""

import colorsys
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data
from patchloom.evaluation.calibration import reliability
from patchloom.evaluation.classification import ClassificationReport
from patchloom.exporters.single_page.page import export_page
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom.inference.search import write_search_page
from patchloom.report.charts import Point, histogram_chart, scatter_chart, share_map
from patchloom.report.check_page import write_check_page
from patchloom.report.run_report import Report, Summary, training, validation, write_report
from patchloom.report.sections import (
    gallery_section,
    picture_section,
    reliability_section,
    sample_section,
    table_section,
)
from patchloom.report.watch_page import write_watch_page
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom.runs.out_of_fold import OutOfFold
from patchloom.runs.predictions import Predictions, fingerprint, save_predictions
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from patchloom.runs.watched import RunState
from patchloom.tasks.classification.comparison_page import report_runs
from patchloom.tasks.classification.pruning import MatrixZeros, Pruned, Pruning, write_pruning_page
from patchloom.tasks.classification.ranked_page import write_ranked
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.images.look_page import look_at
from patchloom.tasks.report import report_run
from patchloom.training.auditing.audit import make_report
from patchloom.training.auditing.audit_report import WorthLabeling
from patchloom.training.auditing.page import write_audit_page
from patchloom.training.sweeps.page import write_sweep_page
from patchloom.training.sweeps.record import RunResult
from patchloom.training.sweeps.table import Sweep, rows_of
from tests.networks import small

KINDS = (
    "report", "attention", "tasks", "comparison", "check", "look", "ranked", "search", "notebook", "single", "audit",
    "sweep", "watch", "prune",
)  # fmt: skip
SIZE = 16  # pixels of an image
TEXTURES = (
    "striped", "spotted", "plain", "woolly", "checkered", "dotted", "glossy", "rough", "smooth", "curled", "ribbed",
    "feathered", "scaled", "frosted", "marbled", "dusty", "braided", "polished", "tangled", "folded", "woven", "furry",
    "leafy", "sandy", "velvet", "waxy", "silky", "grainy", "mottled", "banded", "crinkled", "fringed",
)  # fmt: skip
THINGS = (
    "fox", "lantern", "teapot", "violin", "harbor seal", "bicycle", "mushroom", "windmill", "sweater", "lizard",
    "tulip", "helmet", "barn owl", "canoe", "pear", "typewriter", "jellyfish", "umbrella", "goat", "clock tower",
    "beetle", "sofa", "walnut", "drum", "heron", "scarf", "tractor", "orchid", "kettle", "crab", "ladder", "moth",
)  # fmt: skip
LONG = (
    "a class with the rather long name of everything that goes on for a while",
    "anamewithoutanyspacethatisfarlongerthanaphoneiswideandthereforehastobreaksomewhereorother",
)


def class_names(count: int) -> list[str]:
    """Return names in the order of folders; with more than 50, some are long."""
    if count <= len(THINGS):
        return sorted([*THINGS[: count - 1], "a, b"])
    names = [f"{thing}, {texture}" for thing, texture in islice(product(THINGS, TEXTURES), count - len(LONG))]
    return sorted([*names, *LONG])


class MadeUp:
    """Data of `count` classes, two runs on it with made-up predictions, and every page about them, in a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.names = folder, class_names(count)
        self.rng = np.random.default_rng(count)
        self.per_class = 8 if count <= len(THINGS) else 2

    @cached_property
    def data(self) -> Path:
        """Class folders in train/ and val/, with an image in both, one under two labels and one that is no image."""
        root = self.folder / "images"
        for split, images in (("train", 2), ("val", self.per_class)):
            for number, name in enumerate(self.names):
                (root / split / name).mkdir(parents=True)
                for copy in range(images):
                    self._tinted(number).save(root / split / name / f"{split}_{number:04d}_{copy}.png")
        first, second = (root / "train" / name for name in self.names[:2])
        twin = self._tinted(0).resize((40, 30))
        for place in (first / "twin.png", second / "twin.png", root / "val" / self.names[0] / "twin.png"):
            twin.save(place)
        (first / "broken.png").write_bytes(b"no image")
        return root

    def _tinted(self, number: int) -> Image.Image:
        hue = colorsys.hsv_to_rgb(number / len(self.names), 0.8, 1)
        noise = self.rng.integers(0, 76, (SIZE, SIZE, 3))
        return Image.fromarray((np.array(hue) * 180 + noise).astype(np.uint8))

    @cached_property
    def runs(self) -> list[Path]:
        """Two runs on the data."""
        return [self._run("resmlp", "resmlp_s12", 0.3), self._run("deit-with-a-longer-name", "deit_ti", 0.4)]

    def _run(self, name: str, model: str, errors: float) -> Path:
        folder = self.folder / name
        options: dict[str, Any] = {"num_classes": len(self.names), "image_size": SIZE, "patch_size": 4, "depth": 1}
        network = small(model, **options)
        preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, (SIZE, SIZE), 1.0)
        Classifier(network, RunFiles(model, options, preprocessing, None, tuple(self.names))).save_pretrained(folder)
        facts: dict[str, Any] = {"epochs": 30, "seconds": 4321.0, "ended": "finished", "machine": "a machine"}
        write_run_metadata(folder, RunMetadata(data=str(self.data), data_name=self.data.name, **facts))
        val = open_data(str(self.data)).val
        save_predictions(folder, Predictions(self.report_of(val.labels, errors), fingerprint(val)))
        lines = "".join(json.dumps(record) + "\n" for record in records())
        (folder / "metrics.jsonl").write_text(lines, "utf-8")
        return folder

    def report_of(self, labels: np.ndarray, errors: float) -> ClassificationReport:
        """Return predictions with this share of errors, mostly neighboring classes."""
        count, wrong = len(self.names), self.rng.random(len(labels)) < errors
        near = (labels + self.rng.choice([-1, 1, 1, 2], len(labels))) % count
        far = self.rng.integers(0, count, len(labels))
        other = np.where(self.rng.random(len(labels)) < 0.7, near, far)
        predictions = np.where(wrong, other, labels)
        ranks = (predictions != labels).astype(np.int64) * self.rng.integers(1, min(9, count), len(labels))
        confidence = self.rng.uniform(0.4, 1.0, len(labels)).astype(np.float32)
        losses = self.rng.uniform(0.1, 1.0, len(labels)).astype(np.float32)
        return ClassificationReport(
            tuple(self.names), np.arange(len(labels)), labels, predictions, ranks, confidence, losses
        )

    # The pages ---------------------------------------------------------------------------------------------------

    def page(self, kind: str) -> Path:
        """Write the page of this kind and return its path."""
        out = self.folder / f"{kind}.html"
        write: Callable[[Path], Any] = getattr(self, f"_{kind}")
        write(out)
        return out

    def _report(self, out: Path) -> None:
        report_run(self.runs[0], out=out)

    def _attention(self, out: Path) -> None:
        report_run(self.runs[1], out=out)

    def _comparison(self, out: Path) -> None:
        report_runs([str(run) for run in self.runs], out=out)

    def _check(self, out: Path) -> None:
        result = check(str(self.data), cache=False)
        write_check_page(out, result, problems=result.problems())

    def _look(self, out: Path) -> None:
        look_at(str(self.runs[1]), out=out)

    def _ranked(self, out: Path) -> None:
        write_ranked([str(run) for run in self.runs], str(self.data), out=out, top=6)

    def _search(self, out: Path) -> None:
        val = self.data / "val"
        index(str(self.runs[0]), [str(val)], out=str(self.folder / "index"), device="cpu")
        opened = open_index(self.folder / "index", images=[self.data])
        write_search_page(out, opened, opened.search([str(val / name) for name in self.names[:2]], top=9))

    def _notebook(self, out: Path) -> None:
        """Write outputs of a notebook, one below the other."""
        model, both = load(self.runs[1], device="cpu"), evaluate(self.runs)
        image = next((self.data / "val" / self.names[0]).iterdir())
        outputs = [one._repr_html_() for one in (model, model.look(image), both, *both.evaluations.values())]
        head = "<!doctype html><html lang='en'><meta charset='utf-8'><title>a notebook</title><main><h1>Outputs</h1>"
        out.write_text(head + "<br>".join(outputs) + "</main>", "utf-8")

    def _single(self, out: Path) -> None:
        export_page(self.runs[0], out)

    def _audit(self, out: Path) -> None:
        result = check(str(self.data), cache=False, reading=Reading())
        train = result.listings["train"]
        keys, count = tuple(train.images.key(row) for row in train.rows.tolist()), len(self.names)
        p = np.full((len(keys), count), 0.1 / (count - 1), np.float32)
        p[np.arange(len(keys)), np.roll(train.labels, 1)] = 0.9
        distances = np.ones(len(keys), np.float32)
        distances[-1] = 40
        predictions = OutOfFold(train.names, ("0",), keys, train.labels, np.ones(len(keys), np.int64), p, distances)
        report = make_report(str(self.data), self.folder, predictions, result, frozenset())
        unlabeled = WorthLabeling(str(self.data / "train" / self.names[0] / "twin.png"), self.names[-1], 0.3, 0.9)
        write_audit_page(out, replace(report, unlabeled=(unlabeled,)))

    def _sweep(self, out: Path) -> None:
        runs = [
            RunResult(
                data=f"{self.data}",
                setting={"optim.lr": lr, "optim.weight_decay": decay, "model": self.names[-1], "seed": seed},
                metric="top1",
                metrics={"top1": 70 + 4 * np.sin(1e3 * lr) + decay + 0.2 * seed},
                seconds=400.0,
                failed="no memory" if lr == 0.03 and seed else "",
            )
            for lr in (0.001, 0.003, 0.01, 0.03)
            for decay in (0.0, 0.05, 0.2)
            for seed in (0, 1)
        ]
        settings = list(
            {json.dumps({k: v for k, v in run.setting.items() if k != "seed"}): run for run in runs}.values()
        )
        rows = rows_of([{k: v for k, v in run.setting.items() if k != "seed"} for run in settings], runs)
        folder = out.parent / "sweep"
        folder.mkdir(exist_ok=True)
        write_sweep_page(Sweep(folder, rows, {f"run-{i}": run for i, run in enumerate(runs)}, "top1"))
        (folder / "sweep.html").rename(out)

    def _watch(self, out: Path) -> None:
        picture = out.parent / "epoch_0010.png"
        Image.linear_gradient("L").resize((900, 200)).save(picture)
        state = RunState(
            "runs/a-run", "running", "training", step=4321, total_steps=10000, epoch=13, epochs=30, images_per_s=812.0,
            left_s=1800.0, memory_mib=5120.0, values={"loss": 1.234}, best="best top1 71.2 after epoch 12",
            evaluation=records()[-1], picture=str(picture),
        )  # fmt: skip
        other = replace(state, run="runs/another", state="finished", picture=None)
        write_watch_page(out, [(state, records()), (other, records())], every_s=600)

    def _prune(self, out: Path) -> None:
        matrices = tuple(
            MatrixZeros(layer, letter, f"blocks.{layer}.{letter}.weight", 4096, 0)
            for layer in range(12)
            for letter in "ABC"
        )
        points = [
            Pruned(letters, share, bits, matrices, {"top1": 80 - 30 * (share or 2 / (bits or 2)) ** 2})
            for letters in ("A", "B", "C", "ABC")
            for share, bits in [*((s, None) for s in (0.3, 0.5, 0.8)), *((None, b) for b in (8, 4, 2))]
        ]
        whole = Pruned("ABC", None, None, matrices, {"top1": 81.25})
        write_pruning_page(Pruning("runs/a-run", str(self.data), whole, points, ("a note",)), out)

    def _tasks(self, out: Path) -> None:
        """Write a report with the sections of the tasks other than classification."""
        rng, image = self.rng, self._tinted(3).resize((160, 120))
        points = [Point(x, x + rng.normal(0, 0.3)) for x in rng.uniform(0, 10, 300)]
        groups = [Point(*rng.normal(k, 1, 2), name=f"{k}.png", group=name) for k, name in enumerate(self.names[:30])]
        right = rng.random(2000) < 0.7
        measured = reliability(rng.uniform(0.3, 1, 2000), right, rng.uniform(0, 1, 2000))
        charts = [
            ("True and predicted", scatter_chart(points, x_label="true, m", y_label="predicted, m", line=(1, 0)), "a"),
            ("Classes", scatter_chart(groups), "Points of one color are of one class."),
            ("Errors", histogram_chart(rng.normal(0, 1, 300), x_label="error, m", y_label="images"), ""),
            (
                "Attention",
                share_map(rng.random((9, 12)), self.names[:9], [*"abcdefghijkl"], down="to", across="from"),
                "",
            ),
        ]
        columns = ["class", "IoU", "95 % interval", "recall", "boundary IoU", "share of pixels"]
        rows = [(name, "16.7 %", "76.7 … 79.5", "98.7 %", "48.6 %", "76.4 %") for name in self.names]
        legend = [(name, (40 * i % 256, 90, 200)) for i, name in enumerate(self.names[:12])]
        where = f"photos/{'x' * 60}.jpg"
        sections = [
            table_section("Classes, worst first", columns, rows),
            picture_section([("A wide picture", image.resize((900, 300)), "a caption"), *charts]),
            reliability_section(measured, measured, ["Logits are divided by 1.2."]),
            gallery_section("worst", "Worst images", "Image, truth, prediction.", [([image] * 3, where)] * 2, legend),
            gallery_section("best", "Best images", "Each by itself.", [([image] * 4, [where] * 4)], legend),
            sample_section([("ein Satz", "a sentence", "a sentence"), ("x" * 90, "one", "another")]),
        ]
        report = Report(
            title="A report of every section",
            summary=Summary(model="resmlp_s12", data=where, best="12.3 %", command=f"patchloom train {where}"),
            records=records(),
            charts={"Validation top-1, %": validation("top1"), **training({"Parts of the loss": {"loss": "loss"}})},
            sections=sections,
        )
        write_report(out, report)


def records() -> list[dict[str, Any]]:
    """Return the records of a training of thirty epochs."""
    made: list[dict[str, Any]] = []
    for epoch in range(1, 31):
        loss = 0.3 + 2 / epoch
        for kind, weights, values in (
            ("train", "model", {"loss": loss, "lr": 1e-3 * (1 - epoch / 31)}),
            ("evaluation", "model", {"top1": 80 - 60 / epoch, "loss": loss + 0.3}),
            ("evaluation", "ema", {"top1": 82 - 70 / epoch, "loss": loss + 0.2}),
        ):
            time = {"images_per_s": 800.0 + epoch} if kind == "train" else {}
            step = {"step": 100 * epoch, "epoch": epoch, "kind": kind, "weights": weights}
            made.append({**step, "values": values, "time": time})
    return made
