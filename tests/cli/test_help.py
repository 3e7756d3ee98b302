"""What `--help`, `--help-all`, `help`, `--version`, -q, -v and a shell's completion show."""

import os
import re
import subprocess
import sys

import pytest

import patchloom
from patchloom.cli import VERBS
from tests.messages import missing
from tests.reliability.commands import ROOT, command

NAMES = [name for verbs in VERBS.values() for name in verbs]
USUAL = {
    "train": ["model", "recipe", "epochs", "time", "size", "init", "labels", "out", "device", "dry-run"],
    "evaluate": ["split", "text", "cost", "device", "sweep"],
    "probe": ["knn", "linear", "linear-sgd", "few-shot", "levels", "trunk", "device"],
}


@pytest.fixture
def typed(monkeypatch, capsys):
    """The command line in this process, at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    return lambda *arguments: command(arguments, monkeypatch, capsys)


def options_in(text: str) -> list[str]:
    """Long options that stand at the beginning of a line of the help."""
    return re.findall(r"^│ {1,6}--(?!no-)([\w-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("verb", USUAL)
def test_the_help_shows_ten_options_and_where_the_rest_is(verb, typed) -> None:
    few, every = typed(verb, "--help"), typed(verb, "--help-all")
    assert (few.code, every.code, few.errors) == (0, 0, "")
    assert options_in(few.output) == [*USUAL[verb], "help-all", "help"]
    assert {"strict", "workers", "quiet", "verbose", *USUAL[verb]} <= set(options_in(every.output))
    hidden = len(options_in(every.output)) - len(options_in(few.output))
    last_line = few.output.rstrip().splitlines()[-1]
    assert missing(last_line, hidden, f"patchloom {verb} --help-all") == []
    assert f"patchloom {verb} --help-all" not in every.output
    assert every.output.count("╭─") > few.output.count("╭─")  # panels


def test_a_help_that_was_folded_does_not_change_the_command(typed) -> None:
    every = typed("train", "--help-all").output
    typed("train", "--help")
    assert typed("train", "--help-all").output == every


@pytest.mark.parametrize("verb", NAMES)
def test_help_of_a_verb_is_its_help(verb, typed) -> None:
    done = typed("help", verb)
    assert (done.code, done.errors) == (0, "")
    assert done.output == typed(verb, "--help").output
    assert f"patchloom {verb}" in done.output


def test_help_alone_lists_the_verbs(typed) -> None:
    done = typed("help")
    assert done.output == typed("--help").output
    assert all(re.search(rf"^│ {verb} ", done.output, re.MULTILINE) for verb in NAMES)


def test_patchloom_alone_lists_the_verbs_without_an_error(typed) -> None:
    done = typed()
    assert (done.code, done.errors) == (0, "")
    assert done.output == typed("--help").output


def test_help_of_nothing_says_what_is_near(typed) -> None:
    done = typed("help", "trian")
    assert (done.code, done.output) == (2, "")
    assert missing(done.errors, "error: ", "trian", "train") == []


def test_version(typed) -> None:
    assert typed("--version") == (0, "", f"patchloom {patchloom.__version__}\n")


@pytest.mark.parametrize("arguments", [("-q", "recipes"), ("recipes", "-q"), ("--quiet", "recipes")])
def test_quiet_leaves_results(arguments, typed) -> None:
    loud, quiet = typed("recipes"), typed(*arguments)
    assert loud.output.startswith(quiet.output)
    assert "patchloom " in loud.output.removeprefix(quiet.output)  # the next command


def test_quiet_leaves_errors(typed) -> None:
    assert missing(typed("-q", "recipes", "dei").errors, "error: ", "dei") == []


@pytest.mark.parametrize("arguments", [("-v", "recipes", "dei"), ("recipes", "dei", "-v")])
def test_verbose_shows_where_an_error_arose(arguments, typed) -> None:
    done = typed(*arguments)
    assert done.code == 2
    assert done.errors.startswith("Traceback")
    assert "in get_recipe" in done.errors
    assert missing(done.errors.splitlines()[-1], "error: ", "dei") == []
    assert "Traceback" not in typed("recipes", "dei").errors  # the next command begins anew


def test_quiet_and_verbose_do_not_go_together(typed) -> None:
    for arguments in (("-q", "-v", "recipes"), ("-q", "recipes", "-v")):
        done = typed(*arguments)
        assert (done.code, done.output) == (2, "")
        assert missing(done.errors, "error: ", "--quiet", "--verbose") == []
        assert done.errors.count("\n") == 1


def completed(line: str, cwd) -> list[str]:
    """What bash is offered for a line; loading torch would end it with an error."""
    words = f"import sys; sys.argv[0] = 'patchloom'; sys.modules['torch'] = None; {MAIN}"
    variables = {"_PATCHLOOM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.stderr == ""
    return done.stdout.split()


MAIN = "from patchloom.cli import main; main()"


def test_names_are_completed_without_torch(tmp_path) -> None:
    for name in ("digits", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "config.json").touch()
    assert completed("patchloom train data --model smlpnet_t", tmp_path) == ["smlpnet_t2", "smlpnet_t"]
    assert completed("patchloom train data --recipe dino_", tmp_path) == ["dino_small_images"]
    assert completed("patchloom models deit3_h", tmp_path) == ["deit3_h", "deit3_h52", "deit3_h26x2"]
    for verb in ("evaluate", "predict", "report", "look", "index"):
        assert completed(f"patchloom {verb} ru", tmp_path) == ["runs/digits"]


def test_models_are_listed_without_torch() -> None:
    line = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = sys.argv[2:]; {MAIN}"
    for arguments in (["models"], ["models", "cait_*", "--json"], ["--help"], ["recipes"]):
        done = subprocess.run([sys.executable, "-c", line, "", *arguments], capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_train_says_something_before_torch_is_loaded() -> None:
    line = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = ['train', 'digits']; {MAIN}"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert "torch" in done.stderr
    assert missing(done.stdout, f"patchloom {patchloom.__version__}", "digits") == []
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--help",), ("help", "--help"), ("look", "--help-all"), ("check", "--help-all")]
)
def test_help_names_no_python_type(arguments, typed) -> None:
    assert re.findall(r"\bbool\b|\bstr\b", typed(*arguments).output) == []
