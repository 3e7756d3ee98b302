"""Readers of runs of every task: used, evaluated, shown, resumed, verified."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from patchloom.inference.classifier import load
from patchloom.models.pretrained.table import weights_named
from patchloom.runs import checksums
from patchloom.runs import locate as named
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import weights_digest
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.report import report_run
from patchloom.tasks.table import task_of_run
from patchloom.tasks.translation.model import load_translator
from patchloom.tasks.verify import verify
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError
from tests.reliability.readers.reader import Reader, copy, made, queries
from tests.reliability.readers.repairs import repair_run
from tests.reliability.readers.seeds import dense_run, settings, sweep_settings, swept

RUN_FILES = {"run/config.json": "json", "run/labels.json": "json", "run/recipe.yaml": "yaml"}
RUN_FILES |= {"run/weights.safetensors": "safetensors", "run/checksums.json": "json"}
RECORDS = {"run/run.json": "json", "run/data.json": "json", "run/metrics.jsonl": "jsonl"}
RECORDS |= {"run/predictions.safetensors": "safetensors"}
CHECKPOINTS = {
    f"run/checkpoints/*/{name}": kind for name, kind in (("*.safetensors", "safetensors"), ("*.json", "json"))
}
TEXT_FILES = {name.replace("run/", "translator/"): kind for name, kind in RUN_FILES.items() if "labels" not in name}
TEXT_FILES |= {"translator/vocabulary.model": "bytes"}
_PUBLISHED = weights_named("resmlp_s12:in1k")


def make_dense(seeds: Path, folder: Path, *, name: str) -> None:
    """A run of one of the tasks at every place, without its checkpoints, under the name of all runs."""
    shutil.copytree(
        dense_run(seeds, name),
        folder / "run",
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns("checkpoints", "*.html"),
    )


def make_named(seeds: Path, folder: Path) -> None:
    """A run whose classes have other names, and the row of the table that its weights came from."""
    copy("run", seeds, folder)
    names = json.dumps([["azure", "navy"], ["scarlet"]]).encode()
    checksums.write_checked(folder / "run", {"names.json": names})
    (folder / "run" / named.ORIGIN).write_text(json.dumps(named._row(_PUBLISHED), indent=1))


def read_run(seeds: Path, folder: Path) -> Any:
    """Classes and probabilities, to the bit."""
    classifier = load(folder / "run", device="cpu")
    return classifier.labels, classifier.predict(queries(seeds), top=9)


def read_decisions(seeds: Path, folder: Path) -> Any:
    """What `evaluate RUN` says."""
    found = evaluate(folder / "run")
    report = found.evaluations["run"].report
    return found.values(), report.classes, report.predictions.tolist(), report.losses.tolist()


def read_scores(seeds: Path, folder: Path) -> Any:
    """What `evaluate RUN` says of a detector or a segmenter, from what it kept of val."""
    return task_of_run(folder / "run").report.evaluate({"run": folder / "run"}, None, split=None, device="cpu").values


def read_named(seeds: Path, folder: Path) -> Any:
    """Its classes by all their names, and whether it is the folder of the published weights."""
    files = read_run_files(folder / "run")
    return files.table, files.labels_as(["navy", "scarlet"]), named._is_current(folder / "run", _PUBLISHED)


def read_report(seeds: Path, folder: Path) -> Any:
    """The page; damage that it tells of is as good as refused."""
    page = report_run(folder / "run", out=folder / "page.html").read_text()
    (folder / "page.html").unlink()
    return _unless_told(page, folder)


def _unless_told(page: str, folder: Path) -> str:
    """The page; an error where one of its notes names a file of the folder."""
    if f"<li>{folder}" in page:
        raise CheckpointError("told on the page")
    return page


def read_checkpoint(seeds: Path, folder: Path) -> Any:
    """What a resume would go on from."""
    found = find_checkpoint(folder / "run")
    if found is None:
        raise CheckpointError("there is none")
    if found.notes:
        raise CheckpointError(found.notes[0])
    return found.snapshot.values, {part: weights_digest(named) for part, named in found.snapshot.tensors.items()}


def resume(seeds: Path, folder: Path) -> Any:
    """The weights after another epoch."""
    said: list[str] = []
    run_training(settings(seeds / "data", folder / "run", epochs=3), say=said.append)
    if any("skipped" in line for line in said):
        raise CheckpointError("said")
    return load(folder / "run", device="cpu").predict(queries(seeds), top=9)


def verified(seeds: Path, folder: Path) -> Any:
    """Nothing, where nothing is wrong."""
    found = verify(next(folder.iterdir()))
    if found.wrong or found.missing or found.without_checksum:
        raise CheckpointError(f"wrong: {found.wrong}"[:200])
    return "whole"


def read_translator(seeds: Path, folder: Path) -> Any:
    """Translations of two lines, with scores."""
    lines = ["one hundred and two", "seven"]
    return list(load_translator(folder / "translator", device="cpu").translate(lines, beams=2))


def read_text_report(seeds: Path, folder: Path) -> Any:
    """The page of a translator."""
    page = report_run(folder / "translator", out=folder / "page.html").read_text()
    (folder / "page.html").unlink()
    return _unless_told(page, folder)


def make_sweep(seeds: Path, folder: Path) -> None:
    """A finished sweep."""
    ignored = shutil.ignore_patterns("checkpoints", "*.html")
    shutil.copytree(swept(seeds), folder / "swept", copy_function=shutil.copyfile, ignore=ignored)


def read_sweep(seeds: Path, folder: Path) -> Any:
    """The table of a sweep; its note on a damaged record is as good as refused."""
    found = sweep_settings(seeds, folder / "swept")
    if found.notes:
        raise CheckpointError(found.notes[0])
    return found.table(), found.to_dict()


def _predict_command(seeds: Path, folder: Path) -> tuple[Any, ...]:
    return ("predict", folder / "run", *queries(seeds))


RUNS: dict[str, Reader] = {
    "run": Reader(
        made("run"),
        read_run,
        {**RUN_FILES, "run/calibration.json": "json"},
        repair_run,
        ours=True,
        share=2,
        command=_predict_command,
    ),
    "decisions": Reader(
        made("run"),
        read_decisions,
        {**RUN_FILES, "run/predictions.safetensors": "safetensors"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "report": Reader(
        made("run"),
        read_report,
        {**RUN_FILES, **RECORDS},
        repair_run,
        ours=True,
        writes=True,
        command=lambda _, folder: ("report", folder / "run"),
    ),
    "checkpoint": Reader(made("run"), read_checkpoint, CHECKPOINTS, repair_run, ours=True),
    "resume": Reader(
        made("run"),
        resume,
        {**CHECKPOINTS, **RUN_FILES, **RECORDS},
        repair_run,
        writes=True,
        share=0.25,
        command=lambda seeds, folder: ("train", seeds / "data", "--out", folder / "run", "--epochs", 3),
    ),
    "verify": Reader(
        made("run"),
        verified,
        {**RUN_FILES, **RECORDS, **CHECKPOINTS},
        repair_run,
        ours=True,
        notices=True,
        command=lambda _, folder: ("verify", folder / "run"),
    ),
    "translator": Reader(made("translator"), read_translator, TEXT_FILES, repair_run, ours=True),
    "translator report": Reader(
        made("translator"),
        read_text_report,
        {
            **TEXT_FILES,
            **{
                f"translator/{n}": k
                for n, k in (("run.json", "json"), ("val.json", "json"), ("metrics.jsonl", "jsonl"))
            },
        },
        repair_run,
        ours=True,
        writes=True,
        share=0.5,
    ),
    "detector": Reader(
        partial(make_dense, name="detector"),
        read_scores,
        {"run/val.json": "json", "run/labels.json": "json", "run/config.json": "json"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "detector report": Reader(
        partial(make_dense, name="detector"),
        read_report,
        {**RUN_FILES, "run/val.json": "json", "run/run.json": "json"},
        repair_run,
        ours=True,
        writes=True,
        share=0.25,
    ),
    "segmenter": Reader(
        partial(make_dense, name="segmenter"),
        read_scores,
        {"run/segmented.safetensors": "safetensors", "run/labels.json": "json", "run/config.json": "json"},
        repair_run,
        ours=True,
        command=lambda _, folder: ("evaluate", folder / "run"),
    ),
    "segmenter report": Reader(
        partial(make_dense, name="segmenter"),
        read_report,
        {**RUN_FILES, "run/segmented.safetensors": "safetensors", "run/run.json": "json"},
        repair_run,
        ours=True,
        writes=True,
        share=0.25,
    ),
    "sweep": Reader(make_sweep, read_sweep, {"swept/sweep.json": "json"}, writes=True, share=0.25),
    "names": Reader(
        make_named,
        read_named,
        {"run/names.json": "json", "run/published.json": "json", "run/labels.json": "json"},
        repair_run,
        ours=False,
    ),
}
