"""The commands as a user types them."""

import json
import subprocess
import sys

import pytest


def patchloom(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "patchloom.cli", *arguments], capture_output=True, text=True)


def test_models_as_json() -> None:
    done = patchloom("models", "resmlp_s12", "--json")
    assert done.returncode == 0
    (row,) = json.loads(done.stdout)
    assert (row["model"], row["parameters"]) == ("resmlp_s12", 15_350_872)
    assert row["options"]["depth"] == 12


def test_models_as_a_table() -> None:
    done = patchloom("models", "mixer_b*")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if "Mixer" in line] == [
        "mixer_b32",
        "mixer_b16",
    ]
    assert "12.6 G" in done.stdout


def test_bench_as_json() -> None:
    done = patchloom("bench", "deit_ti", "--absorb", "--size", "32", "--batch", "1,2", "--seconds", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    plain, absorbed = json.loads(done.stdout)
    assert (plain["model"], absorbed["model"]) == ("deit_ti", "deit_ti absorbed")
    assert plain["images_per_second"] > 0
    assert plain["batch_size"] in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "resmpl_s12"), "error: no network is called 'resmpl_s12'. Did you mean resmlp_s12"),
        (
            ("bench", "timm:resmpl_12_224"),
            "error: timm has no network 'resmpl_12_224'. Did you mean resmlp_12_224",
        ),
        (("bench", "deit_ti", "--batch", "a,b"), "error: --batch takes numbers with commas"),
        (("models", "--sise", "3"), "error: No such option: --sise"),
        (("modles",), "error: No such command 'modles'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message) -> None:
    done = patchloom(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
