"""Artifacts of ResMLP-S12 beside timm: eager, and timm's model through torch.onnx.export; float32, int8, cold start.

python benchmarks/export.py                                      # random weights, calibrated on drawn shapes
python benchmarks/export.py --data ../shared/data/imagenette160-val.parquet   # calibrated and compared on photographs
python benchmarks/export.py --cifar100 cifar/ --run runs/cifar                # what int8 loses of a model of CIFAR-100

Every contender has a process of its own, in which it is timed and its peak memory taken; the processes take turns. All
have the same weights (timm's, random), 224 pixels and as many threads (--threads 2), and their outputs are compared.
timm is given images that are normalised already; the artifacts take bytes and normalise them inside.

With --cifar100, a folder of train-*.parquet and val.parquet, a small ResMLP is trained for eight epochs into --run, or
taken from there, and int8 is compared with it on the 10,000 pictures of val.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
NETWORK, TIMM, SIZE = "resmlp_s12", "resmlp_12_224", 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCHES = (1, 8)
# Of `patchloom train`, for a model of CIFAR-100 that two cores train in minutes.
SMALL = (
    *("--model", "resmlp_s12", "--size", "32", "--epochs", "8", "--set", "model.options.patch_size=4"),
    *("--set", "model.options.dim=96", "--set", "model.options.depth=4", "--set", "optim.batch_size=128"),
    *("--set", "augment.policy=none", "--set", "augment.erasing=0", "--set", "augment.mixup=0"),
    *("--set", "augment.mix_probability=0", "--set", "model.drop_path=0", "--set", "objective.smoothing=0"),
)
CONTENDERS = {
    "timm": "timm, eager",
    "timm.onnx": "timm, torch.onnx.export",
    "float32": "artifact, float32",
    "int8": "artifact, int8",
}
COLD = (
    "import sys; sys.path.insert(0, {runtime!r}); import patchloom_runtime\n"
    "print(patchloom_runtime.load({artifact!r}, threads={threads}).predict({picture!r})[0], flush=True)\n"
    "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
)
NEEDED = ("onnxruntime", "numpy", "pillow", "flatbuffers", "protobuf", "packaging")


def prepare(folder: Path, data: str) -> None:
    """Everything that is timed, in a folder: weights, graphs, artifacts, pixels, a picture and the runtime."""
    import timm
    import torch
    from PIL import Image

    import patchloom
    from patchloom.data.sources.source import find_source
    from patchloom.exporters.onnx import quiet
    from patchloom.inference.classifier import Classifier
    from patchloom.models.pretrained.published import load_published
    from patchloom.runs.config import Preprocessing, RunFiles

    torch.manual_seed(0)
    theirs = timm.create_model(TIMM).eval()
    for name, parameter in theirs.named_parameters():
        # A fresh network is nearly an identity under a classifier of zeros: nothing would be compared.
        if ".ls" in name or name.startswith("head"):
            torch.nn.init.normal_(parameter, 0, 0.3 if ".ls" in name else 0.1)
    torch.save(theirs.state_dict(), folder / "timm.pt")
    network = patchloom.create_model(NETWORK).eval()
    load_published(network, theirs.state_dict())
    shown = Preprocessing(MEAN, STD, (SIZE, SIZE), 0.875)
    listing = find_source(data).train
    pictures, names = listing.images, (*listing.names, *(f"class {n}" for n in range(len(listing.names), 1000)))
    files = RunFiles(NETWORK, {**network.config.__dict__}, shown, None, names)
    Classifier(network, files).save_pretrained(folder / "run")
    Image.fromarray(np.asarray(pictures.read(0))).save(folder / "picture.jpg", quality=95)
    options: dict[str, Any] = {"data": data, "images": 16, "calibration": 32, "allowed_loss": 100.0}
    done = patchloom.export(str(folder / "run"), str(folder / "float32"), to="onnx", **_without(options))
    print(f"float32 beside the run: {_told(done)}")
    done = patchloom.export(str(folder / "run"), str(folder / "int8"), to="onnx", int8=True, **options)
    print(f"int8 beside the run: {_told(done)}")
    for note in done.notes:
        print(f"note: {note}")
    transform = patchloom.load(folder / "run", device="cpu")._transform
    count = min(max(BATCHES), len(pictures))
    np.save(folder / "pixels.npy", np.stack([transform(pictures.read(row)) for row in range(count)]))
    with quiet():
        images = torch.zeros(2, 3, SIZE, SIZE)
        batch = {0: torch.export.Dim.DYNAMIC}
        program = torch.onnx.export(theirs, (images,), dynamic_shapes=(batch,), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(folder / "timm.onnx"), external_data=False)
    package = "patchloom_runtime"
    shutil.copytree(HERE.parent / "runtime" / package, folder / "runtime" / package)


def _without(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("calibration", "allowed_loss")}


def _told(done: Any) -> str:
    row = next(row for row in done.rows[1:] if row.kept)
    return (
        f"{row.what}, {row.agreement:.1f} % the same answers of {done.images}, largest difference {row.difference:.2g} "
        f"({row.relative:.2g} of the largest output), {row.mib:.1f} MiB, "
        f"{row.integer} of {row.operators} integer operators"
    )


def contender(folder: Path, name: str, threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Pixels (B, 224, 224, 3) → a function without arguments that gives logits (B, 1000)."""
    if name == "timm":
        import timm
        import torch

        torch.set_num_threads(threads)
        network = timm.create_model(TIMM).eval()
        network.load_state_dict(torch.load(folder / "timm.pt", weights_only=True))

        def eager(images: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return np.asarray(network(torch.from_numpy(images)))

        return eager
    import onnxruntime

    if name == "timm.onnx":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
        entry = session.get_inputs()[0].name
        return lambda images: np.asarray(session.run(None, {entry: images})[0])
    sys.path.insert(0, str(folder / "runtime"))
    import patchloom_runtime  # type: ignore[import-not-found]

    model = patchloom_runtime.load(folder / name, threads=threads)
    return lambda pixels: np.asarray(model.outputs(pixels)["logits"])


def measure(folder: Path, name: str, threads: int, calls: int) -> None:
    """Print the milliseconds per image of every call, logits and peak memory of one contender, as JSON."""
    pixels = np.load(folder / "pixels.npy")
    images = ((pixels / 255 - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2)
    given = np.ascontiguousarray(images) if name.startswith("timm") else pixels
    answer = contender(folder, name, threads)
    took: dict[int, list[float]] = {}
    for batch in BATCHES:
        shown = np.ascontiguousarray(given[np.arange(batch) % len(given)])
        for call in range(calls + 3):
            begun = time.perf_counter()
            answer(shown)
            if call >= 3:
                took.setdefault(batch, []).append(1000 * (time.perf_counter() - begun) / batch)
    # Not getrusage: its peak counts the memory of the process that this one was started from.
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    print(json.dumps({"took": took, "logits": answer(given).tolist(), "peak_mib": peak / 1024}))


def cold(folder: Path, name: str, threads: int, starts: int) -> tuple[list[float], float]:
    """Seconds from the start of a process to its first answer, and its peak memory in MiB."""
    told = {"runtime": str(folder / "runtime"), "artifact": str(folder / name), "picture": str(folder / "picture.jpg")}
    code, took, peak = COLD.format(threads=threads, **told), [], 0.0
    for _ in range(starts + 1):  # the first reads files that the system does not hold yet
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("('")
            took.append(time.perf_counter() - begun)
            peak = max(peak, int(process.stdout.readline()) / 1024)
    return took[1:], peak


def installed() -> str:
    """What the light runtime brings, unpacked."""
    sizes = {}
    for name in NEEDED:
        found = distribution(name)
        sizes[name] = sum(Path(str(found.locate_file(file))).stat().st_size for file in found.files or ()
                          if Path(str(found.locate_file(file))).is_file()) / 1e6  # fmt: skip
    each = ", ".join(f"{name} {size:.0f}" for name, size in sizes.items())
    return f"the light runtime, installed: {sum(sizes.values()):.0f} MB ({each})"


def spread_of(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def cifar100(data: str, run: Path) -> None:
    """The table of the ways of int8 that were tried, up to the one that is kept."""
    import patchloom
    from patchloom.exporters.parity import columns

    if not (run / "run.json").exists():
        command = [sys.executable, "-m", "patchloom.cli", "train", data, "--out", str(run), *SMALL]
        subprocess.run(command, check=True)
    with tempfile.TemporaryDirectory() as temporary:
        done = patchloom.export(str(run), f"{temporary}/int8", int8=True, images=10_000, data=data)
    for note in done.notes:
        print(f"note: {note}")
    print(f"| {' | '.join(columns(done.measure))} |")
    for row in done.rows:
        print(f"| {' | '.join(row.cells())} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cifar100", help="folder of its parquet files")
    parser.add_argument("--run", type=Path, default=Path("runs/cifar"), help="of --cifar100")
    parser.add_argument("--data", default="shapes:count=200,size=224")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="in which the contenders take turns")
    parser.add_argument("--calls", type=int, default=10, help="of each batch in a round")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        measure(Path(given.folder), given.part, given.threads, given.calls)
        return
    if given.cifar100:
        cifar100(given.cifar100, given.run)
        return
    folder = Path(tempfile.mkdtemp())
    try:
        prepare(folder, given.data)
        compare(folder, given)
    finally:
        shutil.rmtree(folder)


def compare(folder: Path, given: argparse.Namespace) -> None:
    """The table."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    own = ["--folder", str(folder), "--threads", str(given.threads), "--calls", str(given.calls)]
    for _ in range(given.rounds):
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--part", name, *own]
            found[name].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    expected = np.array(found["timm"][0]["logits"])
    eager = {batch: median(_took(found["timm"], batch)) for batch in BATCHES}
    heads = [f"batch {batch}, ms/image | × timm eager" for batch in BATCHES]
    print(f"\n| | {' | '.join(heads)} | difference from timm, share of the largest logit | same top-1 | peak MiB |")
    print("|---" * (4 + 2 * len(BATCHES)) + "|")
    for name, label in CONTENDERS.items():
        logits = np.array(found[name][0]["logits"])
        gap = float(np.abs(logits - expected).max() / np.abs(expected).max())
        assert gap < (0.5 if name == "int8" else 1e-4), (name, gap)
        cells = []
        for batch in BATCHES:
            took = _took(found[name], batch)
            cells += [spread_of(took, 1), f"{eager[batch] / median(took):.2f}"]
        same = int((logits.argmax(1) == expected.argmax(1)).sum())
        peak = max(one["peak_mib"] for one in found[name])
        print(f"| {label} | {' | '.join(cells)} | {gap:.1e} | {same} of {len(logits)} | {peak:.0f} |")
    print("\n| light runtime | from process start to first answer, s | peak MiB | file, MiB |")
    print("|---|---|---|---|")
    for name in ("float32", "int8"):
        took, peak = cold(folder, name, given.threads, given.rounds)
        size = (folder / name / "model.onnx").stat().st_size / 2**20
        print(f"| {CONTENDERS[name]} | {spread_of(took, 2)} | {peak:.0f} | {size:.1f} |")
    print(f"\n{installed()}")


def _took(rounds: list[dict[str, Any]], batch: int) -> list[float]:
    return [value for one in rounds for value in one["took"][str(batch)]]


if __name__ == "__main__":
    main()
