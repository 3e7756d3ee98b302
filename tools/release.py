"""Build the distributions of patchloom and patchloom-runtime, and try them as a user who installs them.

    python tools/release.py build                    # dist/: sdists and wheels, built twice with equal bytes
    python tools/release.py check                    # installs the wheels into new environments and uses them
    python tools/release.py check --only core sign   # some of the environments
    python tools/release.py sbom                     # dist/: the packages in both core environments (CycloneDX)

docs/releasing.md describes the whole release. `check` runs outside the checkout. Environments are made in .release/:
`core` (patchloom without extras), one per extra, `runtime` (patchloom-runtime with onnxruntime) and `server`
(deploy/Dockerfile.serve). An extra's environment installs what the extra adds and reads everything else from `core`:
torch would otherwise be installed 17 times. `runtime` and `server` use the artifact that `export` writes, so they
check `export` too.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, PLACE = ROOT / "dist", ROOT / ".release"
PACKAGES = {"patchloom": ROOT, "patchloom_runtime": ROOT / "runtime"}
CONSTRAINTS = ROOT / "constraints.txt"
# Extra → the modules it adds. `core` must not have them. dev and fuzz are for checkouts.
EXTRAS = {
    "parquet": "pyarrow",
    "buckets": "obstore",
    "ray": "ray",
    "stream": "datasets",
    "digits": "sklearn",
    "faiss": "faiss",
    "video": "av",
    "heic": "pillow_heif",
    "export": "onnx onnxscript onnxruntime",
    "openvino": "openvino",
    "translate": "sentencepiece sacrebleu",
    "serve": "granian starlette prometheus_client",
    "log": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "sign": "model_signing OpenSSL",
    "docs": "mkdocs material",
}
ENVIRONMENTS = ["core", *EXTRAS, "runtime", "server"]
UNPINNED = {"mlflow", "trackio"}  # require older versions of pyarrow, protobuf or Pillow than constraints.txt has
# Commands that need an extra: `core` refuses them and names the extra.
COMMANDS = {
    "digits": ["train digits --epochs 1 --set train_share=0.1 --out runs/digits"],
    "export": ["export runs/photos --out photos-onnx"],
    "sign": ["sign runs/photos --key key.pem", "verify runs/photos --key pub.pem"],
}
PHOTOS = """
import numpy, PIL.Image, pathlib
for number, name in enumerate(("rose", "tulip")):
    folder = pathlib.Path("photos", name)
    folder.mkdir(parents=True)
    for i in range(10):
        pixels = numpy.random.default_rng(100 * number + i).integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{i}.png")
PIL.Image.open("photos/rose/0.png").save("new.jpg")
"""
SERVER_FILE = ROOT / "deploy" / "Dockerfile.serve"
SERVED = """
import http.client, importlib.util, os, signal, threading, patchloom

def predict(address):
    connection = http.client.HTTPConnection(address.removeprefix("http://").strip("/"))
    connection.request("POST", "/predict", open("new.jpg", "rb").read())
    answers.append(connection.getresponse().read())
    os.kill(os.getpid(), signal.SIGTERM)

def started(address, app):
    threading.Thread(target=predict, args=[address]).start()

