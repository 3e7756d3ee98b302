"""Stored bytes that can change an answer: a flipped bit is an error or changes none, and `verify` names the file."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchloom import disk
from patchloom.inference.classifier import load
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.config import read_run_files
from patchloom.runs.metrics import damaged_lines, read_metrics
from patchloom.tasks.classification.seeds import evaluations
from patchloom.tasks.classification.several_runs import evaluate
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.verify import verify
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, PatchloomError
from patchloom_runtime.untrusted import own_sha256
from tests.reliability.commands import class_folders, command

CHANGES = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
FLIPS = 25


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, a run on it, and an index."""
    root = tmp_path_factory.mktemp("made")
    data = class_folders(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        settings = TrainingSettings(
            data=str(data), out=str(root / "run"), recipe="small_images", size=16, epochs=2, batch=4, workers=0,
            device="cpu", changes=CHANGES,
        )  # fmt: skip
        run_training(settings, say=str)
    index(str(root / "run"), [data], out=root / "index", device="cpu")
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


@pytest.fixture
def collection(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "index", tmp_path / "index"))


def answers(run: Path) -> Any:
    """What a user would be told of the run."""
    report = evaluate([str(run)]).evaluations["run"].report
    return dict(report), report.classes, read_run_files(run), evaluations(run)


def flipped(path: Path, rng: random.Random) -> bytes:
    """Flip one bit of the file; its bytes as they were."""
    before = path.read_bytes()
    changed = bytearray(before)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    path.write_bytes(changed)
    return before


# A run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "labels.json", "recipe.yaml", "data.json", "run.json", "predictions.safetensors"),
        *("checksums.json", "weights.safetensors"),
    ],
)
def test_a_flipped_bit_is_an_error_or_changes_nothing(run: Path, name: str) -> None:
    right, rng = answers(run), random.Random(name)
    for _ in range(FLIPS):
        before = flipped(run / name, rng)
        with suppress(PatchloomError):
            assert answers(run) == right
        found = verify(run)
        # Other files cannot be trusted where the checksums themselves are damaged.
        assert name in found.wrong
        assert set(found.wrong) == {name} or name == "checksums.json"
        (run / name).write_bytes(before)
    assert verify(run).wrong == {}


def test_a_flipped_bit_in_the_metrics_is_noticed_wherever_it_counts(run: Path) -> None:
    path, rng = run / "metrics.jsonl", random.Random(0)

    def read() -> list[list[Any]]:
        return [[record.get(name) for name in ("step", "epoch", "weights", "values")] for record in read_metrics(path)]

    right = read()
    for _ in range(2 * FLIPS):
        before = flipped(path, rng)
        assert read() == right or (damaged_lines(path) and "metrics.jsonl" in verify(run).wrong)
        path.write_bytes(before)
    path.write_bytes(before[:-1] + b"\x0b")
    assert damaged_lines(path) == [len(right)]
    path.write_bytes(before[:-20])  # a killed writer's
    assert damaged_lines(path) == []
    assert len(read_metrics(path)) == len(right) - 1


def test_a_damaged_checkpoint_is_named(run: Path) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    flipped(newest / "state.json", random.Random(0))
    (run / "checkpoints" / newest.name / "manifest.json").touch()
    assert list(verify(run).wrong) == [f"checkpoints/{newest.name}"]


def test_a_name_in_a_manifest_is_one_of_its_folder(run: Path) -> None:
    from patchloom.runs.checkpoints import _manifest, load_checkpoint

    newest = sorted((run / "checkpoints").iterdir())[-1]
    for name in ("../../labels.json", "/etc/hostname", "a/b", ".."):
        (newest / "manifest.json").write_bytes(_manifest({name: "0" * 64}))
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(newest)
        assert "manifest.json" in str(error.value)
        assert repr(name) in str(error.value)


