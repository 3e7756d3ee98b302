"""Every call that could run code from a file, or opens a graph, is listed here with the reason why it is safe."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_imports import PACKAGE, parsed

RUNTIME = PACKAGE.parent / "runtime"
# Whole modules, and single functions of others.
MODULES = {"pickle", "marshal", "joblib", "shelve", "dill", "cloudpickle"}
FUNCTIONS = {
    "eval", "exec", "compile", "__import__", "code.interact", "sympy.sympify", "torch.load", "torch.export.load",
    "torch.export.pt2_archive.load_pt2", "torch.jit.load", "torch.hub.load", "torch.hub.load_state_dict_from_url",
    "torch.package.PackageImporter", "torch._C._pickle_load_obj", "numpy.load", "numpy.lib.format.read_array",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "pandas.read_pickle",
    "onnxruntime.InferenceSession", "onnx.load", "openvino.Core", "faiss.read_index",
    "datasets.load_dataset", "datasets.load_from_disk",
    "torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list",
}  # fmt: skip
SAFE = {
    ("data/checking/scan_cache.py", "marshal.dumps"): "bytes of a row for its checksum; nothing is loaded",
    ("data/sources/huggingface.py", "datasets.load_dataset"): "runs no script of a dataset: datasets 3 needs consent",
    ("data/sources/huggingface.py", "datasets.load_from_disk"): "Arrow files and JSON, no pickle",
    ("data/sources/torchvision_sets.py", "pickle.Unpickler"): "subclass whose find_class allows numpy's arrays alone",
    ("exporters/onnx.py", "onnx.load"): "files that this export wrote a moment ago",
    ("exporters/openvino.py", "openvino.Core"): "files that this export wrote a moment ago",
    ("patchloom_runtime/engines/onnx.py", "onnxruntime.InferenceSession"): "after check_onnx, on the bytes it checked",
    ("patchloom_runtime/engines/openvino.py", "openvino.Core"): "after check_openvino",
    ("inference/index_files.py", "numpy.load"): "allow_pickle=False",
    ("engine/distribution.py", "torch.distributed.all_gather_object"): "ranks of one run, all started by this user",
    ("engine/distribution.py", "torch.distributed.broadcast_object_list"): "ranks of one run, as above",
    ("evaluation/approximate_search.py", "faiss.read_index"): "no code in its format; size and checksum were compared",
    ("evaluation/approximate_search.py", "numpy.load"): "allow_pickle=False; size and checksum were compared",
    ("models/bench.py", "compile"): "a parameter: whether to use torch.compile",
    ("models/pretrained/weights_file.py", "numpy.load"): "allow_pickle=False",
    ("recipes/plain_yaml.py", "yaml.load"): "a SafeLoader without aliases",
}


def loaders_in(tree: ast.Module) -> Iterator[str]:
    """The names in MODULES and FUNCTIONS that a file uses, whatever it imports them as."""
    meant = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                      for each in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            meant |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        name = dotted(node, meant)
        if name in FUNCTIONS or ("." in name and name.split(".")[0] in MODULES):
            yield name


def dotted(node: ast.AST, meant: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, meant)
        return f"{before}.{node.attr}" if before else ""
    return meant.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def test_every_loader_is_listed_with_its_reason() -> None:
    used = {
        (str(path.relative_to(PACKAGE)), name) for path in PACKAGE.rglob("*.py") for name in loaders_in(parsed(path))
    }
    used |= {
        (str(path.relative_to(RUNTIME)), name) for path in RUNTIME.rglob("*.py") for name in loaders_in(parsed(path))
    }
    assert used == set(SAFE)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("from torch.export import load as open_program\nopen_program(path)", "torch.export.load"),
        ("import torch.jit\ntorch.jit.load(path)", "torch.jit.load"),
        ("from pickle import loads\nloads(data)", "pickle.loads"),
        ("value = eval(text)", "eval"),
    ],
)
def test_a_new_loader_is_noticed(source: str, name: str) -> None:
    assert name in set(loaders_in(ast.parse(source)))


def test_compiling_a_pattern_or_a_network_is_no_loader() -> None:
    assert not [*loaders_in(ast.parse("import re, torch\nre.compile('a')\ntorch.compile(net)\nnet.eval()"))]
