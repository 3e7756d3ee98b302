"""Artifacts predict as their run does, with and without torch; one that does not is refused and leaves nothing."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.data.images.image_batch import normalize
from patchloom.exporters import artifact as building
from patchloom.exporters.artifact import Exported, artifact_folder, is_integer
from patchloom.exporters.formats import FORMATS, GraphFormat, format_named
from patchloom.exporters.graph import ClassifierGraph
from patchloom.exporters.parity import TOLERANCE
from patchloom.tasks.classification.export import ClassifierSubject
from patchloom.tasks.export import export
from patchloom_runtime.artifacts.artifact import Artifact, load
from patchloom_runtime.artifacts.metadata import EARLIER_FILE, FILE, is_artifact
from patchloom_runtime.engines.engine import ENGINES, Engine, Graph, check_installed
from patchloom_runtime.errors import CheckpointError, NumericalError, ResourceError, UsageError
from patchloom_runtime.images.inputs import read_image
from patchloom_runtime.untrusted import own_sha256
from tests.networks import small
from tests.reliability.commands import command

ROOT = Path(__file__).parent.parent.parent
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'patchloom[export]'")


class Pretended(GraphFormat):
    """A text file instead of a graph, so that nothing is traced. Its graph is the module itself."""

    name = "pretended"
    install = "nothing"
    int8_modes = ("int8",)
    shift = 0.0
    integer = 5
    quantized_shift = 0.0

    def write(self, part: Any, folder: Path) -> None:
        type(self).module = part.module
        (folder / "model.txt").write_text("plain")

    def operators(self, folder: Path, part: str = "model") -> Counter[str]:
        is_plain = (folder / "model.txt").read_text() == "plain"
        return Counter({"MatMul": 10} if is_plain else {"QLinearMatMul": self.integer, "MatMul": 10 - self.integer})

    def quantize(self, folder: Path, out: Path, mode: str, batches: Any) -> None:
        assert all(batch.dtype == np.uint8 for batch in batches)
        (out / "model.txt").write_text(mode)


def open_pretended(path: Path, threads: int | None = None) -> Graph:
    kind, form = path.read_text(), sys.modules[__name__].Fresh

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = {name: value.numpy() for name, value in form.module(torch.from_numpy(pixels)).items()}
        if "logits" in outputs:
            outputs["logits"] = outputs["logits"] + (form.shift if kind == "plain" else form.quantized_shift)
        return outputs

    return run


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    class Fresh(Pretended):
        """A class per test, whose attributes the test changes."""

    engine = Engine("pretended", (".txt",), "torch", "nothing", f"{__name__}:open_pretended")
    monkeypatch.setitem(ENGINES, "pretended", engine)
    monkeypatch.setitem(FORMATS, "pretended", f"{__name__}:Fresh")
    monkeypatch.setattr(sys.modules[__name__], "Fresh", Fresh, raising=False)
    return Fresh


def clock(monkeypatch: pytest.MonkeyPatch, *per_second: float) -> None:
    """Set the measured speeds, two graphs per call."""
    pairs = iter([per_second[i : i + 2] for i in range(0, len(per_second), 2)])
    monkeypatch.setattr(building, "speeds", lambda *_: [(1.0, number) for number in next(pairs)])


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Run a, as ONNX."""
    needs_onnx()
    return export(str(trained / "a"), str(tmp_path_factory.mktemp("exported") / "a.onnx"))


# ONNX ----------------------------------------------------------------------------------------------------------------


