"""Indexes: building, resuming, growing and searching."""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom import cli
from patchloom.evaluation import approximate_search
from patchloom.inference import embedding as embedding_module
from patchloom.inference import index_build as indexing
from patchloom.inference.embedding import embed_batches
from patchloom.inference.index import Index, open_index
from patchloom.inference.index_build import BuildSummary, index
from patchloom.inference.search import write_search_page
from patchloom.report.page import data_uri
from patchloom.runs.checksums import write_checked
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.forked import Forked
from tests.messages import refused
from tests.reliability.commands import class_folders, command


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the paths of all embedded files, in order."""
    embedded_paths: list[str] = []
    original = indexing.embed_files

    def embed_files(classifier: Any, paths: Any, **options: Any) -> Any:
        for some in original(classifier, paths, **options):
            embedded_paths.extend(some.paths)
            yield some

    monkeypatch.setattr(indexing, "embed_files", embed_files)
    return embedded_paths


@pytest.fixture
def built(trained: Path, tmp_path: Path) -> BuildSummary:
    return index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu")


def test_the_ranking_is_that_of_comparing_with_all(trained: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(indexing, "PART_FILES", 16)
    model = str(trained / "a")
    built = patchloom.index(model, [trained / "data"], out=tmp_path / "index", batch=8, device="cpu")
    assert len(built.index.about.parts) == 4
    opened = patchloom.open_index(tmp_path / "index", device="cpu")
    files = sorted((trained / "data").rglob("*.png"), key=lambda path: (path.parent.name, path.name))
    result = opened.search(files[::7], top=60)
    vectors = np.concatenate([np.load(tmp_path / "index" / f"part-{i:05d}.npy") for i in range(4)])
    names = [row[0] for i in range(4) for row in json.loads((tmp_path / "index" / f"part-{i:05d}.json").read_text())]
    assert names == [str(path) for path in files]
    torch.testing.assert_close(torch.from_numpy(vectors).norm(dim=1), torch.ones(60))
    queries = torch.cat([some.vectors for some in indexing.embed_files(opened.classifier, names[::7])])
    scores = (queries.double() @ torch.from_numpy(vectors).double().T).float()
    for row, one in zip(scores.tolist(), result, strict=True):
        expected = sorted(range(60), key=lambda i, row=row: (-row[i], i))
        assert [(hit.path, hit.score) for hit in one.hits] == [(names[i], row[i]) for i in expected]


def test_images_in_memory_and_files_keep_their_order(built: BuildSummary, trained: Path) -> None:
    file = trained / "data" / "red" / "3.png"
    result = built.index.search([Image.open(file), file, Image.open(trained / "data" / "blue" / "1.png")], top=1)
    assert [Path(one.hits[0].path).name for one in result] == ["3.png", "3.png", "1.png"]
    assert [one.hits[0].itself for one in result] == [False, True, False]
    assert [one.label for one in result] == ["", "red", ""]
    assert result[0].hits[0].score == pytest.approx(1, abs=1e-5)


def test_a_query_that_is_in_the_index(built: BuildSummary, trained: Path) -> None:
    file = trained / "data" / "red" / "3.png"
    (result,) = built.index.search([file], top=5)
    assert [hit.itself for hit in result.hits] == [True, False, False, False, False]
    (without,) = built.index.search([file], top=5, skip_self=True)
    assert len(without.hits) == 5
    assert without.hits[:4] == result.hits[1:]


def test_a_build_that_is_killed_goes_on(trained: Path, tmp_path: Path, embedded, monkeypatch) -> None:
    monkeypatch.setattr(indexing, "PART_FILES", 16)
    write_part, calls = indexing.write_part, []

    def killed_at_third(*inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write_part(*inputs)

    monkeypatch.setattr(indexing, "write_part", killed_at_third)
    arguments = {"out": tmp_path / "index", "batch": 8, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        index(str(trained / "a"), [trained / "data"], **arguments)
    embedded.clear()
    built = index(str(trained / "a"), [trained / "data"], **arguments)
    assert (built.embedded, built.unchanged) == (28, 32)
    assert len(embedded) == len(set(embedded)) == 28
    assert len(built.index) == 60
    whole = index(str(trained / "a"), [trained / "data"], **arguments | {"out": tmp_path / "whole"})
    query = [trained / "data" / "red" / "3.png"]
    assert built.index.search(query) == whole.index.search(query)


def test_shares_of_several_machines_are_joined(trained: Path, tmp_path: Path, embedded, monkeypatch) -> None:
    model, data, out = str(trained / "a"), [trained / "data"], tmp_path / "index"
    whole = index(model, data, out=tmp_path / "whole", device="cpu").index
    shares = [index(model, data, out=out, device="cpu", part=f"{number}/3").index for number in (3, 1, 2)]
    assert sum(map(len, shares)) == 60
    assert all(len(share) > 5 for share in shares)
    before = {path.name: path.read_bytes() for path in (out / "2-of-3").iterdir() if path.suffix == ".npy"}
    shutil.rmtree(out / "2-of-3")  # a machine that is lost; its share is made again, equal in every byte
    index(model, data, out=out, device="cpu", part="2/3")
    assert {path.name: path.read_bytes() for path in (out / "2-of-3").iterdir() if path.suffix == ".npy"} == before
    embedded.clear()
    remove, removed = shutil.rmtree, []

    def interrupted(path: Any) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path)

    monkeypatch.setattr(indexing.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index(model, data, out=out, device="cpu", join=True)
    monkeypatch.setattr(indexing.shutil, "rmtree", remove)
    joined = index(model, data, out=out, device="cpu", join=True)
    assert embedded == []
    assert (joined.embedded, joined.unchanged, len(joined.index)) == (0, 60, 60)
    assert not any(path.is_dir() for path in out.iterdir())
    assert joined.index.about.labels == whole.about.labels
    query = [trained / "data" / "red" / "3.png"]

    def ranked(searched: Any) -> list[tuple[float, str]]:
        return sorted((-hit.score, hit.path) for hit in searched.search(query, top=60)[0].hits)

    assert ranked(joined.index) == ranked(whole)


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "-1/3"])
def test_a_share_that_does_not_exist_is_refused(trained: Path, tmp_path: Path, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", part=part)
    assert not (tmp_path / "index").exists()


def test_embedded_files_are_stored_on_interruption(trained: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        assert total == 60
        if done == 24:
            raise KeyboardInterrupt

    arguments = {"out": tmp_path / "index", "batch": 8, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        index(str(trained / "a"), [trained / "data"], progress=stop, **arguments)
    built = index(str(trained / "a"), [trained / "data"], **arguments)
    assert (built.embedded, built.unchanged) == (36, 24)


def test_new_images_changed_images_and_new_classes(trained: Path, tmp_path: Path, embedded) -> None:
    data = Path(shutil.copytree(trained / "data", tmp_path / "data"))
    arguments = {"out": tmp_path / "index", "device": "cpu"}
    index(str(trained / "a"), [data], **arguments)
    embedded.clear()
    class_folders(tmp_path / "all", ("red", "blue", "green"), pictures=3)
    shutil.move(tmp_path / "all" / "green", tmp_path / "more" / "green")
    shutil.copy(data / "blue" / "5.png", data / "red" / "0.png")
    os.utime(data / "red" / "0.png", ns=(1, 1))
    built = index(str(trained / "a"), [data, tmp_path / "more"], **arguments)
    assert sorted(embedded) == sorted(str(p) for p in [data / "red" / "0.png", *(tmp_path / "more").rglob("*.png")])
    assert (built.embedded, built.unchanged, len(built.index)) == (4, 59, 63)
    assert built.index.about.labels == {"blue": 30, "green": 3, "red": 30}
    opened = open_index(tmp_path / "index", device="cpu")
    (result,) = opened.search([data / "blue" / "5.png"], top=63)
    assert len({hit.path for hit in result.hits}) == 63
    assert {hit.path for hit in result.hits[:2]} == {str(data / "blue" / "5.png"), str(data / "red" / "0.png")}
    (green,) = opened.search([tmp_path / "more" / "green" / "1.png"], top=1)
    assert green.hits[0].label == "green"


def test_a_label_that_comes_later_needs_no_embedding(trained: Path, tmp_path: Path, embedded) -> None:
    arguments = {"out": tmp_path / "index", "device": "cpu"}
    before = index(str(trained / "a"), [trained / "data" / "red"], **arguments).index
    assert before.about.labels == {}
    embedded.clear()
    built = index(str(trained / "a"), [trained / "data"], **arguments)
    assert (built.embedded, built.unchanged, len(built.index)) == (30, 30, 60)
    assert {Path(path).parent.name for path in embedded} == {"blue"}
    assert built.index.about.labels == {"blue": 30, "red": 30}
    again = index(str(trained / "a"), [trained / "data" / "red"], **arguments).index
    assert again.about == built.index.about
    (result,), (old,) = (one.search([trained / "data" / "red" / "3.png"], top=60) for one in (again, before))
    assert [hit[:2] for hit in result.hits if hit.label == "red"] == [hit[:2] for hit in old.hits]


def test_splits_loose_files_and_the_same_file_twice(trained: Path, tmp_path: Path) -> None:
    class_folders(tmp_path / "set" / "train", pictures=2)
    class_folders(tmp_path / "set" / "val", pictures=1)
    loose = shutil.copy(trained / "data" / "red" / "0.png", tmp_path / "loose.png")
    inputs = [tmp_path / "set", loose, tmp_path / "set" / "val" / "red" / "0.png"]
    built = index(str(trained / "a"), inputs, out=tmp_path / "index", device="cpu")
    assert len(built.index) == 7
    assert built.index.about.labels == {"blue": 3, "red": 3}
    (result,) = built.index.search([loose])
    assert result.label == ""
    assert [result.right(hit) for hit in result.hits] == [None] * 7


def test_unreadable_files_are_named_and_left_out(trained: Path, tmp_path: Path) -> None:
    for i in range(30):  # more in a row than a loader replaces
        (tmp_path / f"{i:02d}.png").write_bytes(b"")
    shutil.copy(trained / "data" / "red" / "0.png", tmp_path / "good.png")
    built = index(str(trained / "a"), [tmp_path], out=tmp_path / "index", device="cpu", workers=2, batch=4)
    assert (len(built.index), built.embedded, len(built.unreadable)) == (1, 1, 30)
    assert built.unreadable[str(tmp_path / "07.png")].startswith(f"{tmp_path / '07.png'}: ")
    (tmp_path / "good.png").unlink()
    with pytest.raises(DataError) as error:
        index(str(trained / "a"), [tmp_path], out=tmp_path / "other", device="cpu")
    assert "30" in str(error.value)
    assert "00.png" in str(error.value)


def test_a_vector_that_is_not_finite_is_left_out_by_name(trained: Path, tmp_path: Path, monkeypatch) -> None:
    def overflowing(*inputs: Any, **options: Any) -> Any:
        result = embed_batches(*inputs, **options)
        result.vectors[1:2, 0] = torch.inf
        return result

    build = partial(index, str(trained / "a"), [trained / "data" / "red"], device="cpu", batch=1000)
    whole = build(out=tmp_path / "whole").index
    monkeypatch.setattr(embedding_module, "embed_batches", overflowing)
    built = build(out=tmp_path / "index")
    (lost,) = built.unreadable
    assert built.unreadable[lost].startswith(f"{lost}: ")
    monkeypatch.undo()
    query = trained / "data" / "red" / "0.png"
    (all_hits,), (hits,) = (opened.search([query], top=30) for opened in (whole, built.index))
    assert hits.hits == [hit for hit in all_hits.hits if hit.path != lost]


def test_labels_and_frames_on_the_page(built: BuildSummary, trained: Path, tmp_path: Path) -> None:
    result = built.index.search([trained / "data" / "red" / "3.png"], top=60)
    write_search_page(tmp_path / "page.html", built.index, result)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count('class="hit right"') == 30
    assert text.count('class="hit wrong"') == 30
    assert text.count("itself") == 1
    assert text.count("data:image/jpeg") == 61


def test_hits_are_shown_only_from_the_named_folders(built: BuildSummary, trained: Path, tmp_path: Path) -> None:
    query = trained / "data" / "red" / "3.png"
    page = tmp_path / "page.html"

    def pictures(index: Index) -> int:
        result = index.search([query], top=60)
        write_search_page(page, index, result)
        html = page.read_text("utf-8")
        assert html.count("data:image/jpeg") == 61
        option = "--images FOLDER"
        assert (option in html) == (option in result[0]._repr_html_())
        gray = data_uri(Image.new("RGB", (150, 150), "gray"), "JPEG", quality=80)
        assert html.count(gray) == result[0]._repr_html_().count(gray)
        assert (html.count(gray) > 0) == (option in html)
        return 60 - html.count(gray)

    opened = partial(open_index, built.index.folder, device="cpu")
    assert pictures(built.index) == pictures(opened(images=[trained / "data"])) == 60
    assert pictures(opened(images=[trained / "data" / "blue"])) == 30
    assert pictures(opened(images=[query])) == 1
    assert pictures(opened()) == pictures(opened(images=[tmp_path])) == 0
    for images in (str(trained / "data"), [tmp_path / "gone"]):
        with pytest.raises(UsageError, match=str(images if isinstance(images, str) else images[0])):
            opened(images=images)


def test_the_page_of_a_foreign_index_lists_images_it_does_not_show(
    built: BuildSummary, trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    query, page = trained / "data" / "red" / "0.png", tmp_path / "page.html"
    done = command(("search", built.index.folder, query, "--top", "2", "--page", page), monkeypatch, capsys)
    assert done.code == 0
    assert len(re.findall(r"(?m)^note: .*\b2\b.*--images", done.output)) == 1


def test_hits_without_known_labels_have_no_frame(built: BuildSummary, trained: Path, tmp_path: Path) -> None:
    loose = shutil.copy(trained / "data" / "red" / "0.png", tmp_path / "loose.png")
    write_search_page(tmp_path / "page.html", built.index, built.index.search([loose], top=3))
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count('class="hit"') == 3
    assert "✓" not in text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["part-00000.npy", "part-00000.json"])
def test_a_damaged_part_is_refused_by_name(built: BuildSummary, trained: Path, name: str) -> None:
    flip(built.index.folder / name)
    opened = open_index(built.index.folder, device="cpu")
    with pytest.raises(CheckpointError) as error:
        opened.search([trained / "data" / "red" / "0.png"])
    assert name in str(error.value)
    assert "index.json" in str(error.value)
    (built.index.folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        open_index(built.index.folder, device="cpu").search([trained / "data" / "red" / "0.png"])


def test_another_model_is_refused(built: BuildSummary, trained: Path, run: Callable[[str], Path]) -> None:
    folder = built.index.folder
    with pytest.raises(CheckpointError) as error:
        open_index(folder, model=str(trained / "b"), device="cpu")
    assert str(folder) in str(error.value)
    assert str(trained / "b") in str(error.value)
    with pytest.raises(CheckpointError) as error:
        index(str(trained / "b"), [trained / "data"], out=folder, device="cpu")
    assert str(folder) in str(error.value)
    assert str(trained / "b") in str(error.value)
    moved = run("a")
    assert len(open_index(folder, model=str(moved), device="cpu")) == 60
    config = json.loads((moved / "config.json").read_text())
    config["preprocessing"]["crop_ratio"] = 0.5
    write_checked(moved, {"config.json": json.dumps(config).encode()})
    with pytest.raises(CheckpointError) as error:
        open_index(folder, model=str(moved), device="cpu")
    assert "crop_ratio" in str(error.value)
    assert "0.5" in str(error.value)


def test_a_model_that_has_gone(run: Callable[[str], Path], trained: Path, tmp_path: Path) -> None:
    moved = run("a")
    index(str(moved), [trained / "data" / "red"], out=tmp_path / "index", device="cpu")
    shutil.rmtree(moved)
    with pytest.raises(UsageError) as error:
        open_index(tmp_path / "index")
    assert "--model" in str(error.value)
    assert str(moved) in str(error.value)


def test_formats(built: BuildSummary) -> None:
    path = built.index.folder / "index.json"
    values = json.loads(path.read_text())
    assert (values["format"], values["files"], values["exact"], values["dimension"]) == (4, 60, True, 16)
    path.write_text(json.dumps(values | {"dimension": 15}))
    with pytest.raises(CheckpointError) as error:
        open_index(built.index.folder)
    assert "index.json" in str(error.value)
    assert "patchloom verify" in str(error.value)
    assert "--accept" in str(error.value)
    del values["own_sha256"]  # as an earlier version wrote it
    path.write_text(json.dumps(values))
    assert len(open_index(built.index.folder)) == 60
    path.write_text(json.dumps({key: values[key] for key in values if not key.startswith("level")} | {"format": 1}))
    assert open_index(built.index.folder).labels == {"blue": 30, "red": 30}
    path.write_text(json.dumps(values | {"format": 5}))
    with pytest.raises(CheckpointError) as error:
        open_index(built.index.folder)
    assert "index.json" in str(error.value)
    assert "format" in str(error.value)
    assert "4" in str(error.value)
    for damaged in ("{", "[]", "{}", json.dumps(values | {"parts": [{}]})):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            open_index(built.index.folder)


def test_folders_that_are_not_an_index_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        open_index(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "index.json" in str(error.value)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError) as error:
        index(str(trained / "a"), [trained / "data"], out=tmp_path, device="cpu")
    assert "notes.txt" in str(error.value)
    assert "index.json" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=str(tmp_path / "empty")):
        index(str(trained / "a"), [tmp_path / "empty"], out=tmp_path / "index", device="cpu")


def test_an_index_without_its_list_is_not_begun_again(built: BuildSummary, trained: Path) -> None:
    folder = built.index.folder
    (folder / "index.json").unlink()
    before = sorted(folder.iterdir())
    with pytest.raises(UsageError, match=r"index\.json"):
        index(str(trained / "a"), [trained / "data"], out=folder, device="cpu")
    assert sorted(folder.iterdir()) == before


def test_beyond_a_million_faiss_is_wanted_before_the_work(trained: Path, tmp_path: Path, monkeypatch, embedded) -> None:
    monkeypatch.setattr(indexing, "EXACT_UP_TO", 50)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UsageError, match=r"pip install 'patchloom\[faiss\]'"):
        index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu")
    assert embedded == []
    built = index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu", exact=True)
    assert built.index.about.exact


def test_by_faiss(trained: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(indexing, "EXACT_UP_TO", 50)
    monkeypatch.setattr(approximate_search, "LEARNED_FROM", 10)
    built = index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu")
    assert not built.index.about.exact
    assert not json.loads((tmp_path / "index" / "index.json").read_text())["exact"]
    query = [trained / "data" / "red" / "3.png"]
    # All lists are looked into, so nothing is missed here.
    assert built.index.search(query) == built.index.search(query, exact=True)
    flip(tmp_path / "index" / "lists-00000.faiss")
    with pytest.raises(CheckpointError, match=r"lists-00000\.faiss"):
        open_index(tmp_path / "index", device="cpu").search(query)
    again = index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu", exact=True)
    assert again.index.about.exact


def test_lists_outlive_small_changes(trained: Path, tmp_path: Path, monkeypatch) -> None:
    """A few files that are added or removed change no list; with many, the lists are written again."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(indexing, "EXACT_UP_TO", 40)
    monkeypatch.setattr(approximate_search, "LEARNED_FROM", 10)
    data, out = tmp_path / "data", tmp_path / "index"
    shutil.copytree(trained / "data", data)

    def build(**options: Any) -> Any:
        return index(str(trained / "a"), [data], out=out, device="cpu", **options).index

    lists = build().about.lists
    assert lists is not None
    assert lists.settings.recall == 1.0  # so few files are all candidates
    (data / "red" / "0.png").unlink()
    shutil.copy(data / "red" / "1.png", data / "red" / "new.png")
    changed = build(prune=True)
    assert changed.about.lists == lists
    query = [data / "red" / "1.png"]
    result, expected = changed.search(query, top=60, recall=1)[0], changed.search(query, top=60, exact=True)[0]
    assert result.hits == expected.hits
    assert str(data / "red" / "new.png") in {hit.path for hit in result.hits}
    assert str(data / "red" / "0.png") not in {hit.path for hit in result.hits}
    assert result.recall in (None, 1.0)  # None: proven exact
    for number in range(2, 12):
        (data / "red" / f"{number}.png").unlink()
    assert build(prune=True).about.lists.name == "lists-00001"
    assert not (out / "lists-00000.faiss").exists()


