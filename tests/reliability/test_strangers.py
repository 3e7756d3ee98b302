"""Folders, names and files one did not make: nothing is written or fetched elsewhere, no name steers a terminal."""

import csv
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.disk import atomic_write, disk_errors, locked, temporary_path, write_new
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from patchloom_runtime.errors import ResourceError, UsageError
from patchloom_runtime.printable import printable, table_cell
from patchloom_runtime.untrusted import own_sha256
from tests.forked import Forked
from tests.reliability.commands import OPTIONS, command, started

NAMES = ("x[/z]", "\x1b[31mred", "=cmd()", "a\nb")
BROKEN = "=cmd()\t\x1b[2Jx\n.png"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with classes of strange names, a run on them, and an index."""
    root = tmp_path_factory.mktemp("made")
    data = root / "data"
    data.mkdir()
    rows = []
    for number, name in enumerate(NAMES):
        for i in range(6):
            pixels = np.random.default_rng(100 * number + i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(data / f"{number}-{i}.png")
            rows.append((f"{number}-{i}.png", name))
    (data / BROKEN).write_bytes(b"")
    with (data / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows, (BROKEN, NAMES[0])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(sys, "stdout", (root / "said").open("w"))
        patch.setattr(
            sys,
            "argv",
            ["patchloom", "train", str(data / "labels.csv"), "--out", str(root / "run"),
             *OPTIONS],
        )  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            patchloom.cli.main()
        sys.stdout.close()
    assert ended.value.code == 0
    index(str(root / "run"), [data], out=root / "index", device="cpu")
    return root


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copytree(made / "index", tmp_path / "index")
    return tmp_path


# Names --------------------------------------------------------------------------------------------------------------


def unsafe(text: str) -> list[str]:
    return [letter for letter in text if not letter.isprintable() and letter != "\n"]


def test_outside_text_is_one_line_that_only_shows_it() -> None:
    assert printable("a\nb\t\x1b[31m\u202e\x9b\ud800 \udcff é 日本 👩‍🔬") == (
        r"a\nb\t\x1b[31m\u202e\x9b\ud800 \xff é 日本 👩‍🔬"
    )
    assert printable(printable("\x1b")) == printable("\x1b")
    assert [table_cell(text) for text in ("=1", "+1", "-1", "@a", "a=1", "\t=1")] == [
        *("'=1", "'+1", "'-1", "'@a", "a=1", r"\t=1"),
    ]


def test_training_on_strange_names_says_them_escaped(made: Path) -> None:
    said = (made / "said").read_text()
    assert unsafe(said) == []
    header, line = (made / "run" / "left_out.tsv").read_text().splitlines()
    assert (header, line.count("\t"), unsafe(line)) == ("file\treason", 1, ["\t"])
    assert r"=cmd()\t\x1b[2Jx\n.png" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "labels.csv"), [r"=cmd()\t\x1b[2Jx\n.png"]),
        (("evaluate", "run"), ["[/z]", r"\x1b[31mred", "=cmd()", r"a\nb"]),
        (("evaluate", "run", "labels.csv", "--split", "all"), ["[/z]", r"a\nb"]),
        (("predict", "run", "data", "--top", "4"), ["[/z]", r"\x1b[31mred", r"a\nb", r"=cmd()\t\x1b[2Jx\n.png"]),
        (("look", "run", "data/0-0.png", "--page", "page.html"), []),
        (("search", "index", "data"), [r"=cmd()\t\x1b[2Jx\n.png"]),
        (("report", "run", "--page", "page.html"), []),
        (("verify", "run"), []),
    ],
)
def test_no_name_is_markup_or_steers_the_terminal(
    made: Path, tmp_path: Path, monkeypatch, capsys, arguments: tuple[str, ...], said: list[str]
) -> None:
    places = {name: str(made / name) for name in ("data", "run", "index")}
    places |= {"data/0-0.png": str(made / "data" / "0-0.png"), "page.html": str(tmp_path / "page.html")}
    places |= {"labels.csv": str(made / "data" / "labels.csv")}
    monkeypatch.chdir(tmp_path)
    done = command(tuple(places.get(part, part) for part in arguments), monkeypatch, capsys)
    assert done.code in (0, 3), done.errors
    assert unsafe(done.output + done.errors) == []
    assert "\nb" not in done.output
    for part in said:
        assert part in done.output


def test_an_error_is_one_line_whatever_it_names(tmp_path: Path, monkeypatch, capsys) -> None:
    done = command(("predict", tmp_path / "a\nb\x1b[31m", "x.png"), monkeypatch, capsys)
    assert (done.code, done.errors.count("\n"), unsafe(done.errors)) == (2, 1, [])
    assert r"a\nb\x1b[31m" in done.errors


def test_json_is_what_it_was(made: Path, monkeypatch, capsys) -> None:
    done = command(("evaluate", made / "run", "--json"), monkeypatch, capsys)
    assert set(json.loads(done.output)["per_class"]) == set(NAMES)


# Links --------------------------------------------------------------------------------------------------------------

LINKS = (".report.html.tmp", ".labels.json.tmp", ".metrics.jsonl.tmp", ".index.json.tmp", ".config.json.tmp")


def test_links_of_a_stranger_are_not_followed(copies: Path, made: Path, monkeypatch, capsys) -> None:
    victim = copies / "victim"
    victim.write_text("precious")
    for folder in (copies / "run", copies / "index", copies / "run" / "checkpoints"):
        for name in LINKS:
            (folder / name).symlink_to(victim)
    (copies / "run" / "checkpoints" / ".step-00000001.tmp").symlink_to(copies / "index")
    options = ("--out", copies / "run", *OPTIONS, "--epochs", 3)
    for arguments in (
        ("report", copies / "run"),
        ("train", made / "data" / "labels.csv", *options),
        ("index", made / "run", made / "data", "--out", copies / "index"),
    ):
        done = command(arguments, monkeypatch, capsys)
        assert done.code == 0, done.errors
    assert victim.read_text() == "precious"
    assert (copies / "index" / "index.json").is_file()
    assert all((copies / "run" / name).is_symlink() for name in LINKS)


@pytest.mark.parametrize("make", [lambda path, to: path.symlink_to(to), lambda path, _: os.mkfifo(path)])
def test_a_lock_that_is_no_file_is_refused(copies: Path, made: Path, monkeypatch, capsys, make: Callable) -> None:
    victim = copies / "victim"
    victim.write_text("precious")
    for name in ("run", "index"):
        (copies / name / ".lock").unlink(missing_ok=True)
        make(copies / name / ".lock", victim)
    for arguments in (
        ("train", made / "data" / "labels.csv", "--out", copies / "run", *OPTIONS),
        ("index", made / "run", made / "data", "--out", copies / "index"),
    ):
        done = command(arguments, monkeypatch, capsys)
        assert (done.code, done.errors.count("\n")) == (2, 1)
        assert ".lock" in done.errors
    assert victim.read_text() == "precious"


def test_a_temporary_file_is_made_never_opened(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.disk.secrets.token_hex", lambda _: "0" * 16)
    (tmp_path / "victim").write_text("precious")
    temporary_path(tmp_path / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError) as error:
        atomic_write(tmp_path / "a", b"new")
    for fact in (str(tmp_path / "a"), os.strerror(errno.EEXIST)):
        assert fact in str(error.value)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "a").exists()


def test_only_our_own_old_leftovers_are_removed(tmp_path: Path) -> None:
    left, fresh, linked = (tmp_path / f".a.{letter * 16}.tmp" for letter in "012")
    others = [tmp_path / name for name in (".a.tmp", "a.0000000000000000.tmp", ".a.000000000000000g.tmp")]
    for path in (left, fresh, *others):
        write_new(path, b"")
    linked.symlink_to(others[0])
    for path in (left, *others):
        os.utime(path, (1, 1))
    os.utime(linked, (1, 1), follow_symlinks=False)
    with locked(tmp_path):
        assert [path for path in (left, fresh, *others) if not path.exists()] == [left]
    assert linked.is_symlink()


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_never(tmp_path: Path) -> None:
    def work() -> None:
        write_new(temporary_path(tmp_path / "a"), b"half")
        temporary_path(tmp_path / "folder").mkdir()
        time.sleep(60)

    writer = Forked(work)
    while len(list(tmp_path.glob(".*.tmp"))) < 2:
        time.sleep(0.01)
    names = {path.name: path for path in tmp_path.glob(".*.tmp")}
    system = next(iter(names)).split(".")[2].split("-")[0]
    for path in names.values():
        os.utime(path, (1, 1))
    others = []
    for age_s in (60, 7_200, 200_000):
        others.append(tmp_path / f".a.00000000-{writer.pid}-{age_s}.{'0' * 16}.tmp")
        write_new(others[-1], b"")
        os.utime(others[-1], (time.time() - age_s,) * 2)
    number_of_another = tmp_path / f".a.{system}-{writer.pid}-1.{'0' * 16}.tmp"  # an older process of that number
    write_new(number_of_another, b"")
    with locked(tmp_path):
        assert {path.exists() for path in names.values()} == {True}
        assert [path.exists() for path in others] == [True, True, False]
        assert not number_of_another.exists()
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    with locked(tmp_path):
        assert {path.exists() for path in names.values()} == {False}


@pytest.mark.parametrize("rename", [1, 2, 3])
def test_a_killed_index_build_leaves_nothing_behind(made: Path, tmp_path: Path, rename: int) -> None:
    def work() -> None:
        calls, replace = iter(range(1, 100)), os.replace

        def replace_or_die(*paths: Any) -> None:
            if next(calls) == rename:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)

        os.replace = replace_or_die
        index(str(made / "run"), [made / "data"], out=tmp_path / "index", device="cpu", workers=0)

    assert Forked(work).wait(60) == -signal.SIGKILL
    assert list((tmp_path / "index").glob(".*.tmp"))
    index(str(made / "run"), [made / "data"], out=tmp_path / "index", device="cpu", workers=0)
    assert not list((tmp_path / "index").glob(".*.tmp"))
    left, whole = ({path.name for path in folder.iterdir()} for folder in (tmp_path / "index", made / "index"))
    assert left == whole


def test_the_next_writer_of_any_folder_removes_leftovers(tmp_path: Path) -> None:
    def work() -> None:
        temporary = temporary_path(tmp_path / "page.html")
        write_new(temporary, b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    assert Forked(work).wait(30) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    atomic_write(tmp_path / "page.html", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_failing_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as error, disk_errors(tmp_path / "run"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert str(tmp_path / "run") in str(error.value)


def test_a_library_without_room_is_one_line() -> None:
    def less_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)

    done = started("train", "digits", preexec_fn=less_memory)
    _, errors = done.communicate(timeout=60)
    assert (done.returncode, errors.count("\n")) == (6, 1)
    for fact in ("libtorch", "GiB", "ulimit -v"):
        assert fact in errors


# The hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(made: Path, monkeypatch) -> list[str]:
    """Repositories that the hub was asked for; each is the run."""
    names: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: names.append(name) or str(made / "run"))
    return names


def test_the_hub_is_asked_only_by_its_name(made: Path, asked: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    picture = made / "data" / "0-0.png"
    for arguments in (
        ("predict", "rnus/flowers", picture),
        ("index", "rnus/flowers", picture, "--out", tmp_path / "index"),
        ("evaluate", "rnus/flowers", made / "data" / "labels.csv", "--split", "all"),
    ):
        done = command(arguments, monkeypatch, capsys)
        assert (done.code, done.errors.count("\n")) == (2, 1)
        assert "hub:rnus/flowers" in done.errors
    assert asked == []
    for arguments in (
        ("predict", "hub:user/name", picture),
        ("look", "hub:user/name", picture),
        ("evaluate", "hub:user/name", made / "data" / "labels.csv", "--split", "all"),
        ("index", "hub:user/name", picture, "--out", tmp_path / "index"),
    ):
        done = command(arguments, monkeypatch, capsys)
        assert done.code == 0, done.errors
    assert asked == ["user/name"] * 4


def test_an_index_cannot_ask_the_hub_by_itself(made: Path, asked: list[str], copies: Path) -> None:
    path, picture = copies / "index" / "index.json", made / "data" / "0-0.png"
    values: dict[str, Any] = json.loads(path.read_text())
    for model, option in (("hub:user/name", "--model hub:user/name"), ("user/name", "--model")):
        values["model"] = model
        path.write_text(json.dumps(values | {"own_sha256": own_sha256(values)}))
        with pytest.raises(UsageError, match=option):
            open_index(copies / "index", device="cpu")
    assert asked == []
    assert open_index(copies / "index", model="hub:user/name", device="cpu").search([picture])[0].hits
    assert asked == ["user/name"]


# Output -------------------------------------------------------------------------------------------------------------

PRINTING = {
    "check": ("check", "labels.csv", "--page", "page.html"),
    "check for machines": ("check", "labels.csv", "--json"),
    "train": ("train", "labels.csv", "--out", "run", *OPTIONS),
    "evaluate": ("evaluate", "run"),
    "evaluate for machines": ("evaluate", "run", "--json"),
    "predict": ("predict", "run", "data"),
    "predict for machines": ("predict", "run", "data", "--json"),
    "look": ("look", "run", "0-0.png", "--page", "page.html"),
    "index": ("index", "run", "data", "--out", "index"),
    "search": ("search", "index", "0-0.png"),
    "search for machines": ("search", "index", "data", "--json"),
    "report": ("report", "run", "--page", "page.html"),
    "verify": ("verify", "run"),
    "recipes": ("recipes", "--json"),  # more than a buffer
    "models": ("models", "resmlp_s12"),
}


def into(file: Any, arguments: tuple[str, ...], copies: Path, made: Path, monkeypatch, capsys) -> tuple[Any, str]:
    """The exit code and stderr of a command whose standard output is `file`."""
    places = {name: str(copies / name) for name in ("run", "index", "page.html")}
    places |= {"data": str(made / "data")}
    places |= {name: str(made / "data" / name) for name in ("labels.csv", "0-0.png")}
    monkeypatch.setattr(sys, "argv", ["patchloom", arguments[0], *(places.get(part, part) for part in arguments[1:])])
    monkeypatch.chdir(copies)
    capsys.readouterr()
    with monkeypatch.context() as patched, file:
        patched.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as ended:
            patchloom.cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("verb", PRINTING)
def test_output_that_cannot_be_written_is_an_error(verb: str, copies: Path, made: Path, monkeypatch, capsys) -> None:
    code, errors = into(Path("/dev/full").open("w"), PRINTING[verb], copies, made, monkeypatch, capsys)  # noqa: SIM115
    assert (code, errors.count("\n")) == (6, 1)
    assert errors.startswith("error: ")
    assert os.strerror(errno.ENOSPC) in errors


@pytest.mark.parametrize("verb", ["evaluate", "recipes", "predict for machines"])
def test_a_closed_pipe_is_no_error(verb: str, copies: Path, made: Path, monkeypatch, capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code, errors = into(os.fdopen(writer, "w"), PRINTING[verb], copies, made, monkeypatch, capsys)
    assert code in (0, 3, 141)
    assert errors == ""