def test_the_file_answers_as_the_run_does(exported: Exported, trained: Path) -> None:
    run, file = exported.rows
    assert exported.images == 12  # a fifth of 60 was held out
    assert file.agreement == 100.0
    assert file.relative <= TOLERANCE["float32"]
    assert file.accuracy == run.accuracy
    assert file.operators > 10
    assert file.integer == 0
    classifier, model = patchloom.load(trained / "a", device="cpu"), patchloom.load(exported.folder)
    assert isinstance(model, Artifact)
    predictions, wanted = model.predict(trained / "data", top=2), classifier.predict(trained / "data", top=2)
    assert [[name for name, _ in row] for row in predictions] == [[name for name, _ in row] for row in wanted]
    assert np.allclose(
        [[share for _, share in row] for row in predictions], [[s for _, s in row] for row in wanted], atol=1e-5
    )
    one = sorted((trained / "data").rglob("*.png"))[0]
    assert np.allclose(model.embed(one), classifier.embed(one), atol=1e-4)
    facts = ("resmlp_s12", "onnx", "float32", "16×16", "2")
    assert [fact for fact in facts if fact not in repr(model)] == []


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 16 KiB."""
    place = tmp_path / "full"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_temporary_folder_is_named(exported: Exported, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    with pytest.raises(ResourceError, match=str(full)):
        format_named("onnx").operators(exported.folder)
    assert list(full.iterdir()) == []


def test_a_full_disk_does_not_end_the_process(trained: Path, full: Path) -> None:
    with pytest.raises(ResourceError, match=str(full)):
        export(str(trained / "a"), str(full / "a.torch"), to="torch")
    assert list(full.iterdir()) == []


def test_the_runtime_answers_without_torch_and_patchloom(exported: Exported, trained: Path, tmp_path: Path) -> None:
    one = sorted((trained / "data").rglob("*.png"))[0]
    code = (
        f"import sys, hashlib; sys.path[:0] = [{str(ROOT / 'runtime')!r}]\n"
        # What onnxruntime asks pip for and this does not need (docs/deployment.md).
        "sys.modules.update(dict.fromkeys(('flatbuffers', 'google', 'packaging', 'sympy')))\n"
        "import patchloom_runtime\n"
        f"model = patchloom_runtime.load({str(exported.folder)!r})\n"
        f"print(model.predict({str(one)!r}))\n"
        f"print(hashlib.sha256(model.preprocess({str(one)!r}).tobytes()).hexdigest())\n"
        "print({'torch', 'patchloom', 'timm', 'torchvision'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    answers, digest, loaded = done.stdout.splitlines()
    model, run = load(exported.folder), patchloom.load(trained / "a", device="cpu")
    assert answers == str(model.predict(one))
    assert loaded == "set()"
    # Bit for bit the pixels of the run.
    assert digest == hashlib.sha256(run._transform(read_image(one)).tobytes()).hexdigest()


@pytest.mark.slow
def test_int8_and_half_of_a_trained_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_onnx()
    clock(monkeypatch, 1, 1, 1, 2)
    done = export(str(trained / "a"), str(tmp_path / "q"), int8=True, allowed_loss=100)
    assert done.precision == "int8"
    run, _, quantized = done.rows
    assert quantized.what.startswith("onnx int8")
    assert quantized.integer > 0
    assert quantized.agreement >= 90.0  # of 12 images: one may change
    assert quantized.relative <= 0.2
    assert abs(quantized.accuracy - run.accuracy) <= 100 / 12 + 1e-9
    # The last way leaves everything but products as it was; the one before has more operators with integers.
    clock(monkeypatch, 1, 1, 1, 0.5, 1, 0.5, 1, 2)
    *_, every, products = export(str(trained / "a"), str(tmp_path / "p"), int8=True, allowed_loss=100).rows
    assert products.kept
    assert products.what.startswith("onnx int8")
    assert products.what not in (every.what, quantized.what)
    assert 0 < products.integer < every.integer
    assert every.integer > every.operators / 4
    assert products.relative <= 0.2
    assert load(tmp_path / "q").predict(trained / "data" / "red" / "0.png")
    clock(monkeypatch, 1, 1)
    done = export(str(trained / "a"), str(tmp_path / "h"), half=True)
    assert done.precision == "float16"
    assert done.rows[1].agreement == 100.0


# Whatever the format -------------------------------------------------------------------------------------------------


def test_normalization_inside_the_graph_is_that_of_training_to_the_bit() -> None:
    network = small("resmlp_s12")
    graph = ClassifierGraph(network, MEAN, STD)
    inputs: list[torch.Tensor] = []
    graph.network.features = lambda images: inputs.append(images) or torch.zeros(1, 16, 16)  # type: ignore[method-assign]
    pixels = torch.arange(32 * 32 * 3).remainder(256).to(torch.uint8).view(1, 32, 32, 3)
    graph(pixels)
    assert torch.equal(inputs[0], normalize(pixels.permute(0, 3, 1, 2), MEAN, STD))


def test_a_graph_that_differs_is_refused_and_leaves_nothing(trained: Path, tmp_path: Path, pretended: Any) -> None:
    pretended.shift = 0.5
    with pytest.raises(NumericalError) as error:
        export(str(trained / "a"), str(tmp_path / "x"), to="pretended")
    assert "pretended" in str(error.value)
    assert "float32" in str(error.value)
    assert "0.5" in str(error.value)
    assert "0.0001" in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert export(str(trained / "a"), str(tmp_path / "x"), to="pretended", tolerance=1).rows[1].difference >= 0.5


@pytest.mark.parametrize(
    ("speed", "integer", "shift", "why"),  # facts in the reason why it is not kept
    [
        (50, 5, 0.0, ("50.0", "100.0")),
        (200, 0, 0.0, ()),
        (200, 5, np.array([[1e6, 0]]), ("1", "--allowed-loss")),
        (200, 5, 0.0, None),
    ],
)
def test_int8_is_kept_where_it_is_worth_it(
    trained: Path, tmp_path: Path, pretended: Any, monkeypatch: Any, speed: float, integer: int, shift: Any, why: Any
) -> None:
    pretended.integer, pretended.quantized_shift = integer, shift
    clock(monkeypatch, 80, 100, 100, speed)
    monkeypatch.setattr(ClassifierSubject, "quality", lambda _, outputs: 90.0 - 50 * (np.ptp(outputs["logits"]) > 1e5))
    done = export(str(trained / "a"), str(tmp_path / "x"), to="pretended", int8=True)
    text = (tmp_path / "x" / "model.txt").read_text()
    if why is not None:
        assert (done.precision, text) == ("float32", "plain")
        assert [row.kept for row in done.rows[1:]] == [True, False]
        assert done.rows[-1].why
        assert [fact for fact in why if fact not in done.rows[-1].why] == []
        assert "float32" in done.notes[-1]
    else:
        assert (done.precision, text) == ("int8", "int8")
        assert [row.kept for row in done.rows[1:]] == [False, True]


def test_converting_to_integers_is_not_computing_with_them() -> None:
    assert [kind for kind in ("QLinearMatMul", "QuantizeLinear", "DequantizeLinear", "QGemm", "MatMul")
            if is_integer(kind)] == ["QLinearMatMul", "QGemm"]  # fmt: skip


@pytest.mark.parametrize("resize", ["short_side", "square"])
def test_pixels_are_those_of_the_run_to_the_bit(trained: Path, tmp_path: Path, resize: str) -> None:
    run = altered(trained, tmp_path, lambda config: config["preprocessing"].update(resize=resize, crop_ratio=0.8))
    export(str(run), str(tmp_path / "x"), to="pretended")
    model, of_run = load(tmp_path / "x"), patchloom.load(run, device="cpu")
    wide = np.random.default_rng(0).integers(0, 256, (30, 51, 3), dtype=np.uint8)
    assert (model.preprocess(wide) == of_run._transform(Image.fromarray(wide))).all()
    assert dict(model.predict(wide)) == pytest.approx(dict(of_run.predict(wide)))


def test_pixels_an_artifact_could_not_show_are_refused(trained: Path, tmp_path: Path) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended")
    path = tmp_path / "x" / "artifact.json"
    about = json.loads(path.read_text())
    for name, value in (("resize", "stretch"), ("interpolation", "magic"), ("crop_ratio", 1e-3), ("image_size", [9])):
        changed = about | {"preprocessing": about["preprocessing"] | {name: value}}
        path.write_text(json.dumps(changed | {"own_sha256": own_sha256(changed)}))
        with pytest.raises(CheckpointError, match=r"artifact\.json"):
            load(tmp_path / "x")


def test_an_earlier_export_is_read(trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Exports before the change of spelling have artefact.json."""
    folder = tmp_path / "x"
    export(str(trained / "a"), str(folder), to="pretended")
    image = trained / "data" / "red" / "0.png"
    expected = load(folder).predict(image)
    (folder / FILE).rename(folder / EARLIER_FILE)
    assert is_artifact(folder)
    assert load(folder).predict(image) == expected
    assert command(("verify", folder), monkeypatch, capsys).code == 0
    (folder / EARLIER_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=EARLIER_FILE):
        load(folder)
    damaged = command(("verify", folder, "--json"), monkeypatch, capsys)
    assert [one["file"] for one in json.loads(damaged.output)["wrong"]] == [EARLIER_FILE]