def test_a_change_on_purpose_is_accepted_by_name(run: Path, made: Path, monkeypatch, capsys) -> None:
    (run / "labels.json").write_text('["cold", "warm"]')
    picture = made / "data" / "red" / "0.png"
    done = command(("predict", run, picture), monkeypatch, capsys)
    assert done.code == 4
    assert f"patchloom verify {run} --accept" in done.errors
    assert done.errors.count("\n") == 1
    done = command(("verify", run), monkeypatch, capsys)
    assert (done.code, done.output.count("\n"), done.errors) == (4, 1, "")
    assert str(run / "labels.json") in done.output
    done = command(("verify", run, "--json"), monkeypatch, capsys)
    assert [wrong["file"] for wrong in json.loads(done.output)["wrong"]] == ["labels.json"]
    done = command(("verify", run, "--accept"), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert "labels.json" in done.output
    assert "cold" in command(("predict", run, picture), monkeypatch, capsys).output
    assert command(("verify", run), monkeypatch, capsys).code == 0


def test_weights_and_decisions_are_never_accepted(run: Path) -> None:
    for name in ("weights.safetensors", "predictions.safetensors"):
        before = flipped(run / name, random.Random(1))
        found = verify(run, accept=True)
        assert (list(found.wrong), found.accepted) == ([name], [])
        (run / name).write_bytes(before)


def test_lost_or_damaged_checksums_can_be_written_again(run: Path) -> None:
    (run / "checksums.json").write_text("{")
    with pytest.raises(CheckpointError) as error:
        load(run, device="cpu")
    for fact in ("checksums.json", "--accept"):
        assert fact in str(error.value)
    found = verify(run, accept=True)
    assert found.wrong == {}
    assert {"config.json", "labels.json"} <= set(found.accepted)
    assert found.without_checksum == ["predictions.safetensors"]


def test_a_folder_of_an_earlier_version_is_read(run: Path) -> None:
    right = answers(run)
    (run / "checksums.json").unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bare = [{name: value for name, value in line.items() if name not in ("crc32", "after")} for line in lines]
    for line in bare:
        line["time"].pop("crc32")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    assert answers(run) == right
    found = verify(run)
    assert found.wrong == {}
    assert "config.json" in found.without_checksum


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"std": [float("nan"), 1, 1]}, ["std", "nan"]),
        ({"std": [0.0, 1, 1]}, ["std", "0.0"]),
        ({"mean": [float("inf"), 0, 0]}, ["mean", "inf"]),
        ({"mean": [0.5]}, ["mean", "0.5"]),
        ({"image_size": [0, 16]}, ["image_size", "[0, 16]"]),
        ({"image_size": [16, 10**9]}, ["image_size", "[16, 1000000000]"]),
        ({"image_size": 16}, ["image_size", "16"]),
        ({"crop_ratio": 0}, ["crop_ratio", "0"]),
        ({"crop_ratio": 1.5}, ["crop_ratio", "1.5"]),
    ],
)
def test_numbers_that_mean_nothing_are_refused(run: Path, change: dict[str, Any], facts: list[str]) -> None:
    config = json.loads((run / "config.json").read_text())
    changed = config | {"preprocessing": config["preprocessing"] | change}
    write_checked(run, {"config.json": json.dumps(changed).encode()})
    with pytest.raises(CheckpointError) as error:
        load(run, device="cpu")
    for fact in ("config.json", *facts):
        assert fact in str(error.value)
    assert list(verify(run).wrong) == ["config.json"]


