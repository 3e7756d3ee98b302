"""Every command of docs/papers/: it parses, its training can be planned, and one of every kind runs."""

import json
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from patchloom import cli
from patchloom.cli.old_spellings import modernize
from patchloom.inference.index_build import index
from patchloom.models import cost
from patchloom.models.catalog import CATALOG
from patchloom.models.cost import Cost
from patchloom.models.registry import build_model
from patchloom.recipes import Recipe, get_recipe
from patchloom.recipes.choices import base_recipe, changed_recipe
from patchloom.recipes.schema import flatten
from patchloom.tasks.detection import plan as detection_plan
from patchloom.tasks.images import resolved_recipe
from patchloom.tasks.images.networks import network_options
from patchloom.tasks.settings import TrainingSettings
from patchloom.training import run as training
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import class_folders, command
from tests.small_runs import trained  # noqa: F401
from tests.tasks.classification.test_levels import colors, make_run

PAPERS = Path(__file__).parent.parent / "docs" / "papers"
SECTIONS = [part for page in sorted(PAPERS.glob("*.md")) for part in re.split(r"(?m)^## ", page.read_text("utf-8"))[1:]]
# Document → its tables and figures: names and how many of each.
DOCUMENTS = {
    "ResMLP (NeurIPS version)": {"table": ["5"], "figure": ["4"]},
    "ResMLP (arXiv version)": {"table": ["4"], "figure": ["4", "B.2"]},
    "sMLPNet": {"table": ["6"], "figure": ["3"]},
    "MLP-Mixer": {"table": ["4"], "figure": ["6"]},
    "Thesis": {
        "table": ["2.16", "3.22", "4.6", "5.8", "6.15", "7.3"],
        "figure": ["1.5", "2.9", "3.10", "4.4", "5.8", "6.11", "7.2"],
    },
}
# Kinds whose run needs another task's run, with the test that makes it.
ELSEWHERE = {
    ("evaluate", "--split", "--text"): "tests/cli/test_translate.py",
    ("evaluate", "--mode"): "tests/tasks/segmentation/test_segmentation.py",
    ("evaluate", "--multi-scale"): "tests/tasks/segmentation/test_segmentation.py",
    ("sweep", "--grid", "--init", "--recipe"): "tests/training/test_sweeps.py",
    ("sweep", "--grid", "--recipe"): "tests/training/test_sweeps.py",
}


def rows_of(document: str) -> list[list[str]]:
    lines = [line for part in SECTIONS if part.startswith(document) for line in part.splitlines()]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rules = {place for place, row in enumerate(cells) if row[0] == "---"}  # each below the names of the columns
    return [row for place, row in enumerate(cells) if not {place, place + 1} & rules]


ROWS = [row for document in DOCUMENTS for row in rows_of(document)]
# A training command, and what the document states about it: (22.0 M, 4.6 G, 300 epochs, `model.drop_path=0.05`).
STATED = re.compile(r"`patchloom (train [^`]+)`(?: \((.+?)\)(?=;|$))?")
COMMANDS = list(dict.fromkeys(text for row in ROWS for text in re.findall(r"`patchloom ([^`]+)`", row[2])))
TRAININGS = [text for text in COMMANDS if text.startswith("train ")]


def kind(text: str) -> tuple[str, ...]:
    """The verb and the names of its options; what data and runs there are does not count."""
    verb, *rest = shlex.split(text)
    return verb, *sorted(part for part in rest if part.startswith("--"))


KINDS = {kind(text): text for text in reversed(COMMANDS) if not text.startswith("train ")}


def counted(last: str) -> list[str]:
    """'2.3' → 2.1, 2.2, 2.3."""
    chapter, _, number = last.rpartition(".")
    return [f"{chapter}.{i}" if chapter else str(i) for i in range(1, int(number) + 1)]


def told(rows: list[list[str]], what: str) -> set[str]:
    """The numbers of tables, or of figures, that rows begin with: 'tables 2.5, 2.6', 'figures 1.1 to 1.5'."""
    found: set[str] = set()
    for head in (part for row in rows for part in row[0].split(";")):
        if match := re.match(rf"{what}s? ((?:[\dB.]+(?:, | to )?)+)", head.strip()):
            numbers = match[1].rstrip(", ")
            first, _, last = numbers.partition(" to ")
            between = [n for n in counted(last) if counted(last).index(n) >= counted(last).index(first)] if last else []
            found |= set(between or numbers.split(", "))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_table_and_figure_has_a_row(document: str) -> None:
    for what, last in DOCUMENTS[document].items():
        wanted = {number for each in last for number in counted(each)}
        assert told(rows_of(document), what) == wanted