def altered(trained: Path, tmp_path: Path, change: Any) -> Path:
    """Run a with another config."""
    run = shutil.copytree(trained / "a", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))
    (run / "checksums.json").unlink()
    return Path(run)


def test_another_size(trained: Path, tmp_path: Path) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended", size=32)
    model = load(tmp_path / "x")
    assert model.about.transform.image_size == (32, 32)
    assert len(model.predict(trained / "data" / "red" / "0.png", top=1)) == 1


@pytest.mark.parametrize("name", ["artifact.json", "labels.json", "model.txt", "parity.json", "README.md"])
def test_a_damaged_artifact_is_one_line(trained: Path, tmp_path: Path, name: str) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended")
    path = tmp_path / "x" / name
    whole = path.read_bytes()
    at = whole.index(b"float32") if name == "artifact.json" else len(whole) // 2
    for data in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:-3]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(name)) as error:
            load(tmp_path / "x")
        assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises((CheckpointError, UsageError), match=str(tmp_path / "x")):
        load(tmp_path / "x")


def test_verify_names_what_is_damaged(trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended")
    assert command(("verify", tmp_path / "x"), monkeypatch, capsys).code == 0
    whole = json.loads(command(("verify", tmp_path / "x", "--json"), monkeypatch, capsys).output)
    assert (len(whole["checked"]), whole["wrong"], whole["missing"]) == (5, [], [])
    refused = command(("verify", tmp_path / "x", "--accept"), monkeypatch, capsys)
    assert (refused.code, str(tmp_path / "x") in refused.errors) == (2, True)
    (tmp_path / "x" / "model.txt").write_text("other")
    damaged = command(("verify", tmp_path / "x", "--json"), monkeypatch, capsys)
    values = json.loads(damaged.output)
    assert (damaged.code, values["kind"], [one["file"] for one in values["wrong"]]) == (4, "artifact", ["model.txt"])


def test_a_packed_artifact_answers_the_same(trained: Path, tmp_path: Path, pretended: Any) -> None:
    done = export(str(trained / "a"), str(tmp_path / "x"), to="pretended", packed=True)
    export(str(trained / "a"), str(tmp_path / "plain"), to="pretended")
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"artifact.json", "labels.json", "model.txt.z", "parity.json", "README.md"}
    assert done.rows[1].mib == (tmp_path / "x" / "model.txt.z").stat().st_size / 2**20
    image = trained / "data" / "red" / "0.png"
    assert load(tmp_path / "x").predict(image) == load(tmp_path / "plain").predict(image)


