"""What every verb prints: one JSON value on stdout with --json, and whole numbers at 80 columns."""

import json
import math
import re
import sys

import pytest

from patchloom import __version__, cli
from patchloom.recipes import list_recipes
from tests.messages import missing
from tests.reliability.commands import OPTIONS, class_folders, command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Pictures, two short runs on them, and an index."""
    root = tmp_path_factory.mktemp("made")
    class_folders(root / "data", ("red_and_a_rather_long_name_for_a_class_of_pictures", "blue"))
    for coarse, fine in {"plants": ("rose", "oak"), "animals": ("cat", "dog")}.items():
        class_folders(root / "nested" / coarse, fine)
    with pytest.MonkeyPatch.context() as patch:
        for name, seed in (("a_run_whose_name_is_long_enough_to_be_cut", 1), ("b", 2)):
            seeded = ("--set", f"seed={seed}", "--set", "schedule.epochs=1", "--out", root / "runs" / name)
            run_it(patch, "train", root / "data", *OPTIONS, *seeded, "-q")
        run = root / "runs" / "b"
        run_it(patch, "index", run, root / "data", "--out", root / "found.index", "--device", "cpu", "-q")
    return root


def run_it(patch, *arguments) -> None:
    patch.setattr(sys, "argv", ["patchloom", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


@pytest.fixture
def typed(monkeypatch, capsys, made):
    """The command line, with A, B, DATA, INDEX and ROOT put in."""
    monkeypatch.chdir(made)
    runs = made / "runs"
    places = {
        "A": runs / "a_run_whose_name_is_long_enough_to_be_cut",
        "B": runs / "b",
        "DATA": made / "data",
        "NESTED": made / "nested",
    }
    places |= {"INDEX": made / "found.index", "PICTURE": made / "data" / "blue" / "0.png"}

    def run(line: str):
        words = [places.get(word, word) for word in line.split()]
        return command(tuple(words), monkeypatch, capsys)

    return run


EVALUATIONS = [
    "evaluate B DATA",
    "compare A B DATA",
    "compare A B",
    "probe A B DATA --knn 3 --linear",
    "evaluate B DATA --sweep crop=0.8,1",
    "compare A B DATA --agreement",
    "compare A B --seeds",
    "probe A B NESTED --levels",
    "evaluate B DATA --cost",
]
TABLES = [
    "models",
    "models deit3_*",
    "models resmlp_s12",
    "recipes",
    "recipes deit3 --model deit3_l",
    "recipes deit deit3 wightman_a2 cait",
    "bench deit_ti resnet50_attention_pool --size 32 --batches 1 --seconds 0.01",
    "bench deit_ti --memory 32,48 --batches 1",
    *EVALUATIONS,
]
OTHERS = [
    "check DATA",
    "predict B DATA",
    "search INDEX PICTURE --top 3",
    "index B DATA --out INDEX",
    "look B PICTURE --page look.html",
    "look B --ranked --page ranked.html",
    "report B --page page.html",
    "report A B --page pages.html",
    "train DATA --dry-run --out runs/new",
]
CPU = ("evaluate", "compare", "probe", "predict", "bench", "search", "index")


def on_cpu(line: str) -> str:
    options = f"{line} --device cpu" if line.split()[0] in CPU else line
    return f"{options} {' '.join(OPTIONS)}" if line.startswith("train") else options


@pytest.mark.parametrize("line", TABLES + OTHERS)
def test_json_is_one_value_on_stdout(line, typed) -> None:
    done = typed(f"{on_cpu(line)} --json")
    assert done.code == 0, done.errors
    assert json.loads(done.output)
    assert "error" not in done.errors


def test_train_prints_its_progress_on_stderr(typed, made) -> None:
    done = typed(f"{on_cpu('train DATA --out runs/json')} --epochs 1 --json")
    assert done.code == 0
    value = json.loads(done.output)
    assert (value["folder"], value["ended"], value["left_out"]) == ("runs/json", "finished", 0)
    assert 0 <= value["top1"] <= 100
    first, *_, last = done.errors.splitlines()
    assert missing(first, f"patchloom {__version__}", made / "data") == []
    assert "patchloom predict runs/json" in last
    assert any(f"{value['top1']:.2f}" in line for line in done.errors.splitlines())


def test_the_plan_of_a_dry_run_as_fields(typed) -> None:
    done = typed(f"{on_cpu('train DATA --dry-run --out runs/new')} --json")
    value = json.loads(done.output)
    assert (value["folder"], value["ended"]) == ("runs/new", None)
    assert (value["data"]["train"], value["data"]["val"], len(value["data"]["classes"])) == (16, 4, 2)
    assert value["model"]["image_size"] == 16
    assert value["model"]["parameters"] > 0
    assert value["model"]["multiply_adds"] > 0
    assert value["recipe"]["optim"]["batch_size"] == value["batch"] == 4
    assert (value["epochs"], value["steps"], value["micro_batches"]) == (2, 8, 1)
    (epochs,) = [choice for choice in value["choices"] if choice["key"] == "schedule.epochs"]
    assert epochs["value"] == 2
    assert epochs["why"]
    assert value["seconds"] >= 0
    assert value["memory_mib"] is None  # known of a GPU
    assert "runs/new" in done.errors  # the same in words


@pytest.mark.parametrize(
    "line", ["train nowhere", "evaluate nowhere DATA", "predict nowhere DATA", "report nowhere", "search nowhere B"]
)
def test_an_error_with_json_leaves_stdout_empty(line, typed) -> None:
    done = typed(f"{line} --json")
    assert done.code >= 2
    assert done.output == ""
    assert done.errors.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("line", [*OTHERS, "evaluate B DATA", "recipes"])
def test_quiet_prints_results_alone(line, typed) -> None:
    done = typed(f"{on_cpu(line)} -q")
    assert (done.code, done.errors) == (0, "")
    assert done.output.strip()
    assert "patchloom " not in done.output  # no next command
    assert "note:" not in done.output


def numbers_in(value) -> list[float]:
    """Every number of a JSON value that a table shows."""
    if isinstance(value, dict):
        left_out = ("confusion", "per_class", "options", "tables", "linear_l2")
        return [n for key, each in value.items() if key not in left_out for n in numbers_in(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("line", TABLES)
def test_tables_at_80_columns_cut_nothing(line, typed, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.cli.table.WIDTH", 80)
    done = typed(on_cpu(line))
    assert done.code == 0, done.errors
    # What is no table: lines that a terminal wraps, sources of recipes among them.
    plain = ("note: ", "patchloom.create", "* ", *list_recipes())
    sentences = re.compile("patchloom |translation_")  # commands, and the networks that are no row of the table
    tables = [
        row.rstrip()
        for row in done.output.splitlines()
        if not row.startswith(plain) and (row.startswith(" ") or not sentences.search(row))
    ]
    assert max(map(len, tables)) <= 80
    assert "…" not in re.sub(r"[+-]\d+\.\d\d … [+-]\d+\.\d\d", "", done.output)  # intervals


@pytest.mark.parametrize("line", EVALUATIONS[:-1])
def test_all_numbers_of_the_json_stand_in_the_tables(line, typed, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.cli.table.WIDTH", 80)
    value = json.loads(typed(f"{on_cpu(line)} --json").output)
    for aside in ("comparisons", "seeds"):
        value.pop(aside, None)
    if "--sweep" in line:  # of which the table shows top-1
        value = [{key: point[key] for key in ("crop", "top1")} for points in value.values() for point in points]
    printed = typed(on_cpu(line)).output
    in_table = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", printed)}
    lost = [n for n in numbers_in(value) if not any(math.isclose(n, s, rel_tol=0, abs_tol=0.0051) for s in in_table)]
    assert lost == []