def test_every_row_has_a_command_or_says_that_it_has_none() -> None:
    for head, _, cell in ROWS:
        assert "`patchloom " in cell or cell == "none", head


def test_figures_are_drawn() -> None:
    for head, what, cell in ROWS:
        commands = re.findall(r"`patchloom ([^`]+)`", cell)
        printing = [text for text in commands if text.startswith(("models", "recipes")) and "--svg" not in text]
        assert not head.startswith("figure") or not printing or "settings" in what, head


IDS = {"RM": 12, "MX": 10, "SM": 5, "DE": 9, "CA": 6, "PC": 8, "D3": 6, "SS": 2, "GR": 10, "TR": 4, "MT": 3}
IDS |= {"CO": 4, "FI": 2}


def test_every_id_has_the_rows_that_cover_it() -> None:
    """A place is a row or a section of the page, or a link to an existing page."""
    named: list[str] = []
    for page in sorted(PAPERS.glob("*.md")):
        above, _, coverage = page.read_text("utf-8").partition("\n## Coverage\n")
        places = set(re.findall(r"(?m)^(?:## |\| )([^|\n]+?)(?: \||$)", above))
        for line in re.findall(r"(?m)^\| [A-Z][A-Z\d]-\d.*$", coverage):
            name, _, where = (cell.strip() for cell in line.strip("|").split("|"))
            named.append(name)
            if target := re.fullmatch(r"\[[^]]+\]\(([^)#]+)(?:#[\w-]+)?\)", where):
                assert (PAPERS / target[1]).is_file(), name
                continue
            rest = where
            for place in sorted(places, key=len, reverse=True):
                rest = re.sub(rf"(?:^|(?<=; )){re.escape(place)}(?=;|$)", "", rest)
            assert not rest.strip("; "), (name, rest)
    assert sorted(named) == sorted(f"{topic}-{number}" for topic, last in IDS.items() for number in range(1, last + 1))


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_is_read(text: str) -> None:
    (verb, *arguments), hints = modernize(shlex.split(text))
    assert hints == []
    known: Any = typer.main.get_command(cli.make_app([verb]))
    context = known.commands[verb].make_context(verb, arguments)
    named = [part for part in arguments if re.fullmatch(r"[a-z][a-z0-9_]*", part)]
    if verb in ("models", "bench"):
        assert set(named) <= set(CATALOG)
    if verb == "recipes":
        assert all(get_recipe(name) for name in named)
    assert context.params


# Trainings ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for DATA: pictures with levels, WordNet ids, masks and boxes, text."""
    root = tmp_path_factory.mktemp("papers")
    ids = class_folders(root / "ids", ("n01440764", "n02085620"), pictures=4)
    return {"DATA": str(colors(root / "data")), "IDS": str(ids), "MASKS": "shapes:count=20,size=32", "TEXT": "numbers"}


def filled(text: str, places: dict[str, str], folder: Path) -> list[str]:
    """A training on small data; the runs and teachers it begins with, which only its network fits, are left out."""
    if "--task" in text:
        places = places | {"DATA": places["MASKS"]}
    if "imagenet127" in text:
        places = places | {"DATA": places["IDS"]}
    text = re.sub(r" --(init|teacher) \S+| --set model.scales_from=RUN", "", text)
    parts = [places.get(part, part) for part in shlex.split(text)]
    parts = [part.replace("clusters_of=RUN", f"clusters_of={folder / 'run'}") for part in parts]
    parts = [str(folder / part) if part == "RUN2" else part for part in parts]
    parts += ["--device", "cpu", *([] if "--out" in parts else ["--out", str(folder / "out")])]
    parts += ["--set", "grafit.clusters=2"] if "clusterfit" in text else []
    return parts


def marked() -> list[Any]:
    """The trainings; those of which recipe, options and fields all stand in an earlier one run with the slow tests."""
    seen: set[str] = set()
    found = []
    for text in TRAININGS:
        parts = shlex.split(text)
        new = {part.partition("=")[0] for part in parts if part.startswith("--") or "=" in part}
        new.add(parts[parts.index("--recipe") + 1])
        found.append(pytest.param(text, marks=() if new - seen else pytest.mark.slow))
        seen |= new
    return found


