"""Artifacts that a stranger wrote, checksums included: no code runs, memory stays, each is one line, exit code 4."""

import hashlib
import io
import json
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.exporters.formats import format_named
from patchloom.exporters.graph import GraphPart
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.engines.onnx_check import check_onnx
from patchloom_runtime.engines.openvino import check_openvino
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import own_sha256
from tests.reliability.commands import command

SIDE = 8
MODEL_JSON, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
CONSTANTS, WEIGHTS = "data/constants/model_constants_config.json", "data/weights/model_weights_config.json"
Members = dict[str, bytes]


class Means(torch.nn.Module):
    """The mean of each color; two of them are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 1 / 255))
        self.register_buffer("tied", self.scale.view(1, 3))
        self.register_buffer("shift", torch.tensor([0.0, 1.0, 0.0]), persistent=False)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        embedding = (pixels.to(torch.float32) * self.scale).mean((1, 2)) + self.shift + torch.tensor([0.0, 0.0, 2.0])
        embedding = embedding * self.tied * 255
        return {"logits": embedding[:, :2], "embedding": embedding}


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def describe(folder: Path, to: str, files: tuple[str, ...]) -> None:
    """Write labels.json and an artifact.json whose checksums are right."""
    (folder / "labels.json").write_text('["red", "green"]')
    preprocessing = {"image_size": [SIDE, SIDE], "crop_ratio": 1.0, "interpolation": "bicubic", "resize": "short_side"}
    about = {"format": 1, "to": to, "precision": "float32", "task": "classification", "network": "means"}
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (*files, "labels.json")}
    about |= {"outputs": ["logits", "embedding"], "preprocessing": preprocessing, "files": digests}
    (folder / "artifact.json").write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))


@pytest.fixture
def peak_growth() -> Callable[[], int]:
    """Bytes by which the most memory that this process ever had has grown."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return lambda: (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(np.full((SIDE, SIDE, 3), (255, 0, 51), np.uint8)).save(tmp_path / "one.png")
    return tmp_path / "one.png"


def refused(folder: Path, monkeypatch: Any, capsys: Any) -> str:
    """The message of `load` and `patchloom verify`, which ends with code 4."""
    with pytest.raises(CheckpointError) as error:
        load(folder)
    done = command(("verify", folder, "--json"), monkeypatch, capsys)
    (wrong,) = json.loads(done.output)["wrong"]
    assert (done.code, wrong["reason"]) == (4, str(error.value))
    assert "\n" not in str(error.value)
    return str(error.value)


# torch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model.pt2 as an export writes it."""
    folder = tmp_path_factory.mktemp("program")
    pixels = torch.zeros(2, SIDE, SIDE, 3, dtype=torch.uint8)
    format_named("torch").write(GraphPart(Means(), {"pixels": pixels}, ("logits", "embedding")), folder)
    return folder / "model.pt2"


def members_of(program: Path) -> Members:
    with zipfile.ZipFile(program) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def torch_artifact(program: Path, folder: Path, change: Callable[[Members], Any] = dict) -> Path:
    """The program with its members changed, and checksums that fit."""
    members = members_of(program)
    change(members)
    folder.mkdir()
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    describe(folder, "torch", ("model.pt2",))
    return folder


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_checked_program_answers_and_torch_still_reads_it(program: Path, tmp_path: Path, image: Path) -> None:
    folder = torch_artifact(program, tmp_path / "x")
    assert load(folder).embed(image) == pytest.approx([1.0, 1.0, 2.2])
    assert [name for name, _ in load(folder).predict(image, top=2)] == ["red", "green"]
    assert members_of(program)[SAMPLES] == b""  # no pixels of the user's data either
    pixels = torch.full((3, SIDE, SIDE, 3), 255, dtype=torch.uint8)
    of_torch = torch.export.load(program).module(check_guards=False)(pixels)
    assert torch.equal(torch.from_numpy(load(folder)._graph(pixels.numpy())["embedding"]), of_torch["embedding"])


