"""Faults of a real GPU: memory that runs out, an index outside a table, a NaN. Each in a process of its own.

What happens on any device is in `tests/engine/test_device_faults.py`, with errors that are raised by hand.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from patchloom.runs.checkpoints import find_checkpoint
from tests.reliability.commands import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: faults of a GPU need one"),
]
# A child, because a failed device is of no use to the process that had it. The fault comes after 7 forward passes.
SCRIPT = """
import sys
import torch
from patchloom import cli
from patchloom.engine.loop import Step

fault, forward, calls, held = sys.argv[1], Step.forward, iter(range(10**6)), []

def use_all_memory(values):
    while True:
        held.append(torch.empty(2**28, dtype=torch.uint8, device="cuda"))

def look_outside_a_table(values):
    torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]
    return values

def divide_by_zero(values):
    return values | {"loss": values["loss"] * (torch.zeros((), device="cuda") / 0)}

faults = {"memory": use_all_memory, "assert": look_outside_a_table, "nan": divide_by_zero}

def faulty(self, *given):
    values = forward(self, *given)
    return faults[fault](values) if next(calls) == 7 else values

if fault != "none":
    Step.forward = faulty
sys.argv = ["patchloom", *sys.argv[2:]]
cli.main()
"""
TINY = ("--set", "model.options.depth=2", "--set", "model.options.dim=64", "--no-compile")


def train(out: Path, fault: str) -> subprocess.CompletedProcess[str]:
    options = ("--recipe", "small_images", "--epochs", "4", "--batch", "8", "--size", "16", "--workers", "0", *TINY)
    line = [
        sys.executable,
        "-c",
        SCRIPT,
        fault,
        "train",
        "shapes:count=40,size=16",
        "--out",
        str(out),
        "--device",
        "cuda",
    ]
    return subprocess.run([*line, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)


def weights_of(out: Path) -> bytes:
    return (out / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    out: Path = tmp_path_factory.mktemp("whole") / "run"
    done = train(out, "none")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize(
    ("fault", "code", "fact", "step"),
    [("memory", 6, "--micro-batches 2", 7), ("assert", 6, "device-side assert", 0), ("nan", 5, "nan", 0)],
)
def test_a_fault_is_one_line_and_the_same_command_resumes(
    fault: str, code: int, fact: str, step: int, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = train(out, fault)
    assert done.returncode == code, done.stderr
    assert fact in done.stderr
    assert "Traceback" not in done.stderr
    found = find_checkpoint(out)
    assert (found.snapshot.step if found else 0) == step
    again = train(out, "none")
    assert again.returncode == 0, again.stderr
    assert weights_of(out) == weights_of(whole)


@pytest.mark.parametrize("verb", ["predict", "evaluate", "index"])
def test_a_verb_without_memory_is_one_line(verb: str, whole: Path, tmp_path: Path) -> None:
    from tests.golden import make

    pictures = Path(make.__file__).parent / "pictures"
    more = {
        "predict": [pictures],
        "evaluate": ["shapes:count=40,size=16"],
        "index": [pictures, "--out", tmp_path / "i"],
    }
    script = """
import sys, torch
from patchloom import cli
torch.cuda.set_per_process_memory_fraction(1e-6)
sys.argv = ["patchloom", *sys.argv[1:]]
cli.main()
"""
    line = [sys.executable, "-c", script, verb, str(whole), *map(str, more[verb]), "--device", "cuda"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    assert "--device cpu" in done.stderr.strip().splitlines()[-1]