@pytest.mark.parametrize("text", marked())
def test_a_training_can_be_planned(text: str, places, tmp_path, monkeypatch, capsys) -> None:
    plans = []

    def planned(settings: Any, **_: Any) -> training.TrainingResult:
        plans.append(training.make_plan(settings, "cpu"))
        return training.TrainingResult(tmp_path, None, {})

    if "clusters_of" in text:
        make_run(tmp_path / "run", Path(places["DATA"]), "coarse")
    monkeypatch.setattr("patchloom.training.train.run_training", planned)
    for module in (resolved_recipe, detection_plan, cost):  # counting operations takes longest, and is told nobody
        monkeypatch.setattr(module, "cost", lambda *_: Cost(1, 1, 1))
    done = command(tuple(filled(text, places, tmp_path)), monkeypatch, capsys)
    assert done.code == 0, done.errors
    changes = dict(part.split("=", 1) for part in shlex.split(text) if re.match(r"[a-z_.]+=", part))
    chosen = json.dumps(plans[0].recipe.to_dict(), default=str)
    for key in changes:
        assert f'"{key.split(".")[-1]}"' in chosen, key


# What a row states ----------------------------------------------------------------------------------------------------

STATEMENTS = list(dict.fromkeys(pair for row in ROWS for pair in STATED.findall(row[2])))
SIZES = {"M": lambda counted: counted.parameters / 1e6, "G": lambda counted: counted.multiply_adds / 1e9}


