"""Model soups: the mean of weights, the greedy selection, and runs that cannot be averaged."""

import json

import numpy as np
import pytest
import torch

import patchloom
from patchloom.tasks.classification.soup import mean_weights
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import command

NETWORK = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4}


def train(folder, data="digits", **options):
    changes = NETWORK | options.pop("set", {})
    given = {
        "model": "resmlp_s12",
        "size": 16,
        "batch": 128,
        "epochs": 2,
        "device": "cpu",
        "workers": 0,
        "init": "none",
    }
    return patchloom.train(data, out=str(folder), set=changes, **given | options).folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs that were fine-tuned from one, and one from other random weights."""
    root = tmp_path_factory.mktemp("soups")
    start = str(train(root / "start", epochs=4))
    tuned = [train(root / f"seed{seed}", init=start, set={"seed": seed, "optim.lr": 1e-3}) for seed in (1, 2, 3)]
    return [str(run) for run in tuned], str(train(root / "other", epochs=4, set={"seed": 9}))


def test_the_mean_is_the_mean_and_counters_are_kept() -> None:
    first = {"a": torch.tensor([1.0, 2.0]), "steps": torch.tensor(7)}
    second = {"a": torch.tensor([3.0, 6.0]), "steps": torch.tensor(9)}
    mean = mean_weights([first, second])
    assert mean["a"].tolist() == [2.0, 4.0]
    assert mean["steps"].item() == 7
    assert first["a"].tolist() == [1.0, 2.0]


def test_a_uniform_soup_has_the_mean_weights_and_is_a_run(runs, tmp_path) -> None:
    tuned, _ = runs
    result = patchloom.soup(tuned, "digits", out=str(tmp_path / "soup"), uniform=True, device="cpu")
    assert set(result.used) == {"seed1", "seed2", "seed3"}
    assert result.soup_top1 == result.uniform_top1
    networks = [patchloom.load(run).model.state_dict() for run in tuned]
    for name, tensor in patchloom.load(tmp_path / "soup").model.state_dict().items():
        if tensor.is_floating_point():
            expected = np.mean([each[name].numpy() for each in networks], axis=0)
            np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)
    held_out = patchloom.evaluate(str(tmp_path / "soup"), "digits", device="cpu").values()
    assert next(iter(held_out.values()))["top1"] == pytest.approx(result.soup_top1)


def test_a_greedy_soup_leaves_out_what_hurts(runs, tmp_path) -> None:
    tuned, other = runs
    result = patchloom.soup([*tuned[:2], other], "digits", out=str(tmp_path / "soup"), device="cpu")
    assert "other" not in result.used
    assert result.soup_top1 >= max(result.top1.values())
    assert list(result.top1.values()) == sorted(result.top1.values(), reverse=True)


def test_runs_that_have_no_mean(runs, tmp_path) -> None:
    tuned, _ = runs
    wider = str(train(tmp_path / "wider", epochs=1, set={"model.options.dim": 24}))
    with pytest.raises(UsageError, match="networks"):
        patchloom.soup([tuned[0], wider], "digits", out=str(tmp_path / "soup"), device="cpu")
    with pytest.raises(UsageError, match="two"):
        patchloom.soup(tuned[:1], "digits", out=str(tmp_path / "soup"), device="cpu")
    with pytest.raises(UsageError, match="wider"):
        patchloom.soup(tuned, "digits", out=wider, device="cpu")
    assert not (tmp_path / "soup").exists()


def test_the_command_prints_a_table_or_json(runs, tmp_path, monkeypatch, capsys) -> None:
    tuned, _ = runs
    typed = ("soup", *tuned, "--data", "digits", "--device", "cpu")
    done = command([*typed, "--out", str(tmp_path / "a")], monkeypatch, capsys)
    assert done.code == 0
    assert all(name in done.output for name in ("seed1", "seed2", "seed3", "mean of all", str(tmp_path / "a")))
    done = command([*typed, "--out", str(tmp_path / "b"), "--json"], monkeypatch, capsys)
    values = json.loads(done.output)
    assert values["out"] == str(tmp_path / "b")
    assert values["top1"].keys() == {"seed1", "seed2", "seed3"}
