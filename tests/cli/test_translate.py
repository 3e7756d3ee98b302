"""`patchloom translate` and `patchloom evaluate --text` as they are typed."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from patchloom.cli.translate import _arriving_lines
from patchloom.tasks.translation.model import load_translator
from patchloom.training.run import run_training
from tests.messages import missing
from tests.reliability.commands import command, started
from tests.tasks.translation.translation_runs import settings


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_training(settings(folder, epochs=1), say=str)
    return folder


@pytest.fixture
def type_in(monkeypatch, capsys, tmp_path):
    """translate RUN … with these bytes on standard input."""

    def typed(data: bytes, *arguments):
        (tmp_path / "typed").write_bytes(data)
        with (tmp_path / "typed").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return command(("translate", *arguments, "--device", "cpu"), monkeypatch, capsys)

    return typed


LINES = "one\n\ntwo\r\n日本\nlast".encode()


def test_a_line_in_a_line_out(run, type_in, tmp_path) -> None:
    done = type_in(LINES, run)
    assert done.code == 0
    lines = done.output.split("\n")
    assert len(lines) == 6
    assert lines[1] == lines[5] == ""
    (tmp_path / "source.gz").write_bytes(gzip.compress(LINES))
    assert type_in(b"", run, tmp_path / "source.gz").output == done.output
    assert type_in(b"", run).output == ""
    assert type_in(LINES, run, "--out", tmp_path / "out").output == ""
    assert (tmp_path / "out").read_text() == done.output


def test_scores_and_several(run, type_in) -> None:
    plain = type_in(LINES, run).output.splitlines()
    scored = [line.split("\t") for line in type_in(LINES, run, "--scores").output.splitlines()]
    assert [text for _, text in scored] == plain
    assert float(scored[0][0]) < 0
    rows = [line.split("\t") for line in type_in(LINES, run, "--n-best", "2").output.splitlines()]
    assert [number for number, _, _ in rows] == ["1", "1", "2", "3", "3", "4", "4", "5", "5"]
    result = json.loads(type_in(LINES, run, "--json").output)
    assert [each["line"] for each in result] == [1, 2, 3, 4, 5]
    assert [each["source"] for each in result] == ["one", "", "two", "日本", "last"]
    assert [each["translations"][0]["text"] for each in result] == plain


def test_bytes_that_are_no_text(run, type_in, tmp_path) -> None:
    bad = b"one\n\ntwo\nab\xffc\nfour\n"
    done = type_in(bad, run)
    assert done.code == 3
    assert missing(done.errors, 4, "UTF-8", 3, "0xff") == []
    assert len(done.output.splitlines()) == 3  # those before it
    assert type_in(bad, run, "--out", tmp_path / "out").code == 3
    assert not (tmp_path / "out").exists()
    assert len(type_in(bad, run, "--replace").output.splitlines()) == 5


def test_a_long_sentence_is_told_once(run, type_in) -> None:
    translator = load_translator(run, device="cpu")
    words = " ".join(["one"] * (translator.longest // 3 + 2)).encode()
    assert translator.longest < len(translator.vocabulary.encode(words.decode())) < 40
    done = type_in(b"one\n" + words + b"\n" + words + b"\n", run)
    assert done.code == 0
    (value,) = done.errors.splitlines()
    assert missing(value, 2) == []  # the line


def test_an_endless_line_is_an_error_before_it_fills_the_memory(run, type_in, tmp_path) -> None:
    endless = b"two\n" + b"a" * (3 << 20)
    assert missing(type_in(endless, run).errors, 2, 1 << 20) == []
    (tmp_path / "endless.txt").write_bytes(endless)
    assert missing(type_in(b"", run, tmp_path / "endless.txt").errors, "endless.txt", 2, 1 << 20) == []


def test_mistakes_are_one_line(run, type_in, tmp_path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LINES)[:-9])
    for arguments, code in (((tmp_path,), 2), ((run, "nowhere.txt"), 2), ((run, tmp_path / "cut.gz"), 3)):
        done = type_in(b"", *arguments)
        assert (done.code, done.errors.count("\n")) == (code, 1), done.errors
        assert missing(done.errors, "error: ", arguments[-1]) == []


def test_whoever_writes_a_line_and_waits_gets_it() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as pipe:
        groups = _arriving_lines(stream, 3)
        pipe.write(b"one\ntw")
        assert next(groups) == [b"one"]
        pipe.write(b"o\r\n\n3\n4\n5\nlast")
        pipe.close()
        assert list(groups) == [[b"two", b"", b"3"], [b"4", b"5"], [b"last"]]


def test_a_reader_that_leaves_is_no_error(run) -> None:
    process = started("translate", run, "--device", "cpu", stdin=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    process.communicate("one\n" * 5, timeout=60)
    assert process.returncode == 141


def test_evaluate(run, monkeypatch, capsys) -> None:
    options = ("--text", "numbers:count=150", "--device", "cpu")
    done = command(("evaluate", run, *options), monkeypatch, capsys)
    assert done.code == 0
    assert "bleu_compound" in done.output
    assert "nrefs:1|case:mixed" in done.output
    as_json = command(("evaluate", run, *options, "--split", "val", "--json"), monkeypatch, capsys)
    values = json.loads(as_json.output)[run.name]["val"]
    assert values["sentences"] == 200
    assert values["signature"].startswith("nrefs:1")
    positional = command(("evaluate", run, "numbers:count=150", "--device", "cpu"), monkeypatch, capsys)
    assert positional.output == done.output


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ((), ("patchloom evaluate",)),
        (("--text", "numbers", "--knn", "5"), ("--knn",)),
        (("--text", "nowhere"), ("nowhere",)),
        (("--text", "numbers", "--split", "tst"), ("tst", "train", "val", "test")),
    ],
)
def test_what_evaluate_refuses(run, arguments, facts, monkeypatch, capsys) -> None:
    done = command(("evaluate", run, *arguments), monkeypatch, capsys)
    assert done.code == 2
    assert missing(done.errors, *facts) == []


def test_report_again(run, monkeypatch, capsys, tmp_path) -> None:
    done = command(("report", run, "--page", tmp_path / "page.html"), monkeypatch, capsys)
    assert done.code == 0
    assert '<section id="pictures">' in (tmp_path / "page.html").read_text()


def test_json_is_one_list_that_comes_line_by_line(run, type_in, tmp_path) -> None:
    done = type_in(LINES, run, "--json")
    assert [line[0] for line in done.output.splitlines()] == ["[", ",", ",", ",", ",", "]"]
    assert json.loads(type_in(b"", run, "--json").output) == []
    assert type_in(LINES, run, "--json", "--out", tmp_path / "out").output == ""
    assert json.loads((tmp_path / "out").read_text()) == json.loads(done.output)
    broken = type_in(b"one\n\xff\n", run, "--json")
    assert broken.code == 3
    assert not broken.output.rstrip().endswith("]")  # half a list does not look whole


def test_scores_as_json_and_at_80_columns(run, monkeypatch, capsys) -> None:
    line = ("evaluate", run, "--text", "numbers", "--device", "cpu")
    done = command((*line, "--json"), monkeypatch, capsys)
    (splits,) = json.loads(done.output).values()
    monkeypatch.setattr("patchloom.cli.table.WIDTH", 80)
    printed = command(line, monkeypatch, capsys).output
    assert "…" not in printed
    for values in splits.values():
        assert all(f"{values[name]:.2f}" in printed for name in ("chrf", "exact", "loss", "perplexity"))
