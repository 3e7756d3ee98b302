"""How the folders beside this file were made, once, by the commit in `MADE_BY`: `python make.py` in an empty folder.

They are what an earlier patchloom wrote, so they are never made again: `tests/runs/test_golden.py` reads them.
`index_of_shards` is what `patchloom index classifier shards` of commit 89a0d05d wrote, of two shards of three of the
pictures each, packed in the order 0 2 4, 1 3 5.
"""

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load_file

import patchloom
from patchloom.cli import main
from patchloom.layers import projector

SMALL_HIDDEN = 8  # of Grafit's predictor, 4096 wide: its state would be megabytes
SHAPES = "shapes:count=60,size=32"
NETWORK = ("--set", "model.options.depth=1", "--set", "model.options.dim=8", "--set", "model.options.patch_size=8")
SMALL = ("--device", "cpu", "--workers", "0", "--batch", "32", "--size", "16", *NETWORK)
DINO = ("--set", "dino.outputs=16", "--set", "dino.hidden=16", "--set", "dino.bottleneck=8", "--set", "views.local=0")
WORDS = ("dim=8", "hidden=16", "layers=1", "heads=2")
TEXT = ("vocabulary=300", "max_length=64", "averaged_epochs=2")
TRANSLATION = (
    *("--batch", "600", "--device", "cpu", "--set", "schedule.warmup_steps=4"),
    *(part for value in WORDS for part in ("--set", f"model.options.{value}")),
    *(part for value in TEXT for part in ("--set", f"text.{value}")),
)
# Run → the command that trains it, and resumes it with more epochs.
COMMANDS = {
    "classifier": ("train", SHAPES, "--recipe", "small_images", *SMALL, "--set", "optim.ema_decay=0.9"),
    "distilled": ("train", SHAPES, "--recipe", "small_images", *SMALL, "--teacher", "classifier"),
    "dino": ("train", SHAPES, "--recipe", "dino_small_images", "--model", "resmlp_s12", *SMALL, *DINO),
    "grafit": (
        *("train", SHAPES, "--recipe", "grafit_small_images", "--model", "resmlp_s12", "--level", "coarse"),
        *SMALL,
    ),
    "translator": ("train", "numbers:count=150", "--recipe", "translation_tiny", *TRANSLATION),
}


def command(*arguments: str) -> None:
    """`patchloom …`"""
    sys.argv = ["patchloom", *arguments]
    with suppress(SystemExit):
        main()


def evaluations(folder: Path) -> list[list[object]]:
    """Epoch, weights and values of every evaluation in `metrics.jsonl`."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line["epoch"], line["weights"], line["values"]] for line in lines if line["kind"] == "evaluation"]


def size_of_weights(folder: Path) -> float:
    """Sum of the absolute values of the newest weights."""
    newest = max((folder / "checkpoints").iterdir())
    return sum(float(value.double().abs().sum()) for value in load_file(newest / "weights.safetensors").values())


if __name__ == "__main__":
    projector.HIDDEN_DIM = SMALL_HIDDEN
    Path("pictures").mkdir()
    for i in range(6):
        patchloom.open_data(SHAPES).val.read(i).save(f"pictures/{i}.png")
    expected = {}
    for name, line in COMMANDS.items():
        command(*line, "--epochs", "2", "--out", name)
    command("index", "classifier", "pictures", "--out", "index")
    expected["predict"] = patchloom.load("classifier").predict("pictures", top=16)
    found = patchloom.open_index("index").search("pictures/0.png", top=3)
    expected["search"] = [[Path(hit.path).name, hit.score] for hit in found.hits]
    for name, line in COMMANDS.items():
        shutil.copytree(name, f"resumed-{name}")
        command(*line, "--epochs", "3", "--out", f"resumed-{name}")
        expected[name] = {
            "evaluations": evaluations(Path(f"resumed-{name}")),
            "weights": size_of_weights(Path(f"resumed-{name}")),
        }
        shutil.rmtree(f"resumed-{name}")
        for path in (f"{name}/report.html", f"{name}/.lock"):
            Path(path).unlink()
    Path("index/.lock").unlink()
    Path("expected.json").write_text(json.dumps(expected, indent=1))
