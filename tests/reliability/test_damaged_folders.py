"""Runs, indexes and caches whose files hold anything, or are no files: one line, no hang, no gigabytes.

A stranger makes the checksums right again, so each case is read with checksums that fit.
"""

import copy
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_columns
from safetensors.numpy import save as save_columns

from patchloom.data.checking import scan_cache
from patchloom.data.checking.scan_cache import ImageScan, ScanCache, taking_turns
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom.report.page import render
from patchloom.runs import checkpoints, weights
from patchloom.runs.checkpoints import _manifest, find_checkpoint, read_checkpoint
from patchloom.runs.metrics import MOST_OF_LINE, damaged_lines, read_metrics
from patchloom.runs.predictions import load_predictions
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.runs.weights import load_network
from patchloom.tasks.classification.seeds import epoch_values, final_values
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.report import report_run
from patchloom.tasks.translation.model import load_translator
from patchloom.tasks.translation.run_files import load_seq2seq, read_val
from patchloom.tasks.verify import verify
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, DataError, PatchloomError, UsageError
from patchloom_runtime.untrusted import own_sha256
from tests.reliability.commands import OPTIONS, ROOT, class_folders, command
from tests.tasks.translation.translation_runs import settings as text_settings

CHANGES = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
DEEP = "deep"
VALUES = (None, True, -1, 10**12, 10**300, 1e308, float("inf"), float("nan"), "x", "\0", [], {}, [[]], DEEP)


