"""Training with quantized weights (Quant-Noise)."""

import pytest
import torch

import patchloom
from patchloom.engine.rounded_weights import RoundedWeights
from patchloom.layers.matrices import quantized
from patchloom.runs.checkpoints import find_checkpoint, read_checkpoint
from patchloom_runtime.errors import UsageError
from tests.messages import refused

SMALL = {"depth": 1, "dim": 16, "patch_size": 8}


def test_a_share_of_the_weights_is_rounded_and_restored() -> None:
    weights = [torch.nn.Parameter(torch.randn(60, 50)), torch.nn.Parameter(torch.randn(40, 40))]
    before = [weight.detach().clone() for weight in weights]
    rounded = RoundedWeights(weights, bits=3, share=0.25, seed=7)
    seen = []
    for step in (0, 0, 1):
        with rounded.during(step):
            seen.append([weight.detach().clone() for weight in weights])
            for weight, exact in zip(weights, before, strict=True):
                is_changed = weight != exact
                assert torch.equal(weight[is_changed], quantized(exact, 3)[is_changed])
                assert 0.2 < is_changed.float().mean() < 0.3
        assert all(torch.equal(weight, exact) for weight, exact in zip(weights, before, strict=True))
    assert torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][0], seen[2][0])


def test_gradients_are_those_at_the_rounded_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    images = torch.randn(4, 8)
    with RoundedWeights([weight], bits=2, share=1.0, seed=0).during(0):
        (images @ weight).square().sum().backward()
    at = quantized(weight.detach(), 2).requires_grad_()
    (images @ at).square().sum().backward()
    torch.testing.assert_close(weight.grad, at.grad)


def test_weights_are_restored_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    before = weight.detach().clone()
    with pytest.raises(ValueError, match="stop"), RoundedWeights([weight], bits=2, share=1.0, seed=0).during(0):
        raise ValueError("stop")
    assert torch.equal(weight, before)


def train(folder, **options):
    changes = {f"model.options.{key}": value for key, value in SMALL.items()} | options.pop("set", {})
    given = {"model": "resmlp_s12", "size": 32, "batch": 128, "epochs": 2, "init": "none"} | options
    return patchloom.train("digits", out=str(folder), device="cpu", workers=0, set=changes, **given)


def test_a_run_with_rounded_weights_resumes_exactly(tmp_path) -> None:
    bits = {"set": {"model.quantized_bits": 3}}
    train(tmp_path / "whole", **bits)
    train(tmp_path / "plain")
    train(tmp_path / "cut", **bits, stop_after="0.05s")
    train(tmp_path / "cut", **bits)
    found = (find_checkpoint(tmp_path / name, read_checkpoint).snapshot for name in ("whole", "cut", "plain"))
    whole, cut, plain = (snapshot.tensors["weights"] for snapshot in found)
    assert all(torch.equal(each, cut[name]) for name, each in whole.items())
    assert any(not torch.equal(each, plain[name]) for name, each in whole.items())


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model.quantized_bits": 1}, "quantized_bits"),
        ({"model.quantized_bits": 4, "model.trainable": "lora"}, "lora"),
    ],
)
def test_what_cannot_be_rounded_is_refused(tmp_path, changes, fact) -> None:
    with refused(UsageError, fact):
        train(tmp_path / "run", set=changes)
