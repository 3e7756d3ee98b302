"""Makes the package of the light runtime out of patchloom's own files, under the name patchloom_runtime.

`pip install ./runtime` runs it by itself; `python runtime/build.py FOLDER` makes the package in a folder, to try it.
"""

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE, OWN = HERE.parent / "patchloom", HERE / "patchloom_runtime"
FILES = (
    "errors.py",
    "foreign.py",
    "printable.py",
    "data/__init__.py",
    "data/sets.py",
    "data/trees/__init__.py",
    "data/trees/files.py",
    "data/trees/tree.py",
    "data/pictures/__init__.py",
    "data/pictures/bilinear.py",
    "data/pictures/decode.py",
    "data/pictures/decode_limits.py",
    "data/pictures/evaluation_transform.py",
    "data/pictures/geometry.py",
    "data/pictures/given.py",
    "data/pictures/object_masks.py",
    "data/pictures/pasted_masks.py",
    "data/pictures/samples.py",
    "data/text/__init__.py",
    "data/text/cleaning.py",
    "data/text/hypothesis.py",
    "data/text/special_tokens.py",
    "data/text/vocabulary.py",
    "deployment/__init__.py",
    "deployment/artefact.py",
    "deployment/artefact_about.py",
    "deployment/artefact_detector.py",
    "deployment/artefact_segmenter.py",
    "deployment/artefact_translator.py",
    "deployment/detected_object.py",
    "deployment/line_translator.py",
    "deployment/object_choice.py",
    "deployment/window_places.py",
    "deployment/export/__init__.py",
    "deployment/export/formats.py",
    "deployment/export/onnx_check.py",
    "deployment/export/to_onnx.py",
    "deployment/export/to_openvino.py",
    "deployment/export/to_torch.py",
    "deployment/export/torch_program.py",
)
_MODULE = re.compile(r"\bpatchloom\.(?=errors|foreign|printable|data\.|deployment\.)")


def make(target: Path) -> None:
    """Write the package into `target`, a folder called patchloom_runtime."""
    if target.resolve() != OWN.resolve():
        shutil.copytree(OWN, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in FILES:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_MODULE.sub("patchloom_runtime.", (SOURCE / name).read_text()))


if __name__ == "__main__":
    make(Path(sys.argv[1]) / "patchloom_runtime")
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    except ImportError:  # imported by the tests alone
        pass
    else:

        class PatchloomFiles(BuildHookInterface):
            """Makes the package where it lies, before the wheel is packed; a source archive has it already."""

            def initialize(self, version: str, build_data: dict) -> None:
                del version, build_data
                if SOURCE.is_dir():
                    make(OWN)