answers = []
assert importlib.util.find_spec("torch") is None
patchloom.serve("photos-onnx", port=0, on_start=started)
assert b"rose" in answers[0], answers
"""
PREDICTED = """
import importlib.util, patchloom_runtime
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("patchloom") is None
(name, score), *_ = patchloom_runtime.load("photos-onnx").predict("new.jpg")
assert name in ("rose", "tulip") and 0 <= score <= 1
"""


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "patchloom" / "__init__.py").read_text("utf-8"))[1]


def run(command: list[str | Path], **options: object) -> None:
    print("$", shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


# Build ---------------------------------------------------------------------------------------------------------------


def build(folder: Path) -> dict[str, str]:
    """Build both packages from their sdists. Return the SHA-256 of every file. The date is that of the last commit."""
    environment = dict(os.environ)
    if "SOURCE_DATE_EPOCH" not in environment:
        log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
        environment["SOURCE_DATE_EPOCH"] = log.stdout.strip()
    for source in PACKAGES.values():
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def build_twice() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        sums = build(Path(first))
        if build(Path(second)) != sums:
            sys.exit("error: the second build has other bytes than the first")
        run([sys.executable, "-m", "twine", "check", "--strict", *Path(first).iterdir()])
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for name in sums:
            shutil.copyfile(Path(first) / name, DIST / name)
    (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), "utf-8")
    print((DIST / "SHA256SUMS").read_text("utf-8"), end="")


# Environments --------------------------------------------------------------------------------------------------------


class Environment:
    """An environment in .release/ with these packages; made anew if they, the wheels or the interpreter are others."""

    def __init__(self, name: str, packages: list[str], python: str, below: "Environment | None" = None) -> None:
        self.folder, stamp = PLACE / name, PLACE / f"{name}.txt"
        contents = [python, *packages, (DIST / "SHA256SUMS").read_text("utf-8"), below.digest if below else ""]
        self.digest = hashlib.sha256("\n".join(contents).encode()).hexdigest()
        if stamp.exists() and stamp.read_text("utf-8") == self.digest:
            return
        stamp.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        run([python, "-m", "venv", "--without-pip", self.folder])
        if below:
            (self.packages() / "below.pth").write_text(f"{below.packages()}\n", "utf-8")
        self.install(*packages)
        stamp.write_text(self.digest, "utf-8")

    @property
    def python(self) -> Path:
        return next(path for path in self.folder.glob("*/python*") if path.stem == "python")

    def install(self, *words: str) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        pins = [] if self.folder.name in UNPINNED else ["--constraint", CONSTRAINTS]
        run([*pip, *pins, "--find-links", DIST, *words])

    def packages(self) -> Path:
        return next(path for path in self.folder.rglob("site-packages") if path.is_dir())

    def run(self, place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python of this environment outside the checkout. Exit with its output if it fails."""
        done = self.attempt(place, *words)
        if done.returncode:
            sys.exit(f"error: {self.folder.name}: {shlex.join(map(str, words))}\n{done.stdout}\n{done.stderr}")
        return done

    def attempt(self, place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run([self.python, *words], cwd=place, env=clean, capture_output=True, text=True, timeout=600)

    def script(self) -> Path:
        """Return the command `patchloom` of this environment, or else of `core`."""
        places = [self.python.parent, PLACE / "core" / self.python.parent.name]
        return next(path for place in places for path in place.glob("patchloom*"))

    def patchloom(self, place: Path, command: str) -> None:
        print(f"{self.folder.name}: patchloom {command}", flush=True)
        self.run(place, self.script(), *shlex.split(command))


def readme_commands() -> tuple[list[str], str]:
    """Return the commands and the program of the README, with three epochs from random weights for published ones."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = dict(re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL)[:2])
    lines = [re.sub(r"\s#.*", "", line).strip() for line in blocks["bash"].splitlines()]
    commands = [line.removeprefix("patchloom ") for line in lines if line.startswith("patchloom ")]
    return [command.replace("--init in1k", "--epochs 3") for command in commands], blocks["python"]


def check(only: list[str], python: str) -> None:
    wanted = set(only or ENVIRONMENTS)
    if wanted & {"runtime", "server"}:
        wanted.add("export")  # writes the artifact that they use
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        core = check_core(place, python)
        for extra in [name for name in EXTRAS if name in wanted]:
            check_extra(extra, core, place, python)
        if "server" in wanted:
            check_server(place, python)
        if "runtime" in wanted:
            runtime = Environment("runtime", [f"patchloom-runtime[onnx]=={version()}"], python)
            runtime.run(place, "-c", PREDICTED)
    print(f"checked: {', '.join(sorted(wanted))}")


def check_core(place: Path, python: str) -> Environment:
    """Run the README in the core environment, and the commands that need an extra, which must name it."""
    core = Environment("core", [f"patchloom=={version()}"], python)
    modules = [module for names in EXTRAS.values() for module in names.split()]
    absent = (
        f"import importlib.util as u; present = [m for m in {modules} if u.find_spec(m)]; assert not present, present"
    )
    core.run(place, "-c", absent)
    where = core.run(place, "-c", "import patchloom, patchloom_runtime as r; print(patchloom.__file__, r.__file__)")
    if str(core.folder) not in where.stdout or str(ROOT / "patchloom") in where.stdout:
        sys.exit(f"error: patchloom is not imported from the wheel, but from {where.stdout}")
    core.run(place, "-c", PHOTOS)
    commands, program = readme_commands()
    for command in commands:
        core.patchloom(place, command)
    core.run(place, "-c", program)
    for extra, (command, *_) in COMMANDS.items():
        done = core.attempt(place, core.script(), *shlex.split(command))
        if done.returncode != 2 or f"patchloom[{extra}]" not in done.stderr:
            sys.exit(f"error: without the extra {extra}: patchloom {command}: {done.returncode} {done.stderr}")
    return core


def check_extra(extra: str, core: Environment, place: Path, python: str) -> None:
    """Import what an extra adds, and run the commands that need it."""
    own = Environment(extra, [f"patchloom[{extra}]=={version()}"], python, below=core)
    own.run(place, "-c", f"import {', '.join(EXTRAS[extra].split())}")
    if extra == "sign":
        subprocess.run(
            shlex.split("openssl ecparam -name prime256v1 -genkey -noout -out key.pem"), cwd=place, check=True
        )
        subprocess.run(shlex.split("openssl ec -in key.pem -pubout -out pub.pem"), cwd=place, check=True)
    for command in COMMANDS.get(extra, []):
        own.patchloom(place, command)


def check_server(place: Path, python: str) -> None:
    """Serve the artifact that `export` wrote as deploy/Dockerfile.serve does: without torch."""
    packages = re.search(r'PACKAGES="(.+)"', SERVER_FILE.read_text("utf-8"))[1].split()
    server = Environment("server", packages, python)
    server.install("--no-deps", f"patchloom=={version()}")
    server.run(place, "-c", SERVED)


def write_sboms(python: str) -> None:
    for name, package in (("core", "patchloom"), ("runtime", "patchloom-runtime[onnx]")):
        environment = Environment(name, [f"{package}=={version()}"], python)
        package = package.removesuffix("[onnx]")
        project = PACKAGES[package.replace("-", "_")] / "pyproject.toml"
        out = DIST / f"{package}-{version()}.cdx.json"
        command = ["environment", "--pyproject", project, "--output-reproducible", "--output-file", out]
        run([sys.executable, "-m", "cyclonedx_py", *command, environment.folder])
        contents = json.loads(out.read_text("utf-8"))
        contents["metadata"]["component"]["version"] = (
            version()
        )  # dynamic in pyproject.toml, which cyclonedx leaves out
        out.write_text(json.dumps(contents, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["build", "check", "sbom"])
    parser.add_argument("--only", nargs="+", default=[], choices=ENVIRONMENTS, metavar="ENVIRONMENT")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    options = parser.parse_args()
    if options.step == "build":
        build_twice()
    elif options.step == "check":
        check(options.only, options.python)
    else:
        write_sboms(options.python)


if __name__ == "__main__":
    main()
