"""The commands as a user types them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from patchloom.cli.old_spellings import modernize
from tests.messages import missing
from tests.reliability.commands import Done, command


@pytest.fixture
def patchloom(monkeypatch, capsys) -> Callable[..., Done]:
    return lambda *arguments: command(arguments, monkeypatch, capsys)


def test_models_as_json() -> None:
    line = [sys.executable, "-m", "patchloom.cli", "models", "resmlp_s12", "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0
    (row,) = json.loads(done.stdout)
    assert (row["model"], row["parameters"]) == ("resmlp_s12", 15_350_872)
    assert row["options"]["depth"] == 12


def test_models_as_a_table(patchloom) -> None:
    done = patchloom("models", "mixer_b*")
    assert done.code == 0
    assert [line.split()[0] for line in done.output.splitlines() if "Mixer" in line] == [
        "mixer_b32",
        "mixer_b16",
    ]
    assert "12.6 G" in done.output


def test_a_network_shows_what_was_published_for_it(patchloom) -> None:
    done = patchloom("models", "resmlp_s12")
    assert "resmlp_s12:in1k_dist" in done.output
    assert "https://dl.fbaipublicfiles.com/deit/resmlp_12_no_dist.pth" in done.output
    nothing = patchloom("models", "deit3_t").output
    assert "deit3_t" in nothing
    assert "https://" not in nothing


def test_published_weights_and_wrong_names_need_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['patchloom', 'models', *sys.argv[1:]]\n"
        "from patchloom import cli\n"
        "try:\n    cli.main()\nfinally:\n    assert not {'torch', 'timm', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--pretrained", "--json"], capture_output=True, text=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["deit_s:in1k"]["sha256_begins"] == "cd65a155"
    assert rows["mixer_b16:in21k"]["classes"] == 21843
    wrong = subprocess.run([sys.executable, "-c", code, "resmlp_s13"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert missing(wrong.stderr, "error: ", "resmlp_s13", "resmlp_s12") == []
    assert wrong.stderr.count("\n") == 1


def test_bench_as_json(patchloom) -> None:
    done = patchloom("bench", "deit_ti", "--absorb", "--size", "32", "--batches", "1,2", "--seconds", "0.1", "--json")
    assert done.code == 0, done.errors
    plain, absorbed = json.loads(done.output)
    assert (plain["model"], absorbed["model"]) == ("deit_ti", "deit_ti absorbed")
    assert plain["images_per_second"] > 0
    assert plain["batch_size"] in (1, 2)


@pytest.mark.slow
def test_bench_gives_memory_by_size(patchloom) -> None:
    from patchloom.models.peak_memory import peak_mem_mib
    from patchloom.models.registry import create_model

    arguments = ("bench", "deit_ti", "timm:resnet18", "--memory", "32,48", "--batches", "2", "--device", "cpu")
    result = json.loads(patchloom(*arguments, "--json").output)
    assert result["batch"] == 2
    assert result["peak_mem_mib"]["timm:resnet18"]["48"] > result["peak_mem_mib"]["timm:resnet18"]["32"]
    expected = peak_mem_mib(create_model("deit_ti", image_size=48).eval(), torch.zeros(2, 3, 48, 48))
    assert result["peak_mem_mib"]["deit_ti"]["48"] == expected


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("models", "resmpl_s12"), ("resmpl_s12", "resmlp_s12")),
        (("bench", "timm:resmpl_12_224"), ("timm", "resmpl_12_224", "resmlp_12_224")),
        (("bench", "deit_ti", "--batches", "a,b"), ("--batches",)),
        (("bench", "deit_ti", "--memory", "large"), ("--memory",)),
        (("models", "--sise", "3"), ("--sise",)),
        (("modles",), ("modles",)),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(patchloom, arguments, facts) -> None:
    done = patchloom(*arguments)
    assert done.code == 2
    assert missing(done.errors, "error: ", *facts) == []
    assert done.errors.count("\n") == 1
    assert done.output == ""


def test_recipes_side_by_side(patchloom) -> None:
    done = patchloom("recipes", "deit", "deit3")
    assert done.code == 0
    header = next(line for line in done.output.splitlines() if "deit3" in line)
    assert header.split() == ["deit", "deit3"]
    assert json.loads(patchloom("recipes", "deit", "--json").output)[0]["optim"]["weight_decay"] == 0.05


def test_a_recipe_as_the_file_that_train_reads(patchloom, tmp_path) -> None:
    from patchloom.recipes import Recipe, get_recipe

    done = patchloom("recipes", "deit3", "--model", "deit3_l", "--yaml")
    assert Recipe.from_yaml(done.output) == get_recipe("deit3", "deit3_l")


def test_train_evaluate_predict(patchloom, tmp_path) -> None:
    data, run = "shapes:count=40,size=32", str(tmp_path / "run")
    tiny = ["--set", "model.options.depth=1", "--set", "model.options.dim=16", "--device", "cpu", "--workers", "0"]
    done = patchloom("train", data, "--recipe", "small_images", "--epochs", "1", "--batch", "8", "--out", run, *tiny)
    assert done.code == 0, done.errors
    assert f"patchloom predict {run}" in done.output.splitlines()[-1]
    numbers = json.loads(patchloom("evaluate", run, data, "--split", "val", "--device", "cpu", "--json").output)
    assert 0 <= numbers["top1"] <= 100
    assert len(numbers["per_class"]) == 16
    from PIL import Image

    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    done = patchloom("predict", run, str(tmp_path / "red.png"), str(tmp_path / "torn.jpg"), "--device", "cpu", "--json")
    good, bad = json.loads(done.output)
    assert done.code == 3
    assert len(good["answers"]) == 3
    assert good["error"] is None
    assert "torn.jpg" in bad["error"]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("train", "no/such/folder"), ("no/such/folder",)),
        (("train", "digits", "--epocs", "3"), ("--epocs",)),
        (("train", "digits", "--set", "augment.mixup"), ("--set",)),
        (("train", "digits", "--set", "augment.mixpu=0"), ("augment.mixpu", "augment.mixup")),
        (("evaluate", "nowhere", "digits"), ("nowhere", "config.json")),
        (("recipes", "dei"), ("dei", "deit")),
    ],
)
def test_a_mistake_in_training_commands_is_one_line(patchloom, arguments, facts, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = patchloom(*arguments)
    assert done.code == 2, done.errors
    assert missing(done.errors, "error: ", *facts) == []
    assert done.errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_silent_worker_is_given_as_long_as_loaders_give_it() -> None:
    from patchloom.data.batches.loader import WORKER_TIMEOUT_S
    from patchloom.tasks.settings import TrainingSettings

    assert TrainingSettings(data="digits").worker_timeout == WORKER_TIMEOUT_S


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("probe run data --knn --linear", "probe run data --knn 20 --linear"),
        ("probe run data --linear --knn", "probe run data --linear --knn 20"),
        ("probe run data --knn 5,10 --linear-sgd", "probe run data --knn 5,10 --linear-sgd 100"),
        ("report run --out=page.html", "report run --page=page.html"),
        ("look run --out page.html", "look run --page page.html"),
        ("export run --out page.html", "export run --out page.html"),
        ("search index a.png --neighbours 5", "search index a.png --neighbors 5"),
        ("bench deit_ti --batch 1,2", "bench deit_ti --batches 1,2"),
        ("predict run -- --neighbours", "predict run -- --neighbours"),
        ("", ""),
    ],
)
def test_spellings_that_need_no_hint(typed, expected) -> None:
    assert modernize(typed.split()) == (expected.split(), [])


@pytest.mark.parametrize(
    ("typed", "expected", "old", "new"),
    [
        ("-q evaluate run data --knn", "-q probe run data --knn 20", "evaluate --knn", "probe --knn"),
        ("evaluate a b --seeds", "compare a b --seeds", "evaluate --seeds", "compare --seeds"),
        ("serve run --workers=2", "serve run --processes=2", "serve --workers", "serve --processes"),
    ],
)
def test_old_spellings_have_a_hint(typed, expected, old, new) -> None:
    arguments, (hint,) = modernize(typed.split())
    assert arguments == expected.split()
    assert [f"patchloom {old}", f"patchloom {new}"] == hint.split("`")[1::2]


def test_old_verbs_work_with_a_hint_and_are_not_listed(patchloom, tmp_path) -> None:
    done = patchloom("demo", "--epochs", "1", "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.errors
    assert "`patchloom train digits" in done.errors
    assert json.loads(done.output)["folder"] == str(tmp_path / "run")
    assert "demo" not in patchloom("--help").output


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_that_wait_sleep_before_torch_is_imported_unless_the_user_says_otherwise(variables, expected):
    code = "import sys, os; from patchloom import cli; cli._run = lambda out: print(os.environ.get('GOMP_SPINCOUNT'), "
    code += "'torch' in sys.modules) or 0; cli.main()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_"))}
    environment |= variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [expected, "False"], done.stderr


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("index CLASSIFIER PICTURES --out new --device cpu", ("new", "embedded")),
        ("export CLASSIFIER --out new.onnx", ("new-onnx", "onnx", "float32")),
        ("export CLASSIFIER --out page.html", ("page.html", "html")),
        ("prune CLASSIFIER digits --shares 0.5,0.9 --bits 4", ("ABC", "0.5, 0.9", "bits 4")),
    ],
)
def test_a_dry_run_writes_nothing(patchloom, line, facts, tmp_path, monkeypatch) -> None:
    golden = Path(__file__).parent.parent / "golden"
    places = {"CLASSIFIER": golden / "classifier", "PICTURES": golden / "pictures"}
    monkeypatch.chdir(tmp_path)
    arguments = [places.get(word, word) for word in line.split()]
    done = patchloom(*arguments, "--dry-run")
    assert (done.code, done.errors) == (0, "")
    assert missing(done.output, *facts) == []
    as_json = patchloom(*arguments, "--dry-run", "--json")
    assert json.loads(as_json.output)
    assert list(tmp_path.iterdir()) == []
