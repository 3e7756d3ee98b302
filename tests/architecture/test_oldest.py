"""constraints-oldest.txt pins exactly the floors of pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Optional: used in a line or two, or skipped by their tests where they are absent.
UNTESTED = {
    "av", "pillow-heif", "faiss-cpu", "tensorboard", "wandb", "onnx", "onnxscript", "onnxruntime", "openvino",
    "atheris",
}  # fmt: skip
TOOLS = {"pytest", "pytest-xdist", "hypothesis"}  # of dev, what runs the tests


def test_the_oldest_versions_are_the_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dev = [each for each in extras.pop("dev") if re.match(r"[\w-]+", each)[0] in TOOLS]
    required = [each for each in project["dependencies"] if not each.startswith("patchloom-runtime")]
    asked = [*required, *(each for group in extras.values() for each in group), *dev]
    floors = dict(each.split(">=") for each in asked)
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(pins) == set(floors) - UNTESTED
    for name, pin in pins.items():
        padded = f"{floors[name]}.0.0".split(".")[:3]
        assert [*pin.split("."), "0", "0"][:3] == padded, name
