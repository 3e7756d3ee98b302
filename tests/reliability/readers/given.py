"""Readers of single files that a user hands over: a recipe, weights of others, pictures to be classified."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchloom.inference.classifier import load
from patchloom.models.registry import create_model
from patchloom.runs.weights import refuse_bad, weights_digest
from patchloom.tasks.images.networks import initialize
from patchloom.tasks.plan import TrainingSettings
from patchloom_runtime.errors import CheckpointError, DataError
from tests.reliability.readers.reader import Reader, pixels

NETWORK: dict[str, Any] = {"image_size": 16, "patch_size": 8, "dim": 16, "depth": 1, "num_classes": 2}


def make_recipe(seeds: Path, folder: Path) -> None:
    """The recipe of a run, as a user would edit it."""
    shutil.copyfile(seeds / "run" / "recipe.yaml", folder / "recipe.yaml")


def plan_by_recipe(seeds: Path, folder: Path) -> Any:
    """What `train --dry-run` plans."""
    given = TrainingSettings(
        data=str(seeds / "data"),
        out=str(folder.parent / "planned"),
        recipe=str(folder / "recipe.yaml"),
        device="cpu",
        workers=0,
    )
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "seen")
    from patchloom.training.run import make_plan

    plan = make_plan(given, "cpu")
    return plan.recipe, [str(choice) for choice in plan.choices]


def make_weights(seeds: Path, folder: Path) -> None:
    """The weights of one network in each format."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = create_model("resmlp_s12", **NETWORK).state_dict()
    save_file(state, folder / "a.safetensors", {"format": "pt"})
    torch.save({"model": state}, folder / "a.pth")
    np.savez(folder / "a.npz", **{name: tensor.numpy() for name, tensor in state.items()})


def start_from(seeds: Path, folder: Path) -> Any:
    """The weights that a training would start from, with each of the files."""
    found = []
    for name in ("a.safetensors", "a.pth", "a.npz"):
        network = create_model("resmlp_s12", **NETWORK)
        initialize(network, str(folder / name))
        refuse_bad(dict(network.state_dict()), name, CheckpointError)
        found.append(weights_digest(dict(network.state_dict())))
    return found


def make_pictures(seeds: Path, folder: Path) -> None:
    """One picture in every format."""
    picture = Image.fromarray(pixels(5, 24))
    for end in ("png", "jpg", "gif", "webp", "bmp", "tiff", "ppm"):
        picture.save(folder / f"a.{end}")
    picture.quantize(16).save(folder / "palette.png", transparency=3)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "turned.jpg", exif=exif, progressive=True)
    picture.save(folder / "packed.tif", compression="tiff_lzw")


_classifiers: dict[Path, Any] = {}


def predict(seeds: Path, folder: Path) -> Any:
    """What the run says of each picture; one that cannot be read is named."""
    if seeds not in _classifiers:
        _classifiers[seeds] = load(seeds / "run", device="cpu")
    answers = list(_classifiers[seeds].predict_files([folder]))
    if bad := [answer.error for answer in answers if answer.error]:
        raise DataError(bad[0])
    return [(os.path.basename(answer.path), answer.answers) for answer in answers]


GIVEN: dict[str, Reader] = {
    "recipe": Reader(make_recipe, plan_by_recipe, {"recipe.yaml": "yaml"}, share=2),
    "weights": Reader(
        make_weights, start_from, {"a.safetensors": "safetensors", "a.pth": "bytes", "a.npz": "zip"}, share=2
    ),
    "pictures": Reader(
        make_pictures,
        predict,
        {"*.png": "png", "*.jpg": "jpg", **{f"*.{e}": "bytes" for e in ("gif", "webp", "bmp", "tif*", "ppm")}},
        share=2,
        command=lambda seeds, folder: ("predict", seeds / "run", folder),
    ),
}