@pytest.mark.parametrize(
    ("size", "data", "pattern"),
    [
        (3, None, r"model\.txt\.z.*\b3\b"),
        (6, None, r"model\.txt\.z.*\b6\b"),
        (5, b"no zlib", r"model\.txt\.z"),
        (1 << 40, None, "1,099,511,627,776"),
    ],
)
def test_a_packed_graph_of_another_size_is_refused(
    trained: Path, tmp_path: Path, size: int, data: bytes | None, pattern: str
) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended", packed=True)
    path, packed = tmp_path / "x" / "artifact.json", tmp_path / "x" / "model.txt.z"
    if data is not None:
        packed.write_bytes(data)
    about = json.loads(path.read_text())
    about["packed"]["model.txt"] = size
    about["files"][packed.name] = hashlib.sha256(packed.read_bytes()).hexdigest()
    path.write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))
    with pytest.raises(CheckpointError, match=pattern):
        load(tmp_path / "x")


@pytest.mark.slow
def test_a_pruned_run_packed_is_smaller(trained: Path, tmp_path: Path) -> None:
    needs_onnx()
    patchloom.prune(str(trained / "a"), shares=[0.9], out=str(tmp_path / "pruned"))
    plain = export(str(tmp_path / "pruned"), str(tmp_path / "plain"))
    packed = export(str(tmp_path / "pruned"), str(tmp_path / "packed"), packed=True)
    assert packed.rows[1].mib < plain.rows[1].mib
    assert packed.rows[1].agreement == 100.0
    image = trained / "data" / "red" / "0.png"
    assert load(tmp_path / "packed").predict(image) == load(tmp_path / "plain").predict(image)


def test_an_artifact_of_a_newer_version_says_so(trained: Path, tmp_path: Path) -> None:
    export(str(trained / "a"), str(tmp_path / "x"), to="pretended")
    about = json.loads((tmp_path / "x" / "artifact.json").read_text())
    (tmp_path / "x" / "artifact.json").write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "x")
    assert "artifact.json" in str(error.value)
    assert "format" in str(error.value)
    assert "2" in str(error.value)


