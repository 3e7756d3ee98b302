"""constraints-oldest.txt pins exactly the lower bounds of both pyproject.toml files."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Optional: used in a line or two, or skipped by their tests where they are absent.
UNTESTED = {
    "av", "pillow-heif", "faiss-cpu", "tensorboard", "wandb", "mlflow", "trackio", "onnx", "onnxscript", "onnxruntime",
    "openvino", "atheris", "mkdocs-material", "model-signing", "pyopenssl", "obstore", "ray",
}  # fmt: skip
TOOLS = {"pytest", "pytest-xdist", "hypothesis"}  # of dev, what runs the tests


def requirements(path: Path) -> list[str]:
    """Return the requirements of a package and its extras, without those on patchloom's own packages."""
    project = tomllib.loads(path.read_text())["project"]
    extras = project["optional-dependencies"]
    dev = [each for each in extras.pop("dev", []) if re.match(r"[\w-]+", each)[0] in TOOLS]
    listed = [*project["dependencies"], *(each for group in extras.values() for each in group), *dev]
    return [each for each in listed if not each.startswith("patchloom-runtime")]


def test_the_oldest_versions_are_the_floors() -> None:
    required = requirements(ROOT / "runtime" / "pyproject.toml") + requirements(ROOT / "pyproject.toml")
    floors = dict(each.split(">=") for each in required)
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(pins) == set(floors) - UNTESTED
    for name, pin in pins.items():
        padded = f"{floors[name]}.0.0".split(".")[:3]
        assert [*pin.split("."), "0", "0"][:3] == padded, name