def stated_recipe(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Recipe:
    """The recipe of a training command, before data and an earlier run change it."""
    seen: list[TrainingSettings] = []

    def keep(settings: TrainingSettings, **_: Any) -> training.TrainingResult:
        seen.append(settings)
        return training.TrainingResult(Path(), None, {})

    monkeypatch.setattr("patchloom.training.train.run_training", keep)
    assert command(tuple(shlex.split(text)), monkeypatch, capsys).code == 0
    base = base_recipe(seen[0].recipe, seen[0].model)
    assert base is not None, "a row names its recipe"
    return changed_recipe(base, seen[0].recipe_changes())[0]


@cache
def counted_cost(name: str, options: str, size: int, classes: int) -> Cost:
    with torch.device("meta"):
        network = build_model(name, num_classes=classes, image_size=size, **json.loads(options))
    return cost.cost(network)


def wrong_statements(recipe: Recipe, statement: str) -> list[str]:
    """The parts of a row's statement that its recipe and network do not meet, with their values."""
    wrong = []
    for part in statement.split(", "):
        text, _, unit = part.strip("`").partition(" ")
        number = text.replace(",", "")
        value: Any
        if "=" in text:
            key, _, text = text.partition("=")
            value = flatten(recipe).get(key)
            matches = value is not None and text in (str(value), f"{value:g}" if isinstance(value, float) else "")
        elif unit in SIZES:
            name, options = network_options(recipe)
            # Mixer's table leaves the classifier out.
            classes = 0 if name.startswith("mixer") else 1000
            value = SIZES[unit](counted_cost(name, json.dumps(options), recipe.model.image_size, classes))
            # Half a digit of the table, and what papers count differently (biases, pooling), as in test_counts.
            digit = 10.0 ** -len(number.partition(".")[2])
            matches = abs(value - float(number)) <= digit / 2 + 0.006 * float(number)
        else:
            value = {"epochs": recipe.schedule.epochs, "steps": recipe.schedule.steps, "px": recipe.model.image_size}[
                unit
            ]
            matches = value == int(number)
        wrong += [] if matches else [f"{part}: {value}"]
    return wrong


def test_every_training_states_its_length() -> None:
    assert len(STATEMENTS) >= len(TRAININGS)
    bare = [text for text, statement in STATEMENTS if not re.search(r"\d (epochs|steps)", statement)]
    assert not bare


@pytest.mark.parametrize(("text", "statement"), STATEMENTS)
def test_a_training_is_that_of_its_row(text: str, statement: str, monkeypatch, capsys) -> None:
    assert wrong_statements(stated_recipe(text, monkeypatch, capsys), statement) == []


def without_options() -> list[tuple[str, str]]:
    """Each training command, and the same without one of its settings."""
    pairs = []
    for text in TRAININGS:
        parts = shlex.split(text)
        places = [place for place, part in enumerate(parts) if part == "--set"]
        pairs += [(text, shlex.join(parts[:place] + parts[place + 2 :])) for place in places]
    return pairs


@pytest.mark.parametrize(("text", "shorter"), without_options())
def test_every_setting_of_a_row_changes_its_training(text: str, shorter: str, monkeypatch, capsys) -> None:
    try:
        other = stated_recipe(shorter, monkeypatch, capsys)
    except UsageError:  # the others need it
        return
    assert stated_recipe(text, monkeypatch, capsys) != other


@pytest.mark.parametrize(
    "wrong", ["15.4 M", "3.1 G", "400 epochs", "20,000 steps", "384 px", "`optim.name=lamb`", "`model.no_field=1`"]
)
def test_a_wrong_row_fails(wrong: str, monkeypatch, capsys) -> None:
    recipe = stated_recipe("train DATA --recipe deit --model deit_ti", monkeypatch, capsys)
    assert wrong_statements(recipe, "5.7 M, 1.3 G, 300 epochs, 224 px, `optim.name=adamw`") == []
    assert len(wrong_statements(recipe, wrong)) == 1


# One of every other kind ----------------------------------------------------------------------------------------------

SLOW = ("bench", "--cost", "--levels --linear")  # they measure for seconds


@pytest.fixture(scope="module")
def toys(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:  # noqa: F811
    """Small runs and data for every placeholder; LEVELS has a run at each of two levels."""
    root = tmp_path_factory.mktemp("toys")
    for number, name in enumerate(("blue", "red")):
        shutil.copytree(trained / "data" / name, root / "v2" / str(number))
        (root / "named" / name).mkdir(parents=True)
        for i in (1, 2):
            place = root / "named" / name / f"ILSVRC2012_val_{2 * number + i:08d}.png"
            shutil.copy(trained / "data" / name / f"{i}.png", place)
    (root / "real.json").write_text(json.dumps([[0], [0], [1], [1]]))
    leveled = colors(root / "leveled")
    runs = {run: str(trained / name) for run, name in (("RUN", "a"), ("RUN2", "b"), ("RUN3", "vit"))}
    of_levels = {
        f"LEVELS-{run}": make_run(root / run, leveled, level) for run, level in (("RUN", None), ("RUN2", "coarse"))
    }
    of_levels["INDEX"] = str(root / "index")
    index(of_levels["LEVELS-RUN"], [str(leveled)], out=of_levels["INDEX"])
    images = {"IMAGES": str(trained / "data" / "red"), "DATA": str(trained / "data"), "NAMED": str(root / "named")}
    others = {"V2": "v2", "REAL": "real.json", "DATA2": "named"}
    images |= {"LEVELS-DATA": str(leveled)} | {name: str(root / place) for name, place in others.items()}
    return runs | of_levels | images


def small(text: str, toys: dict[str, str], folder: Path) -> list[str]:
    """The command on small runs and data, and quicker where it would measure or train for long."""
    if "--levels" in text or "INDEX" in text:
        toys = toys | {name: toys[f"LEVELS-{name}"] for name in ("DATA", "RUN", "RUN2")}
    if text.startswith("index"):
        toys = toys | {"INDEX": str(folder / "index")}
    if "--real" in text:
        toys = toys | {"DATA": toys["NAMED"]}
    text = re.sub("--linear-sgd", "--linear-sgd 2", text)
    if text.startswith("bench"):
        text = re.sub(r"^(bench \w+)[\w ]*", r"\1 --size 32 --seconds 0.05 ", text).replace("224,384,512", "32,64")
    out = ["--page", str(folder / "page.html")] if text.startswith(("report", "look")) else []
    return [*(toys.get(part, part) for part in shlex.split(text)), *out]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=pytest.mark.slow if any(part in text for part in SLOW) else ())
        for each, text in KINDS.items()
        if each not in ELSEWHERE
    ],
)
def test_one_of_every_kind_runs(text: str, toys, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(tuple(small(text, toys, tmp_path)), monkeypatch, capsys)
    assert done.code in ((0, 3) if text.startswith("check") else (0,)), done.errors  # 3: something was found
    assert done.output.strip()


def test_what_runs_elsewhere_does_so() -> None:
    assert set(ELSEWHERE) <= set(KINDS)
    for each, where in ELSEWHERE.items():
        tests = (Path(__file__).parent.parent / where).read_text("utf-8")
        assert any(option in tests for option in each[1:] if option != "--split"), each
