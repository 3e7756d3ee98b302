"""Train at two levels of a taxonomy and judge both at both: the shapes have sixteen classes in four families."""

import tempfile
from pathlib import Path

import patchloom

DATA = "shapes:count=64,size=32"
TINY = {"model.options.depth": 2, "model.options.dim": 32, "model.options.patch_size": 4}

with tempfile.TemporaryDirectory() as folder:
    runs = {name: str(Path(folder) / name) for name in ("coarse", "fine")}
    for name, level in (("coarse", "coarse"), ("fine", None)):
        patchloom.train(
            DATA, model="resmlp_s12", recipe="small_images", epochs=1, batch=16, device="cpu", workers=0,
            set=TINY, level=level, out=runs[name],
        )  # fmt: skip
    found = patchloom.evaluate_levels(list(runs.values()), DATA, device="cpu")
    for measure in ("knn_top1", "map"):
        print(measure, found.table(measure))  # level judged at → run → percent
    print({name: (run.trained_level, run.neighbours) for name, run in found.runs.items()})