def constants_with(entry: Mapping[str, Any]) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        config = json.loads(members[CONSTANTS])
        config["config"]["lifted_tensor_0"] |= entry
        members[CONSTANTS] = json.dumps(config).encode()

    return change


def weights_with(entry: Mapping[str, Any]) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        config = json.loads(members[WEIGHTS])
        config["config"]["scale"] |= entry
        members[WEIGHTS] = json.dumps(config).encode()

    return change


@pytest.mark.parametrize("where", ["sample inputs", "opaque constant", "tensor constant", "weight", "legacy"])
def test_no_pickle_in_a_program_is_opened(
    program: Path, tmp_path: Path, where: str, monkeypatch: Any, capsys: Any
) -> None:
    marker = tmp_path / "marker"
    opaque, tensor = pickle.dumps(Marker(marker)), saved(Marker(marker))

    def change(members: Members) -> None:
        if where == "sample inputs":
            members[SAMPLES] = tensor
        elif where == "opaque constant":
            members["data/constants/opaque_obj_0"] = opaque
            constants_with({"path_name": "opaque_obj_0", "use_pickle": True})(members)
        elif where == "tensor constant":
            members["data/constants/tensor_0"] = tensor
            constants_with({"use_pickle": True})(members)
        elif where == "weight":
            members["data/weights/weight_0"] = tensor
            weights_with({"use_pickle": True})(members)
        else:
            members["data/weights/model.pt"] = tensor

    folder = torch_artifact(program, tmp_path / "x", change)
    assert "model.pt2" in refused(folder, monkeypatch, capsys)
    assert not marker.exists()


def graph_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Members], None]:
    def changed(members: Members) -> None:
        model = json.loads(members[MODEL_JSON])
        change(model["graph_module"]["graph"])
        members[MODEL_JSON] = json.dumps(model).encode()

    return changed


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch._utils.os.system",
        "_operator.attrgetter",
        "_operator.pow",
        "math.factorial",
        "#higher_order:cond",
        "torch.ops.higher_order.while_loop",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.as_strided.default",
        "torch.ops.aten.empty.memory_format",
        "torch.ops.aten.add.out",
        "torch.ops.aten.add.__class__",
        "torch.ops.prims.add.default",
    ],
)
def test_an_operator_that_no_export_uses_is_refused(
    program: Path, tmp_path: Path, target: str, monkeypatch: Any, capsys: Any
) -> None:
    def change(graph: dict[str, Any]) -> None:
        graph["nodes"][-1]["target"] = target

    folder = torch_artifact(program, tmp_path / "x", graph_with(change))
    assert target in refused(folder, monkeypatch, capsys)


def test_text_that_torch_would_evaluate_is_not_looked_at(program: Path, tmp_path: Path, image: Path) -> None:
    marker = tmp_path / "marker"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"

    def change(members: Members) -> None:
        model = json.loads(members[MODEL_JSON])
        for value in model["graph_module"]["graph"]["sym_int_values"].values():
            value["as_expr"]["expr_str"] = code
        model["guards_code"] = [code]
        model["verifiers"] = [code]
        members[MODEL_JSON] = json.dumps(model).encode()

    folder = torch_artifact(program, tmp_path / "x", change)
    assert load(folder).embed(image) == pytest.approx([1.0, 1.0, 2.2])
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        weights_with({"path_name": "weight_7"}),
        weights_with({"path_name": "../constants/tensor_0"}),
        weights_with({"tensor_meta": None}),
        lambda members: members.update({"extra/code.py": b""}),
        lambda members: members.pop(CONSTANTS),
        lambda members: members.update({MODEL_JSON: b"[" * 100_000}),
        lambda members: members.update({MODEL_JSON: b"{}"}),
        lambda members: members.update({"data/weights/weight_0": b"1"}),
        weights_with(
            {
                "tensor_meta": {
                    "dtype": 7,
                    "sizes": [{"as_int": 3}],
                    "strides": [{"as_int": 1}],
                    "storage_offset": {"as_int": 1},
                    "layout": 7,
                }
            }
        ),
        graph_with(lambda graph: graph["nodes"][-1]["inputs"][0].update(arg={"as_custom_obj": {"name": "x"}})),
        graph_with(lambda graph: graph["nodes"][-1]["inputs"][0].update(arg={"as_graph": {"graph": {}}})),
    ],
)
def test_an_archive_of_another_form_is_refused(
    program: Path, tmp_path: Path, change: Any, monkeypatch: Any, capsys: Any
) -> None:
    refused(torch_artifact(program, tmp_path / "x", change), monkeypatch, capsys)


