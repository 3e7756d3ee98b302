"""For any text or bytes where a file is expected: what it says, or one of our errors, never another."""

import json
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from patchloom.data.batches.sampler import SamplingPlan
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.sources.labels_file import open_labels_file
from patchloom.data.trees.archive import ArchiveTree
from patchloom.models.pretrained.weights_file import read_weights_file
from patchloom.recipes import get_recipe
from patchloom.recipes.schema import Recipe
from patchloom.runs.config import read_run_files
from patchloom.runs.metrics import MetricsFile, read_metrics
from patchloom_runtime.errors import CheckpointError, PatchloomError

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))
RECIPE = get_recipe("deit", "deit_s").to_yaml()
LINES = RECIPE.splitlines()


def written(name: str, content: bytes, read: Callable[[Path], Any]) -> Any:
    """What `read` makes of a file of that name; its error, one line, where it is one of ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            return read(path)
        except PatchloomError as error:
            said = str(error)
            assert said
            assert "\n" not in said
            return error


# Recipes ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(TEXT | JSON.map(json.dumps))
@example("")
@example("a: &a [*a]")
@example("? [1, 2]\n: 3")
@example("2001-01-01: !!binary x")
@example("model: {name: 1, 2: 3}")
@example("[" * 3000)
def test_any_text_is_a_recipe_or_a_usage_error(text: str) -> None:
    with suppress(PatchloomError):
        assert isinstance(Recipe.from_yaml(text), Recipe)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(LINES) - 1), JSON.map(json.dumps) | TEXT, st.booleans())
def test_any_line_of_a_recipe_may_be_anything(line: int, text: str, keeps_key: bool) -> None:
    key = LINES[line].partition(":")[0] + ": " if keeps_key else ""
    changed = [*LINES[:line], key + text, *LINES[line + 1 :]]
    try:
        recipe = Recipe.from_yaml("\n".join(changed))
    except PatchloomError:
        return
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


# Label tables -------------------------------------------------------------------------------------------------------

CELLS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
TABLES = st.lists(st.lists(CELLS, max_size=5), max_size=6)


@settings(max_examples=200, deadline=None)
@given(TABLES, st.booleans(), st.sampled_from(["labels.csv", "labels.tsv"]))
@example([["a\0b.png", "x"]], True, "labels.csv")
@example([["../../etc/passwd", "x"]], True, "labels.csv")
def test_any_table_of_labels_is_read_or_refused(table: list[list[str]], headed: bool, name: str) -> None:
    rows = [["path", "label"], *table] if headed else table
    content = "\n".join((",", "\t")[name.endswith("tsv")].join(row) for row in rows)
    written(name, content.encode(), lambda path: open_labels_file(path, path.parent))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
@example(b'path,label\n"a')
@example(b"path,label\n" + b'"' + b"x" * 140_000 + b'"')  # longer than the csv module takes
@example(b"path,label\na\rb,c")
def test_any_bytes_as_labels_are_read_or_refused(content: bytes) -> None:
    written("labels.csv", content, lambda path: open_labels_file(path, path.parent))


@settings(max_examples=200, deadline=None)
@given(JSON.map(json.dumps) | TEXT, st.sampled_from(["t.json", "t.yaml", "t.csv"]))
def test_any_taxonomy_is_read_or_refused(text: str, name: str) -> None:
    written(name, text.encode(), read_taxonomy)


# Samplers -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    pictures=st.integers(1, 600),
    share=st.integers(1, 40),
    world=st.integers(1, 6),
    repeats=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    drop_last=st.booleans(),
)
def test_all_processes_together_see_what_one_sees(
    pictures: int, share: int, world: int, repeats: int, seed: int, epoch: int, drop_last: bool
) -> None:
    def plan(rank: int, of: int) -> SamplingPlan:
        return SamplingPlan(pictures, share * world, seed, True, repeats, drop_last, rank, of)

    try:
        whole = plan(0, 1)
    except PatchloomError:
        assert drop_last
        assert share * world > SamplingPlan(pictures, 1, repeats=repeats).views_per_epoch
        return
    ranks = [plan(rank, world) for rank in range(world)]
    assert {rank.steps_per_epoch for rank in ranks} == {whole.steps_per_epoch}
    seen = 0
    for step in range(whole.steps_per_epoch):
        alone = whole.views(epoch, step)
        parts = [rank.views(epoch, step) for rank in ranks]
        together = [np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "seed")]
        assert sorted(zip(*together, strict=True)) == sorted(zip(alone.index, alone.seed, strict=True))
        assert len(set(alone.seed.tolist())) == len(alone.seed)
        seen += len(alone.index)
    assert seen == (whole.steps_per_epoch * share * world if drop_last else whole.views_per_epoch)


# Runs ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=100))
@example(b'{"format": 1, "network": [], "options": {}, "preprocessing": {}}')
@example(b'{"format": 1, "network": "resmlp_s12", "options": [], "preprocessing": 3}')
@example(b'{"format": true}')
@example(b"[" * 100_000)
def test_any_config_is_refused_in_one_line(content: bytes) -> None:
    assert isinstance(written("config.json", content, lambda path: read_run_files(path.parent)), CheckpointError)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode), max_size=6), st.integers(0, 8))
def test_any_metrics_file_is_gone_on_with(lines: list[bytes], kept: int) -> None:
    record = {"step": 1, "epoch": 1, "kind": "train", "weights": "model", "values": {"loss": 0.5}, "time": {}}

    def go_on(path: Path) -> list[dict[str, Any]]:
        metrics = MetricsFile(path)
        metrics.begin(kept)
        metrics.write(record)
        metrics.close()
        return read_metrics(path)

    assert written("metrics.jsonl", b"\n".join(lines), go_on)[-1] == record


# Weights ------------------------------------------------------------------------------------------------------------

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int64)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from safetensors.torch import save

    folder = tmp_path_factory.mktemp("weights")
    torch.save(WEIGHTS, folder / "new.pth")
    torch.save(WEIGHTS, folder / "old.pth", _use_new_zipfile_serialization=False)
    np.savez(folder / "w.npz", **{name: tensor.numpy() for name, tensor in WEIGHTS.items()})
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {"w.safetensors": save(WEIGHTS), "plain.pt": pickle.dumps({"a": 1})}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["new.pth", "old.pth", "w.npz", "w.safetensors", "plain.pt"]),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=6),
    st.floats(0.01, 1),
)
def test_any_damage_to_weights_is_one_line(
    files: dict[str, bytes], name: str, changes: list[tuple[float, int]], kept: float
) -> None:
    content = bytearray(files[name])
    for place, value in changes:
        content[int(place * len(content))] = value
    written(name, bytes(content[: int(kept * len(content)) + 1]), read_weights_file)


def test_a_damaged_end_of_a_zip_is_one_line(files: dict[str, bytes]) -> None:
    """Python's own question whether a file is a zip fails on it."""
    content = bytearray(files["new.pth"])
    content[content.index(b"PK\x06\x07") + 4] = 1  # the disk on which the index begins
    written("new.pth", bytes(content), read_weights_file)
    written("folder.tar", bytes(content), ArchiveTree)
