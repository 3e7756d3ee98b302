"""A run for power cuts: it saves after every step and marks what it has saved; and what must be left of it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchloom.runs.checkpoints import CheckpointFolder, find_checkpoint, read_checkpoint
from patchloom.runs.metrics import METRICS, metrics_fault, read_metrics
from patchloom.runs.weights import WEIGHTS
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.verify import verify
from patchloom.training import run as training
from patchloom_runtime.errors import PatchloomError
from tests.reliability.power_cuts import mark

DATA = "shapes:count=24,size=16"
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}


def train_tiny(out: Path, epochs: int = 2) -> None:
    """Train for a few steps; for a copy of this process, as it changes how runs are saved."""
    make_run, save = training.make_run, CheckpointFolder.save

    def saving_often(*given: Any, **options: Any) -> Any:
        run, *rest = make_run(*given, **options)
        return replace(run, save_every_s=0.0, log_every=1), *rest

    def marking(self: CheckpointFolder, snapshot: Any, processes: Any) -> None:
        save(self, snapshot, processes)
        mark(f"saved {snapshot.step}")

    training.make_run, CheckpointFolder.save = saving_often, marking  # type: ignore[method-assign]
    random.seed(0)  # Python gives each copy of a process another seed
    training.run_training(
        TrainingSettings(
            data=DATA, recipe="small_images", out=str(out), epochs=epochs, batch=8, size=16, workers=0, device="cpu",
            changes=TINY | {"optim.ema_decay": 0.9, "augment.mixup": 0.8},
        )
    )  # fmt: skip
    mark("finished")


def check_run(folder: Path, marks: list[str]) -> str:
    """A run folder has the newest checkpoint that was promised, or a newer one, and nothing that is damaged."""
    saved = [int(text.partition(" ")[2]) for text in marks if text.startswith("saved")]
    try:
        found = find_checkpoint(folder, read_checkpoint)
    except PatchloomError as error:
        return str(error)
    step = found.snapshot.step if found else -1
    if saved and step < saved[-1]:
        return f"step {saved[-1]} was saved, step {step} is there"
    if found and found.notes:
        return found.notes[0]
    if found and (fault := metrics_fault(folder)):
        return fault
    if not (folder / "config.json").is_file():
        return "config.json is missing" if saved else ""
    checked = verify(folder)
    if checked.wrong:
        return "; ".join(f"{name}: {fault}" for name, fault in checked.wrong.items())
    is_judged = found is not None and found.snapshot.values["progress"]["best_weights"]
    if lost := {METRICS, *([WEIGHTS] if is_judged else [])} & set(checked.missing) if saved else set():
        return f"{', '.join(lost)} is missing"
    if "finished" in marks and not all((folder / name).is_file() for name in ("run.json", "report.html")):
        return "the finished run has no run.json or no report.html"
    return ""


def left_by(out: Path) -> dict[str, Any]:
    """Best weights, last checkpoint and metrics; without what the clock decides."""
    found = find_checkpoint(out)
    assert found is not None
    return {
        "best": (out / "weights.safetensors").read_bytes(),
        "last": {p: {n: t.numpy().tobytes() for n, t in named.items()} for p, named in found.snapshot.tensors.items()},
        "metrics": [
            {key: value for key, value in record.items() if key != "time"} for record in read_metrics(out / METRICS)
        ],
    }