# Writing ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_at(call: int) -> Callable[..., None]:
    """`os.replace` that ends the process instead, at the given call."""
    calls, replace = [], disk.os.replace

    def fake(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == call:
            raise Killed
        replace(*paths)

    return fake


@pytest.mark.parametrize("known", [True, False])
def test_a_killed_writer_leaves_a_folder_that_is_read(tmp_path: Path, monkeypatch, known: bool) -> None:
    files: list[dict[str, bytes]] = [{"a": b"a%d" % i, "b": b"b%d" % i} for i in range(9)]
    write_checked(tmp_path, files[0])
    if not known:
        (tmp_path / "checksums.json").unlink()
    for attempt, call in enumerate((1, 2, 3, 1, 3, 2, 2, 1), start=1):
        with monkeypatch.context() as patched:
            patched.setattr(disk.os, "replace", killed_at(call))
            with pytest.raises(Killed):
                write_checked(tmp_path, files[attempt])
        for name in ("a", "b"):
            assert read_checked(tmp_path, name) in [older[name] for older in files[: attempt + 1]]
    write_checked(tmp_path, files[-1])
    assert [read_checked(tmp_path, name) for name in ("a", "b")] == list(files[-1].values())


def test_what_was_damaged_is_not_taken_for_right_by_writing_beside_it(tmp_path: Path) -> None:
    write_checked(tmp_path, {"a": b"a", "b": b"b"})
    (tmp_path / "a").write_bytes(b"x")
    write_checked(tmp_path, {"b": b"c"})
    with pytest.raises(CheckpointError) as error:
        read_checked(tmp_path, "a")
    assert str(tmp_path / "a") in str(error.value)
    write_checked(tmp_path, {"a": b"a"})
    assert read_checked(tmp_path, "a") == b"a"


# An index -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index.json", "part-00000.npy", "part-00000.json"])
def test_a_flipped_bit_of_an_index_is_found(collection: Path, name: str) -> None:
    rng = random.Random(name)
    for _ in range(FLIPS):
        before = flipped(collection / name, rng)
        assert name in verify(collection).wrong
        (collection / name).write_bytes(before)
    assert verify(collection).wrong == {}


def rewrite(collection: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change index.json as a stranger would, with a checksum that fits."""
    values = json.loads((collection / "index.json").read_text())
    change(values)
    (collection / "index.json").write_text(json.dumps(values | {"own_sha256": own_sha256(values)}))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            lambda v: v["parts"][0].update(rows=19) or v.update(files=19),
            ["part-00000.npy", "(20, 16)", "(19, 16)"],
        ),
        (lambda v: v["parts"][0].update(rows=21), ["20", "21"]),
        (lambda v: v["parts"][0].update(dropped=[20]), ["part-00000"]),
        (lambda v: v["parts"][0].update(dropped=[1, 1]), ["part-00000"]),
        (lambda v: v["parts"].append(v["parts"][0]), []),
        (lambda v: v.update(dimension=15), ["part-00000.npy", "(20, 15)"]),
        (lambda v: v["parts"][0].update(name="../index/part-00000"), ["'../index/part-00000'"]),
        (lambda v: v["parts"][0].update(name="/etc/passwd"), ["'/etc/passwd'"]),
        (lambda v: v["parts"][0].update(name=".."), ["'..'"]),
    ],
)
def test_an_index_whose_parts_disagree_is_refused(
    collection: Path, made: Path, change: Callable[[dict[str, Any]], Any], facts: list[str]
) -> None:
    rewrite(collection, change)
    with pytest.raises(CheckpointError) as error:
        open_index(collection, device="cpu").search([made / "data" / "red" / "0.png"])
    for fact in ("index.json", *facts):
        assert fact in str(error.value)
    assert verify(collection).wrong


def test_vectors_that_are_not_finite_and_counts_of_labels_are_found(collection: Path) -> None:
    rewrite(collection, lambda values: values.update(labels={"red": 11, "blue": 9}))
    assert list(verify(collection).wrong) == ["index.json"]
    vectors = np.load(collection / "part-00000.npy")
    vectors[3, 2] = np.nan
    np.save(collection / "part-00000.npy", vectors)
    digest = __import__("hashlib").sha256((collection / "part-00000.npy").read_bytes()).hexdigest()
    rewrite(collection, lambda values: values["parts"][0].update(vectors_sha256=digest))
    assert "part-00000.npy" in verify(collection).wrong


def test_an_index_changed_on_purpose_is_accepted(collection: Path, made: Path, tmp_path: Path) -> None:
    values = json.loads((collection / "index.json").read_text())
    (collection / "index.json").write_text(json.dumps(values | {"model": str(tmp_path / "moved")}))
    assert "--accept" in verify(collection).wrong["index.json"]
    found = verify(collection, accept=True)
    assert (found.wrong, found.accepted) == ({}, ["index.json"])
    assert len(open_index(collection, model=str(made / "run"), device="cpu")) == 20


def test_what_is_neither_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    done = command(("verify", tmp_path), monkeypatch, capsys)
    assert (done.code, done.errors.count("\n")) == (2, 1)
    for fact in (str(tmp_path), "config.json", "index.json"):
        assert fact in done.errors
