"""Windows and macOS: every module can be imported, and the verbs run, without what Python has on Linux alone."""

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.test_imports import PACKAGE
from tests.reliability.commands import OPTIONS, class_folders

ROOT = PACKAGE.parent
EVERY_MODULE = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[2])
for folder in (root / "patchloom", root / "runtime" / "patchloom_runtime"):
    for path in sorted(folder.rglob("*.py")):
        if path.stem == "__main__":
            continue
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").split(".")[0] not in {"ray", "triton"}:  # optional, and absent here or on Windows
                raise
print("imported")
"""
VERBS = """
import pathlib, shutil, sys
from patchloom import cli
for line in sys.argv[2].splitlines():
    sys.argv = ["patchloom", *line.split("\\t")]
    if sys.argv[1] == "forget":
        *_, newest = sorted(pathlib.Path(sys.argv[2], "checkpoints").iterdir())
        shutil.rmtree(newest)
        continue
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def like_windows(tmp_path: Path, script: str, argument: str) -> str:
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "tests.like_windows", str(tmp_path / "script.py"), argument],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_is_imported_like_on_windows(tmp_path: Path) -> None:
    assert like_windows(tmp_path, EVERY_MODULE, str(ROOT)) == "imported\n"


def test_a_run_is_trained_resumed_and_used_like_on_windows(tmp_path: Path) -> None:
    data, run, out = class_folders(tmp_path / "data", ("red", "con")), tmp_path / "run", tmp_path / "sorted"
    train = ["train", data, "--out", run, *OPTIONS]
    lines = [
        train,
        ["forget", run],
        train,
        ["predict", run, data, "--sort-into", out, "--csv", tmp_path / "rows.csv", "--device", "cpu"],
        ["report", run],
        ["evaluate", run, "--device", "cpu"],
        ["verify", run],
    ]
    output = like_windows(tmp_path, VERBS, "\n".join("\t".join(map(str, line)) for line in lines))
    assert "resum" in output
    assert (run / "report.html").is_file()
    assert len((tmp_path / "rows.csv").read_bytes().split(b"\n")) == 22
    assert b"\r" not in (tmp_path / "rows.csv").read_bytes() + (run / "metrics.jsonl").read_bytes()
    assert {folder.name for folder in out.iterdir()} <= {"red", "_con"}
    assert not list(tmp_path.rglob(".*.tmp"))