def test_a_compressed_archive_is_refused(program: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    folder = torch_artifact(program, tmp_path / "x")
    with zipfile.ZipFile(folder / "model.pt2", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/weights/weight_9", bytes(1 << 26))
    describe(folder, "torch", ("model.pt2",))
    assert "model.pt2" in refused(folder, monkeypatch, capsys)


def test_a_program_that_would_fill_the_memory_takes_none(
    program: Path, tmp_path: Path, image: Path, peak_growth: Callable[[], int]
) -> None:
    def change(graph: dict[str, Any]) -> None:
        node = next(each for each in graph["nodes"] if each["target"] == "torch.ops.aten.mul.Tensor")
        wide = {"target": "torch.ops.aten.new_ones.default", "outputs": [{"as_tensor": {"name": "wide"}}]}
        source = {"name": "self", "arg": {"as_tensor": {"name": "pixels"}}, "kind": 1}
        wide["inputs"] = [source, {"name": "size", "arg": {"as_ints": [1 << 34, 1, 1, 3]}, "kind": 1}]
        graph["nodes"].insert(0, wide)
        node["inputs"][1]["arg"] = {"as_tensor": {"name": "wide"}}

    model = load(torch_artifact(program, tmp_path / "x", graph_with(change)))
    with pytest.raises(CheckpointError, match=r"model\.pt2"):
        model.embed(image)
    assert peak_growth() < 1 << 28


def test_a_program_that_takes_too_long_is_ended(
    program: Path, tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchloom_runtime.engines.torch_program.RUN_SECONDS", 0.0)
    model = load(torch_artifact(program, tmp_path / "x"))
    with pytest.raises(CheckpointError, match=r"model\.pt2"):
        model.embed(image)


def test_regions_outside_the_maps_are_refused() -> None:
    from patchloom_runtime.engines.torch_program import _roi_align

    maps, settings = torch.zeros(2, 1, 4, 4), (1.0, 2, 2, 2, False)
    assert _roi_align(maps, torch.tensor([[1.0, 0, 0, 3, 3]]), *settings).shape == (1, 1, 2, 2)
    for number, side, samples in ((2.0, 3.0, 2), (-1.0, 3.0, 2), (0.0, float("nan"), 2), (0.0, 3.0, 0)):
        with pytest.raises(ValueError, match="roi_align"):
            _roi_align(maps, torch.tensor([[number, 0, 0, 3, side]]), 1.0, 2, 2, samples, False)


# ONNX ----------------------------------------------------------------------------------------------------------------


def onnx_artifact(folder: Path, nodes: Any = (), initializers: Any = (), **fields: Any) -> Path:
    """The mean of each color plus `extra`, which `nodes` make of `pixels` and the initializers; checksums that fit."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'patchloom[export]'")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'patchloom[export]'")
    made, values = onnx.helper, onnx.helper.make_tensor_value_info
    own = [
        made.make_node("Cast", ["pixels"], ["values"], to=onnx.TensorProto.FLOAT),
        made.make_node("ReduceMean", ["values", "axes"], ["means"], keepdims=0),
        made.make_node("Add", ["means", "extra"], ["embedding"]),
        made.make_node("Slice", ["embedding", "zero", "two", "one"], ["logits"]),
    ]
    constants = {"axes": [1, 2], "zero": [0], "one": [1], "two": [2]}
    numbers = [made.make_tensor(name, onnx.TensorProto.INT64, [len(v)], v) for name, v in constants.items()]
    if not nodes:
        nodes = [made.make_node("Identity", ["nothing"], ["extra"])]
        numbers.append(made.make_tensor("nothing", onnx.TensorProto.FLOAT, [1], [0.0]))
    graph = made.make_graph(
        [*nodes, *own],
        "means",
        [values("pixels", onnx.TensorProto.UINT8, ["batch", SIDE, SIDE, 3])],
        [values("logits", onnx.TensorProto.FLOAT, None), values("embedding", onnx.TensorProto.FLOAT, None)],
        [*numbers, *initializers],
    )
    model = made.make_model(graph, opset_imports=[made.make_opsetid("", 20)], ir_version=10, **fields)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    describe(folder, "onnx", ("model.onnx",))
    return folder


def made_of(kind: str) -> dict[str, Any]:
    """What a hostile graph is made of: nodes that end in `extra`, initializers and fields of the model."""
    from onnx import TensorProto, helper

    node, tensor = helper.make_node, helper.make_tensor
    billion = tensor("billion", TensorProto.INT64, [1], [10**9])
    total = node("ReduceSum", ["many"], ["extra"], keepdims=0)
    if kind in ("Loop", "If", "Scan"):
        values = helper.make_tensor_value_info
        step = helper.make_graph(
            [node("Identity", ["go"], ["again"]), node("Identity", ["carried"], ["next"])],
            "step",
            [values("i", TensorProto.INT64, []), values("go", TensorProto.BOOL, []),
             values("carried", TensorProto.FLOAT, [1])],
            [values("again", TensorProto.BOOL, []), values("next", TensorProto.FLOAT, [1])],
        )  # fmt: skip
        truth, zero = tensor("truth", TensorProto.BOOL, [], [True]), tensor("start", TensorProto.FLOAT, [1], [0.0])
        inputs = {"Loop": ["", "truth", "start"], "If": ["truth"], "Scan": ["start"]}[kind]
        return {"nodes": [node(kind, inputs, ["extra"], body=step)], "initializers": [truth, zero]}
    if kind == "function":
        opset = [helper.make_opsetid("", 20)]
        function = helper.make_function("own", "F", ["x"], ["y"], [node("Identity", ["x"], ["y"])], opset)
        return {"nodes": [node("Identity", ["one"], ["extra"])], "functions": [function]}
    if kind == "custom":
        return {"nodes": [node("EPContext", ["one"], ["extra"], domain="com.microsoft")]}
    if kind == "ConstantOfShape":
        return {"nodes": [node(kind, ["billion"], ["many"]), total], "initializers": [billion]}
    if kind == "Constant, Expand":
        return {"nodes": [node("Constant", [], ["size"], value_ints=[1 << 15, 1 << 15]),
                          node("Expand", ["start", "size"], ["many"]), total],
                "initializers": [tensor("start", TensorProto.FLOAT, [1], [0.0])]}  # fmt: skip
    if kind == "Range":
        ends = [tensor(n, TensorProto.FLOAT, [], [v]) for n, v in (("a", 0.0), ("b", 1e9), ("c", 1.0))]
        return {"nodes": [node("Range", ["a", "b", "c"], ["many"]), total], "initializers": ends}
    wide = tensor("wide", TensorProto.FLOAT, [1], [0.0])
    if kind == "dims without data":
        wide.dims[0] = 10**9
    elif kind == "raw data too short":
        wide = tensor("wide", TensorProto.FLOAT, [2], bytes(8), raw=True)
        wide.raw_data = bytes(4)
    elif kind == "external data":
        wide.ClearField("float_data")
        wide.data_location = TensorProto.EXTERNAL
        wide.external_data.add(key="location", value="weights.bin")
    elif kind == "sparse":
        value, place = tensor("value", TensorProto.FLOAT, [1], [0.0]), tensor("place", TensorProto.INT64, [1], [0])
        sparse = helper.make_sparse_tensor(value, place, [10**9])
        return {"nodes": [node("Constant", [], ["extra"], sparse_value=sparse)]}
    return {"nodes": [node("Identity", ["wide"], ["extra"])], "initializers": [wide]}


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("Loop", "Loop"),
        ("If", "If"),
        ("Scan", "Scan"),
        ("function", "field 25"),
        ("custom", "EPContext"),
        ("ConstantOfShape", "1,000,000,000"),
        ("Constant, Expand", "1,073,741,824"),
        ("Range", "1,000,000,000"),
        ("dims without data", "wide"),
        ("raw data too short", "wide"),
        ("external data", "wide"),
        ("sparse", "field 22"),
    ],
)
def test_a_graph_that_no_export_writes_is_refused(
    tmp_path: Path, kind: str, pattern: str, monkeypatch: Any, capsys: Any, peak_growth: Callable[[], int]
) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install 'patchloom[export]'")
    folder = onnx_artifact(tmp_path / "x", **made_of(kind))
    (folder / "weights.bin").write_bytes(bytes(4))
    message = refused(folder, monkeypatch, capsys)
    assert "model.onnx" in message
    assert pattern in message
    assert peak_growth() < 1 << 28


def test_an_honest_graph_answers(tmp_path: Path, image: Path) -> None:
    assert load(onnx_artifact(tmp_path / "x")).embed(image) == pytest.approx([255.0, 0.0, 51.0])


@pytest.mark.parametrize("start", ["start", "values"])
def test_a_graph_that_doubles_its_tensor_stays_within_its_memory(
    tmp_path: Path, image: Path, start: str, peak_growth: Callable[[], int]
) -> None:
    """Constants when the session is made, and pixels when it runs: 8 TB."""
    pytest.importorskip("onnx", reason="onnx is not installed: pip install 'patchloom[export]'")
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Cast", ["pixels"], ["flat"], to=TensorProto.FLOAT)]
    nodes.append(helper.make_node("Reshape", ["flat" if start == "values" else "start", "line"], ["wide0"]))
    nodes += [helper.make_node("Concat", [f"wide{i}"] * 2, [f"wide{i + 1}"], axis=0) for i in range(41)]
    nodes.append(helper.make_node("ReduceSum", ["wide41"], ["extra"], keepdims=0))
    line = helper.make_tensor("line", TensorProto.INT64, [1], [-1])
    one = helper.make_tensor("start", TensorProto.FLOAT, [1], [0.0])
    code = (
        "import resource, sys, patchloom_runtime.engines.onnx as to\n"
        "to.run_memory = lambda: 1 << 27\n"
        "from patchloom_runtime.artifacts.artifact import load\n"
        "from patchloom_runtime.errors import CheckpointError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        f"    load({str(tmp_path / 'x')!r}, threads=1).embed({str(image)!r})\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    onnx_artifact(tmp_path / "x", nodes, [line, one])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, growth = done.stdout.splitlines()
    assert "model.onnx" in message
    assert int(growth) < 1 << 28
    assert done.stderr == ""


def test_a_graph_that_takes_too_long_is_ended(tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchloom_runtime.engines.onnx.RUN_SECONDS", 0.0)
    monkeypatch.setattr("patchloom_runtime.engines.onnx.Timer", AtOnce)
    model = load(onnx_artifact(tmp_path / "x"))
    with pytest.raises(CheckpointError, match=r"model\.onnx"):
        model.embed(image)


class AtOnce:
    """A timer whose time is over when it starts."""

    def __init__(self, seconds: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.seconds, self.function, self.args = seconds, function, args

    def start(self) -> None:
        assert self.seconds == 0
        self.function(*self.args)

    def cancel(self) -> None:
        """Nothing is left to end."""


# OpenVINO ------------------------------------------------------------------------------------------------------------

NET = """<?xml version="1.0"?><net name="n" version="11"><layers>
<layer id="0" name="size" type="Const" version="opset1">
<data element_type="i64" shape="1" offset="0" size="8"/></layer>
<layer id="1" name="wide" type="Broadcast" version="opset3"><data mode="numpy"/></layer>
</layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="1"/></edges>
<rt_info><any_note value="x"/></rt_info></net>"""


@pytest.mark.parametrize(
    ("before", "after", "pattern"),
    [
        ("<layers>", "<!DOCTYPE a><layers>", None),
        ("<layers>", "<layers", None),
        ("</layers>", '<layer id="2" version="opset5"><body/></layer></layers>', "body"),
        ('version="opset3"', 'version="extension"', "Broadcast"),
        ('offset="0"', 'offset="8"', "size"),
        ('shape="1"', 'shape="1000000000"', "1000000000"),
        ('element_type="i64"', 'element_type="string"', "size"),
        ('size="8"', 'size="-8"', "size"),
        ('offset="0"', 'offset="x"', "x"),
        ("", "", "134,217,729"),
    ],
)
def test_an_openvino_graph_that_no_export_writes_is_refused(
    tmp_path: Path, before: str, after: str, pattern: str | None
) -> None:
    (tmp_path / "model.bin").write_bytes(np.array([(1 << 27) + (not before)], "<i8").tobytes())
    (tmp_path / "model.xml").write_text(NET)
    if before:
        check_openvino(tmp_path / "model.xml")
    (tmp_path / "model.xml").write_text(NET.replace(before, after))
    with pytest.raises(ValueError, match=pattern):
        check_openvino(tmp_path / "model.xml")


# Any bytes -----------------------------------------------------------------------------------------------------------


def test_a_changed_graph_is_checked_without_another_error(tmp_path: Path) -> None:
    whole = (onnx_artifact(tmp_path / "x") / "model.onnx").read_bytes()
    check_onnx(whole)
    random, refusals = np.random.default_rng(0), 0
    for _ in range(2000):
        changed = bytearray(whole)
        for place in random.integers(0, len(whole), random.integers(1, 4)):
            changed[place] = random.integers(0, 256)
        try:
            check_onnx(bytes(changed[: random.integers(1, len(whole) + 1)]))
        except ValueError:
            refusals += 1
    assert refusals > 1000


def test_a_changed_program_is_one_line(program: Path, tmp_path: Path, image: Path) -> None:
    """Any value of the graph's JSON replaced by any other."""
    random, others = np.random.default_rng(0), [None, -1, 10**30, "x", [], {}, [{}], {"as_int": 10**12}, True, 0.5]
    model = json.loads(members_of(program)[MODEL_JSON])
    graph_module = {name: model["graph_module"][name] for name in ("graph", "signature")}
    paths = [path for path in paths_in(graph_module) if "metadata" not in path and path[-1] != "metadata"]
    messages: list[str] = []
    for number, place in enumerate(random.choice(len(paths), 150, replace=False)):
        *parents, last = paths[place]

        def change(members: Members, parents: Any = parents, last: Any = last) -> None:
            changed = json.loads(members[MODEL_JSON])
            inner = changed["graph_module"]
            for parent in parents:
                inner = inner[parent]
            inner[last] = others[random.integers(len(others))]
            members[MODEL_JSON] = json.dumps(changed).encode()

        folder = torch_artifact(program, tmp_path / str(number), change)
        try:
            load(folder).embed(image)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all("\n" not in message and "model.pt2" in message for message in messages)


def paths_in(value: Any) -> list[tuple[Any, ...]]:
    """The way to every value inside nested lists and dicts."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, each in inside for path in [(key,), *((key, *rest) for rest in paths_in(each))]]