def training(root: Path, out: Path, epochs: int = 2) -> TrainingSettings:
    return TrainingSettings(
        data=str(root / "data"), out=str(out), recipe="small_images", size=16, epochs=epochs, batch=4, workers=0,
        device="cpu", changes=CHANGES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data/, a run on it, an index and a translator."""
    root = tmp_path_factory.mktemp("made")
    class_folders(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for epochs in (1, 2):  # a checkpoint each
            run_training(training(root, root / "run", epochs), say=str)
        index(str(root / "run"), [root / "data"], out=root / "index", device="cpu")
        run_training(text_settings(root / "text", epochs=1), say=str)
        yield root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def text(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "text", tmp_path / "text"))


@pytest.fixture
def collection(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "index", tmp_path / "index"))


@contextmanager
def one_line_or_fine() -> Iterator[None]:
    """What is done in here works or ends in one line, and does not wait for ever."""

    def too_long(*_: object) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    said = ""
    try:
        yield
    except PatchloomError as error:
        said = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "\n" not in said


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    value = copy.deepcopy(value)
    holder = value
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = new
    return value


def packed(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).encode()


def mutations(value: Any, each: int = 3) -> Iterator[bytes]:
    """Every place of a JSON value with some of VALUES in it, in turn, and each field left out."""
    number = 0
    for at in places(value):
        for _ in range(each):
            yield packed(changed(value, at, VALUES[number % len(VALUES)]))
            number += 1
        if at and isinstance(at[-1], str):
            less = copy.deepcopy(value)
            holder = less
            for key in at[:-1]:
                holder = holder[key]
            del holder[at[-1]]
            yield packed(less)
    yield from (b"", b"\xff\xfe\0", packed(value)[:-3], b"[" * 100_000)


# A run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "labels.json"])
def test_any_config_is_one_line(made: Path, run: Path, name: str) -> None:
    value = json.loads((run / name).read_bytes())
    (run / "checksums.json").unlink()
    picture = made / "data" / "red" / "0.png"
    for data in mutations(value, each=2):
        (run / name).write_bytes(data)
        with one_line_or_fine():
            evaluate([str(run)])
        with one_line_or_fine():
            load(run, device="cpu").predict(picture)
    with one_line_or_fine():
        verify(run)


def test_any_record_of_the_data_is_one_line(made: Path, run: Path) -> None:
    value = json.loads((run / "data.json").read_bytes())
    (run / "checksums.json").unlink()
    for number, data in enumerate(mutations(value, each=2)):
        (run / "data.json").write_bytes(data)
        with one_line_or_fine():
            EvaluationData(str(made / "data"), EvaluationSettings()).held_out_by(run)
        if number % 20 == 0:
            with one_line_or_fine():
                run_training(training(made, run), say=str)


def test_classes_that_differ_are_told_in_one_line(made: Path, run: Path) -> None:
    value = json.loads((run / "data.json").read_bytes())
    (run / "checksums.json").unlink()
    (run / "data.json").write_text(json.dumps(value | {"classes": ["a\nb", *value["classes"][1:]]}))
    with pytest.raises(DataError, match=r"a\\nb"):
        run_training(training(made, run, epochs=3), say=str)


def without_weights(run: Path) -> Path:
    """A run whose report is quick."""
    (run / "weights.safetensors").unlink()
    (run / "checksums.json").unlink()
    return run


def test_any_run_json_becomes_a_note_of_the_report(run: Path, tmp_path: Path) -> None:
    value = json.loads((without_weights(run) / "run.json").read_bytes())
    value |= {"versions": {"torch": "2"}, "choices": dict([*value["choices"].items()][:1]), "notes": ["a"]}
    for number, data in enumerate(mutations(value, each=1)):
        (run / "run.json").write_bytes(data)
        with one_line_or_fine():
            read_run_metadata(run)
        if number % 5 == 0:
            with one_line_or_fine():
                report_run(run, out=tmp_path / "page.html")
    (run / "run.json").write_text(json.dumps(value | {"seconds": "long"}))
    report_run(run, out=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert any("seconds" in line and "&#34;long&#34;" in line for line in page.splitlines() if "run.json" in line)


def test_metrics_of_another_shape_are_left_out(run: Path, tmp_path: Path) -> None:
    path = without_weights(run) / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    records = read_metrics(path)
    for number, data in enumerate(mutations(records[-1], each=2)):
        path.write_bytes(b"\n".join([*lines[:-1], data.replace(b"\n", b" "), b""]))
        with one_line_or_fine():
            epoch_values(run)
        with one_line_or_fine():
            final_values(run)
        if number % 8 == 0:
            with one_line_or_fine():
                report_run(run, out=tmp_path / "page.html")
    long = packed(records[0] | {"kind": "x" * MOST_OF_LINE})
    path.write_bytes(b"\n".join([long, packed(records[0] | {"step": -1}), packed(records[0]), b""]))
    assert (damaged_lines(path), read_metrics(path)) == ([1, 2], records[:1])


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        (lambda lines: [*lines[:1], *lines[2:]], [2]),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], [3]),
        (lambda lines: [lines[1], lines[0], *lines[2:]], [1, 2, 3]),
        (lambda lines: lines[1:], [1]),
        (lambda lines: [lines[0].replace(b"elapsed", b"elapsee"), *lines[1:]], [1]),
        (lambda lines: [lines[0].replace(b'"time"', b'"x"'), *lines[1:]], [1]),
        (lambda lines: [lines[0].replace(b'"crc32"', b'"x"'), *lines[1:]], [1]),
        (lambda lines: [*lines, b"\x07 no record"], [7]),
        (lambda lines: lines[:-1], []),
        (lambda lines: lines[:0], []),
    ],
    ids=["lost", "repeated", "moved", "first lost", "time", "no time", "no checksum", "other bytes", "last lost",
         "all lost"],
)  # fmt: skip
def test_lines_of_the_metrics_that_are_lost_or_moved_are_told(
    run: Path, text: Path, change: Callable[[list[bytes]], list[bytes]], damaged: list[int]
) -> None:
    for folder, report in ((run, report_run), (text, report_run)):
        assert verify(folder).wrong == {}
        path = folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(change(lines)))
        if folder == run:  # the translator has two lines
            assert damaged_lines(path) == damaged
            said = verify(folder).wrong["metrics.jsonl"].replace(str(path), "")
            for number in damaged[:1] or [len(change(lines)), len(lines)]:
                assert re.search(rf"\b{number}\b", said)
        assert f"<li>{path}" in report(folder).read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "predictions.safetensors", "data.json"])
def test_what_is_gone_is_named(run: Path, name: str) -> None:
    assert verify(run).missing == []
    (run / name).unlink()
    assert (verify(run).missing, verify(run).wrong) == ([name], {})


def test_a_run_goes_on_after_lines_that_are_left(made: Path, run: Path, capsys) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    run_training(training(made, run, epochs=3), say=str)
    said = [line for line in capsys.readouterr().out.splitlines() if "metrics.jsonl" in line]
    assert any(re.search(rf"\b1\b.*\b{len(lines)}\b", line) for line in said)
    assert verify(run).wrong == {}


def test_any_decisions_are_one_line(run: Path) -> None:
    path = run / "predictions.safetensors"
    (run / "checksums.json").unlink()
    data = path.read_bytes()
    columns = load_columns(data)
    about = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["patchloom"])
    cases = [(columns, bad.decode("latin-1")) for bad in mutations(about)]
    for name, column in columns.items():
        others = (
            *(column[None], column[:-1], column[:0], -column - 5, column + 10**6, np.roll(column, 1)),
            *(column.astype(np.float64), column.astype(np.int8), column.astype(bool), column * np.float32(np.nan)),
        )
        cases += [(columns | {name: np.ascontiguousarray(other)}, json.dumps(about)) for other in others]
        cases.append(({key: column for key, column in columns.items() if key != name}, json.dumps(about)))
    cases.append(({name: column[:0] for name, column in columns.items()}, json.dumps(about)))
    for found, told in cases:
        path.write_bytes(save_columns(found, {"patchloom": told}))
        with one_line_or_fine():
            report = load_predictions(run).report
            assert dict(report)
            assert report.worst() is not None
            assert report.confusion.sum() == len(report.index)
    path.write_bytes(save_columns(columns, {"patchloom": json.dumps(about | {"classes": ["a", "b", "c"]})}))
    with pytest.raises(CheckpointError) as error:
        evaluate([str(run)])
    assert "predictions.safetensors" in str(error.value)
    assert {"2", "3"} <= set(re.findall(r"\b\d+\b", str(error.value)))


@pytest.mark.parametrize(
    "options",
    [
        *({"dim": 100_000}, {"depth": 10**6}, {"depth": 4000}, {"num_classes": 10**9}, {"patch_size": 10**9}),
        *({"image_size": [10**9, 10**9]}, {"image_size": [4096, 4096], "patch_size": 1}, {"mlp_ratio": 1e9}),
        *({"mlp_ratio": 1e300}, {"dim": -1}, {"depth": -5}, {"channels": 10**6}, {"scale_init": "x"}, {"name": "x"}),
    ],
)
def test_a_config_is_built_only_as_large_as_its_weights(run: Path, monkeypatch, options: dict[str, Any]) -> None:
    devices: list[str] = []
    create = weights.build_model

    def noted(*given: Any, **more: Any) -> Any:
        devices.append(torch.empty(0).device.type)
        return create(*given, **more)

    monkeypatch.setattr(weights, "build_model", noted)
    config = json.loads((run / "config.json").read_bytes())
    (run / "checksums.json").unlink()
    (run / "labels.json").write_text("[]")
    (run / "config.json").write_text(json.dumps(config | {"options": config["options"] | options}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_network(run)
    assert set(devices) <= {"meta"}
    (run / "config.json").write_text(json.dumps(config))
    network, _ = load_network(run)
    assert set(devices) == {"meta"}
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"cpu"}


def test_a_translator_is_built_only_as_large_as_its_weights(text: Path, tmp_path: Path) -> None:
    config = json.loads((text / "config.json").read_bytes())
    (text / "checksums.json").unlink()
    for options in ({"dim": 10**6}, {"layers": [10**6, 1]}, {"max_length": 10**9}, {"hidden": 10**9}, {"dim": 4000}):
        (text / "config.json").write_text(json.dumps(config | {"options": config["options"] | options}))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_seq2seq(text)
    for data in mutations(config, each=1):
        (text / "config.json").write_bytes(data)
        with one_line_or_fine():
            load_seq2seq(text)
    (text / "config.json").write_text(json.dumps(config))
    kept = json.loads((text / "val.json").read_bytes())
    for number, data in enumerate(mutations(kept, each=1)):
        (text / "val.json").write_bytes(data)
        with one_line_or_fine():
            read_val(text)
        if number % 20 == 0:
            with one_line_or_fine():
                report_run(text, out=tmp_path / "page.html")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"labels.json": ["red"]}, ["labels.json", " 1 ", " 2 "]),
        ({"labels.json": ["red", 2]}, ["labels.json", '["red", 2]']),
        ({"preprocessing": {"image_size": [4096, 4096]}}, ["config.json", "image_size", "[4096, 4096]", "1024"]),
        ({"preprocessing": {"crop_ratio": 1e-9}}, ["config.json", "crop_ratio", "1e-09"]),
        ({"preprocessing": {"interpolation": "none"}}, ["config.json", "interpolation", "'none'", "nearest"]),
    ],
)
def test_what_does_not_fit_together_is_refused(run: Path, change: dict[str, Any], facts: list[str]) -> None:
    (run / "checksums.json").unlink()
    config = json.loads((run / "config.json").read_bytes())
    for name, value in change.items():
        if name == "labels.json":
            (run / name).write_text(json.dumps(value))
        else:
            (run / "config.json").write_text(json.dumps(config | {name: config[name] | value}))
    with pytest.raises(CheckpointError) as error:
        load(run, device="cpu")
    for fact in facts:
        assert fact in str(error.value)


# Checkpoints --------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint as a stranger would, with a checksum that fits."""
    (folder / name).write_bytes(data)
    digests = json.loads((folder / "manifest.json").read_bytes())["sha256"]
    (folder / "manifest.json").write_bytes(_manifest(digests | {name: hashlib.sha256(data).hexdigest()}))


def test_a_state_of_another_shape_is_passed_over(run: Path) -> None:
    older, newest = sorted((run / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_bytes())
    passed = 0
    for data in mutations(state):
        rewrite(newest, "state.json", data)
        found = find_checkpoint(run, read_checkpoint)
        assert found is not None
        passed += found.path == older and newest.name in found.notes[0]
    assert passed > 60
    columns = load_columns((newest / "random-0.safetensors").read_bytes())
    rewrite(newest, "state.json", packed(state))
    for bad in (columns | {"python": columns["python"][:-1]}, {"torch": columns["torch"]}):
        rewrite(newest, "random-0.safetensors", save_columns(bad))
        with pytest.raises(CheckpointError, match=r"random-0\.safetensors"):
            read_checkpoint(newest)


def test_a_damaged_state_does_not_stop_a_run(made: Path, run: Path, monkeypatch, capsys) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    rewrite(newest, "state.json", b'{"progress": []}')
    done = command(("train", made / "data", "--out", run, *OPTIONS, "--epochs", 3), monkeypatch, capsys)
    assert done.code == 0, done.errors
    said = [line for line in done.output.splitlines() if f"{newest}/state.json" in line]
    assert any("progress" in line and "[]" in line for line in said)


@pytest.mark.parametrize(
    "change",
    [
        lambda columns: {name.replace("exp_avg", "other"): column for name, column in columns.items()},
        lambda columns: columns | {"999.exp_avg": np.zeros(1, np.float32)},
        lambda columns: {name: np.zeros((3, 3, 3), np.float32) for name in columns},
        lambda columns: columns | {"group.0.params": np.zeros(1, np.float32)},
        lambda columns: {"x": next(iter(columns.values()))},
    ],
)
def test_an_optimizer_of_another_shape_is_one_line(made: Path, run: Path, change: Callable[[Any], Any]) -> None:
    for folder in (run / "checkpoints").iterdir():
        columns = load_columns((folder / "optimizer.safetensors").read_bytes())
        rewrite(folder, "optimizer.safetensors", save_columns(change(columns)))
    with pytest.raises(CheckpointError, match=r"\b8\b"):
        run_training(training(made, run, epochs=3), say=str)


# An index -----------------------------------------------------------------------------------------------------------


def test_any_json_in_an_index_is_one_line(made: Path, collection: Path) -> None:
    about = json.loads((collection / "index.json").read_bytes())
    rows = json.loads((collection / "part-00000.json").read_bytes())
    picture = made / "data" / "red" / "0.png"

    def use() -> None:
        with one_line_or_fine():
            verify(collection)
        with one_line_or_fine():
            open_index(collection, device="cpu").search(picture)
        with one_line_or_fine():
            index(str(made / "run"), [made / "data"], out=collection, device="cpu", prune=True)

    for data in mutations(about, each=1):
        with suppress(ValueError, RecursionError, TypeError, AttributeError):
            value = json.loads(data)
            data = json.dumps(value | {"own_sha256": own_sha256(value)}).encode()
        (collection / "index.json").write_bytes(data)
        use()
    for data in mutations(rows, each=1):
        (collection / "part-00000.json").write_bytes(data)
        part = about["parts"][0] | {"rows_sha256": hashlib.sha256(data).hexdigest()}
        value = about | {"parts": [part]}
        (collection / "index.json").write_text(json.dumps(value | {"own_sha256": own_sha256(value)}))
        use()


@pytest.mark.parametrize("penalty", [600.0, float("nan")])
def test_a_length_penalty_that_leaves_no_scores_is_one_line(text: Path, penalty: float) -> None:
    with pytest.raises(UsageError) as error:
        list(load_translator(text, device="cpu").translate(["one"], length_penalty=penalty))
    for fact in ("length_penalty", str(penalty), "10"):
        assert fact in str(error.value)


# What is no file ----------------------------------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link that leads nowhere": lambda path: path.symlink_to("nowhere"),
}


def of_holes(path: Path) -> None:
    """A file of a tebibyte, of which nothing is stored."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["part-00000.npy", "part-00000.json"])
def test_parts_of_an_index_are_only_as_large_as_it_says(collection: Path, name: str) -> None:
    of_holes(collection / name)
    found = verify(collection)
    assert list(found.wrong) == [name]
    for fact in (name, "1,099,511,627,776", "index.json"):
        assert fact in found.wrong[name]


@pytest.mark.parametrize("shape", ["(-12, 16)", "((((((((", "(12, 16, " + "1, " * 70 + ")"])
def test_any_header_of_vectors_is_one_line(collection: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(500).encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (collection / "part-00000.npy").write_bytes(data)
    about = json.loads((collection / "index.json").read_text())
    about["parts"][0]["vectors_sha256"] = hashlib.sha256(data).hexdigest()
    (collection / "index.json").write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))
    assert str(collection / "part-00000.npy") in verify(collection).wrong["part-00000.npy"]


@pytest.mark.parametrize("name", ["state.json", "weights.safetensors"])
def test_a_checkpoint_larger_than_the_memory_is_one_line(run: Path, name: str) -> None:
    newest = checkpoints.checkpoints_of(run)[0]
    of_holes(newest / name)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(newest)
    for fact in (name, "1,099,511,627,776"):
        assert fact in str(error.value)


def test_a_manifest_with_half_a_character_is_one_line(run: Path) -> None:
    path = checkpoints.checkpoints_of(run)[0] / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"sha256": {"state.json": "\ud800"}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_checkpoint(path.parent)


def test_tensors_of_too_many_dimensions_are_one_line(run: Path) -> None:
    newest = checkpoints.checkpoints_of(run)[0]
    header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}).encode()
    rewrite(newest, "weights.safetensors", len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(newest)
    for fact in ("weights.safetensors", "64"):
        assert fact in str(error.value)


def replaced(path: Path, kind: str) -> None:
    path.unlink()
    IN_PLACE[kind](path)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_no_file_in_a_run_is_one_line(made: Path, tmp_path: Path, kind: str) -> None:
    picture = made / "data" / "red" / "0.png"
    names = sorted(path.name for path in (made / "run").glob("[a-z]*.[jsy]*"))
    assert len(names) == 10
    for number, name in enumerate(names):
        run = Path(shutil.copytree(made / "run", tmp_path / str(number)))
        replaced(run / name, kind)
        for use in (
            verify,
            lambda run: load(run, device="cpu").predict(picture),
            lambda run: evaluate([str(run)]),
            final_values,
        ):
            with one_line_or_fine():
                use(run)
        if kind == "pipe":
            with one_line_or_fine():
                report_run(run, out=tmp_path / "page.html")
        if kind == "pipe" and name in ("config.json", "data.json", "metrics.jsonl"):
            with one_line_or_fine():
                run_training(training(made, run, epochs=3), say=str)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_no_file_in_a_checkpoint_an_index_or_a_translator_is_one_line(
    made: Path, run: Path, collection: Path, text: Path, kind: str
) -> None:
    older, newest = sorted((run / "checkpoints").iterdir())
    for name in sorted(path.name for path in newest.iterdir()):
        before = (newest / name).read_bytes()
        replaced(newest / name, kind)
        found = find_checkpoint(run, read_checkpoint)
        assert found is not None
        assert found.path == older
        newest_file = newest / name
        newest_file.rmdir() if kind == "folder" else newest_file.unlink()
        newest_file.write_bytes(before)
    for name in ("part-00000.npy", "part-00000.json", "index.json"):
        replaced(collection / name, kind)
        for use in (verify, lambda folder: open_index(folder, device="cpu").search(made / "data" / "red" / "0.png")):
            with one_line_or_fine():
                use(collection)
    for name in ("vocabulary.model", "val.json", "weights.safetensors", "config.json"):
        replaced(text / name, kind)
        for use in (verify, load_seq2seq):
            with one_line_or_fine():
                use(text)


# The cache ----------------------------------------------------------------------------------------------------------

STAMP = (b"red/0.png", 10, 20)
SEEN = ImageScan("", "RGB", 16, 16, False, False, b"d" * 16, b"t" * 216, ())


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sights SET error = X'00'",
        "UPDATE sights SET width = 'wide'",
        "UPDATE sights SET thumbnail = X'00'",
        "UPDATE sights SET digest = NULL",
        "UPDATE sights SET height = 0",
        "UPDATE sights SET width = 80",  # as a flipped bit would
        "UPDATE sights SET path = 'text'",
        "ALTER TABLE sights ADD COLUMN more",
        "DELETE FROM sights; ALTER TABLE sights DROP COLUMN faults",
        "DROP TABLE sights; CREATE VIEW sights AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
        "SELECT x, 1, 1, '', '', 1, 1, 0, 0, '', '', '' FROM c",
        "CREATE TRIGGER endless BEFORE INSERT ON sights BEGIN SELECT 1; END",
    ],
)
def test_rows_of_another_kind_begin_the_cache_anew(tmp_path: Path, monkeypatch, change: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = ScanCache("home")
    kept.write([(STAMP, SEEN)])
    assert kept.read() == {STAMP: SEEN}
    with closing(sqlite3.connect(kept.path)) as database:
        database.executescript(change)
    assert ScanCache("home").read() == {}
    ScanCache("home").write([(STAMP, SEEN)])
    assert ScanCache("home").read() == {STAMP: SEEN}


def test_no_query_of_the_cache_goes_on_for_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(scan_cache, "_CHECKS", 10)
    ScanCache("home").write([(STAMP, SEEN)])
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
    with closing(ScanCache("home")._open()) as database, pytest.raises(sqlite3.OperationalError, match="interrupted"):
        database.execute(endless).fetchall()


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_cache_that_is_no_file_is_done_without(tmp_path: Path, monkeypatch, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = ScanCache("home")
    kept.path.parent.mkdir(parents=True)
    IN_PLACE[kind](kept.path)
    with one_line_or_fine():
        kept.write([(STAMP, SEEN)])
        assert kept.read() == {}


def test_locks_of_the_cache_follow_no_link(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "victim").write_text("precious")
    kept = ScanCache("home")
    kept.path.parent.mkdir(parents=True)
    lock = kept.path.with_suffix(".lock")
    lock.symlink_to(tmp_path / "victim")
    with taking_turns([kept], waiting=lambda _: None):
        assert (tmp_path / "victim").read_text() == "precious"
    lock.unlink()
    lock.write_text("123456789")
    with taking_turns([kept], waiting=lambda _: None):
        assert lock.read_text().strip() == str(os.getpid())


# Paths and the system -----------------------------------------------------------------------------------------------

LONG = "x" * 5000


@pytest.mark.parametrize("name", [LONG, "/".join(["x" * 200] * 25), "a\0b"], ids=["long", "deep", "NUL"])
@pytest.mark.parametrize(
    "arguments",
    [
        *("predict NAME PICTURE", "predict RUN NAME", "evaluate NAME", "evaluate RUN NAME", "look NAME PICTURE"),
        *("look RUN NAME", "look RUN PICTURE --out NAME", "report NAME", "report RUN --out NAME", "verify NAME"),
        *("report RUN --data NAME", "evaluate RUN DATA --real NAME", "evaluate RUN DATA --taxonomy NAME"),
        *("search NAME PICTURE", "search INDEX NAME", "search INDEX PICTURE --model NAME", "index NAME DATA --out NEW"),
        *("index RUN NAME --out NEW", "index RUN DATA --out NAME", "translate NAME", "check NAME", "train NAME"),
        *("train DATA --out NAME", "train DATA --init NAME", "train DATA --recipe NAME", "models NAME"),
        *("check DATA --page NAME", "check DATA --labels NAME", "train DATA --model NAME"),
    ],
)
def test_no_path_is_too_long_for_one_line(
    made: Path, tmp_path: Path, monkeypatch, capsys, name: str, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"RUN": made / "run", "INDEX": made / "index", "DATA": made / "data", "NEW": tmp_path / "new"}
    known |= {"PICTURE": made / "data" / "red" / "0.png", "NAME": Path(name)}
    line = [str(known.get(part, part)) for part in arguments.split()]
    done = command(tuple(line), monkeypatch, capsys)
    # Of data that cannot be opened the report has a note.
    assert done.code in (2, 3, 6, *([0] if arguments == "report RUN --data NAME" else [])), (done.output, done.errors)
    # Of several pictures each has its own line, that of one which cannot be read too.
    assert "Traceback" not in done.errors
    assert (done.errors or done.output).count("\n") == 1


FEW = """
import resource, sys
from patchloom import cli
from patchloom.inference import classifier
from patchloom.tasks.classification import several_runs as runs
from patchloom.tasks import verify
from patchloom.data.checking import check
used = len(__import__("os").listdir("/proc/self/fd")) - 1
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (used, most))
for line in sys.argv[1:]:
    sys.argv = ["patchloom", *line.split("|")]
    try:
        cli.main()
    except SystemExit as ended:
        print("ended", ended.code, flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_too_few_open_files_are_one_line(made: Path, tmp_path: Path) -> None:
    run, data, picture = made / "run", made / "data", made / "data" / "red" / "0.png"
    lines = [f"predict|{run}|{picture}|--device|cpu", f"check|{data}", f"verify|{run}", f"evaluate|{run}"]
    done = subprocess.run(
        [sys.executable, "-c", FEW, *lines],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.count("ended 6") == len(lines), (done.stdout, done.stderr)
    assert done.stderr.count(os.strerror(errno.EMFILE)) == len(lines)


def test_a_page_shows_what_would_turn_its_text() -> None:
    shown = render("look.html.j2", title="a\u202eb\x1b<\ud800", notes=["\u2066"], looks=[], summary="", heads=None)
    assert r"a\u202eb\x1b&lt;\ud800" in shown
    assert r"\u2066" in shown
    assert shown.encode()