def test_the_command_line(trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "x"
    done = command(("export", trained / "a", "--to", "pretended", "--out", out, "--json"), monkeypatch, capsys)
    values = json.loads(done.output)
    assert (done.code, values["precision"], [row["kept"] for row in values["rows"]]) == (0, "float32", [True, True])
    again = command(("export", trained / "a", "--to", "pretended", "--out", out), monkeypatch, capsys)
    assert (again.code, str(out) in again.errors) == (2, True)
    shutil.rmtree(out)
    printed = command(("export", trained / "a", "--to", "pretended", "--out", out), monkeypatch, capsys)
    assert "pretended" in printed.output
    assert "float32" in printed.output
    unread = command(("export", trained / "a", "--out", tmp_path / "p.html", "--size", 8), monkeypatch, capsys)
    assert (unread.code, "--size" in unread.errors) == (2, True)
    folder = command(("export", trained / "a", "--to", "html", "--out", tmp_path / "p"), monkeypatch, capsys)
    assert (folder.code, str(tmp_path / "p") in folder.errors) == (2, True)
    wrong = command(("export", trained / "a", "--to", "onxx", "--out", tmp_path / "y"), monkeypatch, capsys)
    assert (wrong.code, "onnx" in wrong.errors) == (2, True)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"half": True, "int8": True}, "--half.*--int8|--int8.*--half"),
        ({"to": "torch", "int8": True}, "--int8.*onnx"),
        ({"allowed_loss": -1}, "--allowed-loss.*-1"),
        ({"images": 0}, "images.*0"),
    ],
)
def test_impossible_options_are_refused_first(
    trained: Path, tmp_path: Path, options: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(UsageError, match=pattern):
        export(str(trained / "a"), str(tmp_path / "x"), **({"to": "pretended"} | options))
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        check_installed("openvino", ("torch", "nowhere_at_all"), "pip install it")
    assert [fact for fact in ("openvino", "nowhere_at_all", "pip install it") if fact not in str(error.value)] == []
    assert "torch" not in str(error.value)
    monkeypatch.setattr(type(format_named("openvino")), "packages", ("nowhere_at_all",))
    with pytest.raises(UsageError, match="nowhere_at_all"):
        format_named("openvino").check_installed()


def test_a_task_that_is_not_known_says_so(trained: Path, tmp_path: Path) -> None:
    run = altered(trained, tmp_path, lambda config: config.update(task="dots"))
    with pytest.raises(CheckpointError) as error:
        export(str(run), str(tmp_path / "x"), to="pretended")
    assert "dots" in str(error.value)
    assert "classification" in str(error.value)


def test_an_artifact_stands_where_a_run_does(
    exported: Exported, trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """predict, evaluate and look take it; it says what the run says."""
    folder, run, data = exported.folder, trained / "a", trained / "data"
    image = data / "red" / "0.png"
    results = [command(("predict", one, image), monkeypatch, capsys) for one in (run, folder)]
    assert [one.code for one in results] == [0, 0]
    assert results[0].output == results[1].output
    tables = [tmp_path / "run.csv", tmp_path / "artifact.csv"]
    for one, table in zip((run, folder), tables, strict=True):
        assert command(("predict", one, image, "--csv", table), monkeypatch, capsys).code == 0
    of_run, of_artifact = (table.read_text().splitlines()[1].split(",") for table in tables)
    assert of_run[:2] == of_artifact[:2]
    assert float(of_run[2]) == pytest.approx(float(of_artifact[2]), abs=1e-4)
    both = command(("compare", run, folder, data, "--json"), monkeypatch, capsys)
    assert both.code == 0, both.errors
    numbers = json.loads(both.output)["runs"]
    of_run, of_artifact = numbers[run.name], numbers[folder.name]
    assert of_artifact["confusion"] == of_run["confusion"]
    assert of_artifact["loss"] == pytest.approx(of_run["loss"], rel=1e-3)
    looked = command(("look", folder, data, "--count", 4, "--page", tmp_path / "look.html"), monkeypatch, capsys)
    assert looked.code == 0, looked.errors
    page = (tmp_path / "look.html").read_text("utf-8")
    assert len(re.findall(r'class="(?:good|bad)"', page)) == 4
    assert page.count("<img") == 4  # the images, and no maps


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("evaluate",), "DATA"), (("look",), "IMAGE"), (("predict", "a.png", "--index", "i"), "--index")],
)
def test_what_an_artifact_does_not_keep_is_said(exported: Exported, arguments, word: str, monkeypatch, capsys) -> None:
    verb, *rest = arguments
    done = command((verb, exported.folder, *rest), monkeypatch, capsys)
    assert done.code == 2
    assert str(exported.folder) in done.errors
    assert word in done.errors


def test_the_name_of_a_file_becomes_that_of_a_folder(exported: Exported) -> None:
    assert exported.folder.name == "a-onnx"
    assert exported.folder.is_dir()
    assert any("a-onnx" in note and "a.onnx" in note for note in exported.notes)
    assert artifact_folder("photos") == "photos"
    assert artifact_folder("v1.2") == "v1.2"
