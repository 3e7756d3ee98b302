"""Train a small convnet on drawn shapes, distil a small ResMLP from it, classify a picture."""

import tempfile
from pathlib import Path

import patchloom

DATA = "shapes:count=64,size=32"
TINY = {"model.options.depth": 2, "model.options.dim": 32, "model.options.patch_size": 4}

with tempfile.TemporaryDirectory() as folder:
    runs = Path(folder)
    teacher = patchloom.train(
        DATA, model="patchconvnet_s20", recipe="small_images", epochs=2, batch=16, device="cpu", workers=0,
        set=TINY | {"model.options.stem": "linear"}, out=str(runs / "teacher"),
    )  # fmt: skip
    student = patchloom.train(
        DATA, model="resmlp_s12", recipe="small_images", epochs=2, batch=16, device="cpu", workers=0,
        set=TINY, teacher=str(teacher.folder), out=str(runs / "student"),
    )  # fmt: skip
    print("student", student.metrics)
    picture = patchloom.open_data(DATA).val.read(0)
    print("answers", patchloom.load(student.folder).predict([picture]))
