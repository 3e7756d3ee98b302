"""Everything readers begin with: pictures, runs trained on them, an index; and what lies beside their folders."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom.inference.index_build import index
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import silent
from patchloom.training.run import run_training
from patchloom.training.sweeps.sweep import sweep
from patchloom.training.sweeps.table import Sweep
from tests.reliability.readers.reader import CLASSES, pixels
from tests.tasks.translation import translation_runs

PICTURES = 6  # of each class
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
DETECTOR = {"model.options.dim": 16, "detect.channels": 8, "detect.hidden": 8, "detect.proposals": 8}
DETECTOR |= {"detect.regions": 4, "detect.min_score": 0.0, "detect.most": 3, "model.options.depth": 1}
SEGMENTER = TINY | {"segment.channels": 8, "segment.auxiliary_channels": 8}


def settings(data: Path, out: Path, **changes: Any) -> TrainingSettings:
    """A training of a second."""
    values: dict[str, Any] = {"recipe": "small_images", "epochs": 2, "batch": 4, "size": 16, "workers": 0} | changes
    return TrainingSettings(data=str(data), out=str(out), device="cpu", changes=TINY, **values)


def make_seeds(seeds: Path) -> None:
    """Everything readers begin with."""
    for number, name in enumerate(CLASSES):
        (seeds / "data" / name).mkdir(parents=True)
        for i in range(PICTURES):
            Image.fromarray(pixels(100 * number + i)).save(seeds / "data" / name / f"{i}.png")
    with redirect_stdout(io.StringIO()):
        run_training(settings(seeds / "data", seeds / "run"), say=silent)
        run_training(translation_runs.settings(seeds / "translator"), say=silent)
    index(str(seeds / "run"), [seeds / "data"], out=seeds / "index", device="cpu")


def dense_run(seeds: Path, name: str) -> Path:
    """A run that answers at every place, trained when it is first asked for: not every test needs one."""
    folder = seeds / name
    if not folder.exists():
        task, model, changes = {
            "detector": ("detect", "patchconvnet_s20", DETECTOR),
            "segmenter": ("segment", "resmlp_s12", SEGMENTER),
        }[name]
        given = TrainingSettings(
            data="shapes:count=16,size=32", task=task, level="coarse", model=model, out=str(seeds / f"{name}-begun"),
            device="cpu", workers=0, epochs=1, batch=8, size=32, changes=changes,
        )  # fmt: skip
        with redirect_stdout(io.StringIO()):
            run_training(given, say=silent)
        (seeds / f"{name}-begun").rename(folder)
    return folder


def swept(seeds: Path) -> Path:
    """Return the folder of a sweep over two settings, trained on the first call: not every test needs one."""
    folder = seeds / "swept"
    if not folder.exists():
        with redirect_stdout(io.StringIO()):
            sweep_settings(seeds, seeds / "swept-begun")
        (seeds / "swept-begun").rename(folder)
    return folder


def sweep_settings(seeds: Path, out: Path) -> Sweep:
    """Sweep over two settings, or return those that are done."""
    options: dict[str, Any] = {"recipe": "small_images", "epochs": 1, "batch": 4, "size": 16, "workers": 0}
    grid = {"optim.lr": [1e-3, 1e-4]}
    return sweep(str(seeds / "data"), grid, out=str(out), set=TINY, device="cpu", say=silent, **options)


def make_outside(outside: Path) -> None:
    """What lies beside a reader's folder: links and names lead there, and nobody may change it."""
    outside.mkdir()
    Image.fromarray(pixels(77)).save(outside / "secret.png")
    (outside / "secret.json").write_text('{"secret": true}')
    (outside / "secret.txt").write_text("secret\n")
