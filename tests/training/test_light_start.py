"""A run that compiles nothing does not wait for torch's compiler: two to three seconds of processor time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patchloom.engine.eager_optimizers import SGD, Adagrad, Adam, AdamW

SCRIPT = """
import json, sys
sys.argv = ["patchloom", *sys.argv[1:]]
from patchloom import cli
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code
print(json.dumps(sorted({"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules))))
"""


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="torchvision 0.25 imports the compiler")
def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    small = ["--model", "resmlp_s12", "--set", "model.options.depth=1", "--set", "model.options.dim=16"]
    line = ["train", "digits", *small, "--epochs", "1", "--batch", "512", "--device", "cpu", "--out", str(tmp_path)]
    said = subprocess.run([sys.executable, "-c", SCRIPT, *line], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1]) == []


OPERATOR = """
import sys
import torch
from patchloom.layers.kernels import operator

@operator
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

torch.library.register_fake("patchloom::doubled", torch.empty_like)
torch.library.register_autograd("patchloom::doubled", lambda _, grad: 2 * grad)
x = torch.ones(3, requires_grad=True)
doubled(x).sum().backward()
assert x.grad.tolist() == [2, 2, 2]
assert "torch._dynamo" not in sys.modules
assert torch.compile(doubled, fullgraph=True, backend="eager")(x).tolist() == [2, 2, 2]
"""


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="torchvision 0.25 imports the compiler")
def test_an_operator_of_a_kernel_imports_no_compiler_until_it_is_compiled() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", OPERATOR], check=True)


def test_eager_optimizers_are_torchs_own_in_all_they_compute() -> None:
    for make, theirs, options in (
        (AdamW, torch.optim.AdamW, {"foreach": True}),
        (Adam, torch.optim.Adam, {"foreach": True}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (Adagrad, torch.optim.Adagrad, {}),
    ):
        weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2)]
        ours, reference = make([weights[0]], lr=0.1, **options), theirs([weights[1]], lr=0.1, **options)
        for optimizer, weight in ((ours, weights[0]), (reference, weights[1])):
            for _ in range(3):
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()
            assert weight.requires_grad
        assert torch.equal(*weights)
        assert ours.state_dict()["param_groups"] == reference.state_dict()["param_groups"]
        ours.load_state_dict(reference.state_dict())
        assert type(ours).__name__ == theirs.__name__, "checkpoints name the kind"