def test_an_index_with_lists_of_the_previous_format_is_searched_exactly(built: BuildSummary, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(built.index.folder, folder)
    values = json.loads((folder / "index.json").read_text())
    values |= {"format": 2, "exact": False, "faiss_sha256": "0" * 64}
    del values["own_sha256"], values["lists"]
    (folder / "index.json").write_text(json.dumps(values))
    assert open_index(folder, device="cpu").about.exact


def test_the_commands(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def run(*arguments: Any) -> Any:
        return command(arguments, monkeypatch, capsys)

    data, out, bad = trained / "data", tmp_path / "index", tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    done = run("index", trained / "a", data, bad, "--out", out)
    assert done.code == 0
    assert str(bad) in done.output
    assert re.search(r"(?m)^60\b.*\b0\b", done.output)
    assert re.search(rf"{out}\b.*\b60\b.*\b2\b.*\b16\b", done.output)
    answer = json.loads(run("index", trained / "a", data, "--out", out, "--json").output)
    assert (answer["files"], answer["embedded"], answer["unchanged"], answer["exact"]) == (60, 0, 60, True)

    page = tmp_path / "page.html"
    search_line = ("search", out, data / "red" / "0.png", data / "blue", "--top", "3", "--page", page, "--images", data)
    done = run(*search_line)
    assert done.code == 0
    assert "note:" not in done.output
    assert str(data / "red" / "0.png") in done.output
    assert "itself" in done.output
    assert re.search(r"\b\d+ of 31\b", done.output)  # of so many queries the nearest file has their label
    assert re.search(rf"\b60\b.*{page}", done.output)
    assert page.is_file()
    done = run("search", out, data / "red" / "0.png", bad, "--top", "2", "--skip-self", "--json")
    assert done.code == 3
    first, second = json.loads(done.output)
    assert first["label"] == "red"
    assert len(first["hits"]) == 2
    assert not any(hit["itself"] for hit in first["hits"])
    assert second["error"].startswith(str(bad))


def test_commands_that_fail_say_one_line(
    built: BuildSummary, trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def refused(*arguments: Any) -> tuple[int, str]:
        done = command(arguments, monkeypatch, capsys)
        assert done.errors.count("\n") == 1
        return done.code, done.errors

    out, query = built.index.folder, trained / "data" / "red" / "0.png"
    (tmp_path / "empty").mkdir()
    code, message = refused("search", out, tmp_path / "gone.png")
    assert code == 3
    assert str(tmp_path / "gone.png") in message
    assert refused("index", trained / "a", tmp_path / "empty", "--out", tmp_path / "new")[0] == 3
    assert refused("search", tmp_path / "empty", query)[0] == 2
    assert refused("search", out, query, "--top", "0")[0] == 2
    assert refused("search", out, query, "--model", trained / "b")[0] == 4
    assert refused("index", trained / "vit", query, "--out", out)[0] == 4
    flip(out / "part-00000.npy")
    assert refused("search", out, query)[0] == 4


def test_a_path_that_is_not_there_is_refused_before_a_folder_is_made(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path / "gone")):
        index(str(trained / "a"), [str(tmp_path / "gone")], out=tmp_path / "index")
    assert not (tmp_path / "index").exists()


def build_until_the_third_part(marker: Path, arguments: Sequence[str]) -> None:
    """Run `patchloom …` with small parts; it touches the marker and blocks in its third, which index.json lacks."""
    write_part, calls = indexing.write_part, []

    def third_is_long(*inputs: Any) -> Any:
        calls.append(inputs)
        part = write_part(*inputs)
        if len(calls) == 3:
            marker.touch()
            time.sleep(600)
        return part

    indexing.PART_FILES, indexing.write_part = 16, third_is_long
    sys.argv = ["patchloom", *arguments]
    cli.main()


def test_a_build_that_gets_sigkill_goes_on_to_the_same_index(trained: Path, tmp_path: Path, monkeypatch) -> None:
    marker, inputs = tmp_path / "marker", ("index", trained / "a", trained / "data", "--out", tmp_path / "index")
    line = [*map(str, inputs), "--batch", "8", "--device", "cpu"]
    process = Forked(partial(build_until_the_third_part, marker, line))
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -9
    assert (tmp_path / "index" / "part-00002.npy").exists()
    monkeypatch.setattr(indexing, "PART_FILES", 16)
    arguments = {"batch": 8, "device": "cpu"}
    built = index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", **arguments)
    assert (built.embedded, built.unchanged) == (28, 32)
    index(str(trained / "a"), [trained / "data"], out=tmp_path / "whole", **arguments)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir() if not path.name.startswith("."))
    assert len(names) == 9
    for name in names:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_missing_files_are_dropped_on_request(trained, tmp_path, monkeypatch, capsys) -> None:
    data, other = (Path(shutil.copytree(trained / "data", tmp_path / name)) for name in ("data", "other"))
    model, out = str(trained / "a"), tmp_path / "index"
    index(model, [data, other], out=out, device="cpu")
    for path in (data / "red" / "3.png", *(data / "blue").iterdir(), other / "red" / "0.png"):
        path.unlink()
    stored = index(model, [data], out=out, device="cpu")
    assert (stored.gone, len(stored.index)) == (0, 120)
    pruned = index(model, [data], out=out, device="cpu", prune=True)
    assert (pruned.embedded, pruned.unchanged, pruned.gone, len(pruned.index)) == (0, 29, 31, 89)
    assert pruned.index.about.labels == {"blue": 30, "red": 59}
    result = open_index(out, device="cpu").search([other / "red" / "3.png"], top=89)[0]
    assert str(data / "red" / "3.png") not in [hit.path for hit in result.hits]
    assert str(other / "red" / "0.png") in [hit.path for hit in result.hits]  # not of a folder given to prune
    shutil.copy(other / "red" / "3.png", data / "red" / "3.png")
    assert index(model, [data], out=out, device="cpu", prune=True).embedded == 1
    (other / "red" / "1.png").unlink()
    done = command(("index", model, other, "--out", out, "--device", "cpu", "--prune"), monkeypatch, capsys)
    assert done.code == 0
    assert re.search(r"(?m)^0\b.*\b58\b.*\b2\b", done.output)


def test_an_index_is_dropped_from_whole_or_not_at_all(trained, tmp_path, monkeypatch) -> None:
    data, out = Path(shutil.copytree(trained / "data", tmp_path / "data")), tmp_path / "index"
    index(str(trained / "a"), [data], out=out, device="cpu")
    before = (out / "index.json").read_bytes()
    (data / "red" / "3.png").unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("patchloom.inference.index_build.write_about", full)
        with pytest.raises(OSError, match="No space"):
            index(str(trained / "a"), [data], out=out, device="cpu", prune=True)
    assert (out / "index.json").read_bytes() == before
    assert len(open_index(out, device="cpu")) == 60


def test_filters_search_only_the_files_that_they_leave(built: BuildSummary, trained: Path, monkeypatch, capsys) -> None:
    query = trained / "data" / "red" / "3.png"
    everything = built.index.search(query, top=60).hits
    for options, wanted in (
        ({"label": "blue"}, [hit for hit in everything if hit.label == "blue"]),
        ({"folder": trained / "data" / "red"}, [hit for hit in everything if "/red/" in hit.path]),
        ({"label": ["blue", "red"], "folder": str(trained / "data" / "blue")}, None),
    ):
        hits = built.index.search(query, top=60, **options).hits
        assert hits == (wanted or [hit for hit in everything if "/blue/" in hit.path])
        assert built.index.searched == len(hits) == 30
    conditioned = built.index.search(query, top=60, label="blue", condition="fine=red").hits
    assert {hit.label for hit in conditioned} == {"blue"}
    assert len(conditioned) == 30
    with refused(UsageError, "'bleu'", "blue"):
        built.index.search(query, label="bleu")
    with refused(UsageError, str(trained / "nowhere")):
        built.index.search(query, folder=[str(trained / "nowhere")])
    monkeypatch.setattr(
        sys, "argv", ["patchloom", "search", str(built.index.folder), str(query), "--label", "blue", "--top", "2"]
    )
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    assert "30 of 60 files searched, exact" in printed
    assert "red" not in printed.partition("\n")[2]


def test_filters_are_exact_in_an_index_for_approximate_search(trained: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(indexing, "EXACT_UP_TO", 10)
    built = index(str(trained / "a"), [trained / "data"], out=tmp_path / "index", device="cpu")
    assert built.index.about.lists is not None
    query = trained / "data" / "red" / "3.png"
    (result,) = built.index.search([query], top=30, label="blue")
    assert result.recall is None
    assert [hit.label for hit in result.hits] == ["blue"] * 30
    built.index.search([query])
    assert built.index.searched == 60
