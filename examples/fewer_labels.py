"""Learn without labels (DINO) and from coarse ones (Grafit) on the built-in shapes; then measure, judge, fine-tune."""

import tempfile
from pathlib import Path

import patchloom

DATA = "shapes:count=64,size=32"
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4}
HEAD = {"dino.outputs": 32, "dino.hidden": 16, "dino.bottleneck": 8}
SHORT = {"model": "resmlp_s12", "epochs": 1, "batch": 16, "device": "cpu", "workers": 0}

with tempfile.TemporaryDirectory() as folder:
    runs = Path(folder)
    dino = patchloom.train(DATA, recipe="dino_small_images", set=TINY | HEAD, out=str(runs / "dino"), **SHORT)
    print(dict(patchloom.load(dino.folder, device="cpu").probe(DATA, knn=(20,), linear=True)))
    tuned = patchloom.train(
        DATA, recipe="small_images", set=TINY, init=str(dino.folder), out=str(runs / "tuned"), **SHORT
    )
    print(tuned.metrics["top1"])

    grafit = patchloom.train(
        DATA, recipe="grafit_small_images", set=TINY, level="coarse", out=str(runs / "grafit"), **SHORT
    )
    found = patchloom.evaluate_levels([str(grafit.folder)], DATA, device="cpu").runs["grafit"]
    print(found.trained_level, found.values["map"], found.values["map_conditioned"], found.values["map_oracle"])
